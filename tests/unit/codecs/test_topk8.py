"""`topk8` keeps the k largest, those and no others."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import codec_page
from support.codec_rows import DTYPES, finite_rows

from midstream.codecs import Topk8
from midstream.errors import SpecError


def hexed(data: torch.Tensor) -> str:
    return bytes(data[0].tolist()).hex()


def test_the_bytes_of_topk8():
    rows = torch.tensor([[0.5, -255.0, 3.0, 0.0, 2.0]])
    #       scale 257/255 up  zero −255  q: −255, 2  indices 1, 2 are not 4
    data = Topk8(k=2).encode(rows)
    assert hexed(data[:, 4:]) == "00007fc3" + "00ff" + "01000200"
    assert hexed(data[:, :4]) == hexed(torch.tensor([[258 / 255]]).view(torch.uint8))
    # Where an index may not fit 16 bits, it has 32.
    wide = torch.zeros(1, 65537)
    wide[0, 65536] = -2
    assert hexed(Topk8(k=2).encode(wide)) == "8180003c" + "000000c0" + "ff00" + "0000000000000100"
    exact = torch.zeros(1, 65536)
    exact[0, 65535] = -2
    assert hexed(Topk8(k=2).encode(exact))[-8:] == "0000ffff"


def test_of_equal_magnitudes_the_first_are_kept_whatever_their_sign():
    for dtype in DTYPES.values():
        rows = torch.tensor([[1, -2, 2, -2, 2, 1, -2]], dtype=dtype)
        assert Topk8(k=3).indices(Topk8(k=3).encode(rows), 7).tolist() == [[1, 2, 3]]
        assert Topk8(k=6).indices(Topk8(k=6).encode(rows), 7).tolist() == [[0, 1, 2, 3, 4, 6]]
        zeros = torch.tensor([[0.0, -0.0, 0.0, -0.0]], dtype=dtype)
        assert Topk8(k=2).indices(Topk8(k=2).encode(zeros), 4).tolist() == [[0, 1]]


@given(finite_rows(), st.data())
def test_topk8_is_what_the_page_says_byte_by_byte(rows, data):
    hidden = rows.shape[1]
    codec = Topk8(k=data.draw(st.integers(1, hidden)))
    encoded = codec.encode(rows)
    values = rows.float().numpy()
    found = [bytes(row.tolist()) for row in encoded]
    assert found == [codec_page.topk(row, codec.k) for row in values]
    decoded = codec.decode(encoded, hidden, rows.dtype).numpy()
    expected = [codec_page.read_topk(row, codec.k, hidden) for row in found]
    assert (decoded == np.stack(expected)).all()


def test_k_may_be_the_whole_width_and_not_more():
    rows = torch.randn(2, 5)
    assert Topk8(k=5).encode(rows).shape == (2, 8 + 15)
    for use in (lambda: Topk8(k=6).encode(rows), lambda: Topk8(k=6).row_bytes(5, rows.dtype)):
        with pytest.raises(SpecError, match=r"codec\.k: expected at most 5, the width of the ve"):
            use()
