"""`raw` keeps every bit; `full8` keeps every value to half a step."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import codec_page
from support.codec_rows import DTYPES, finite_rows, from_bits

from midstream.codecs import Full8, Raw

MAX = torch.finfo(torch.float32).max
TINY = 2.0**-149


def full8(*values: float) -> tuple[str, list[float]]:
    """The bytes of a float32 row, in hex, and what they read."""
    data = Full8().encode(torch.tensor([values], dtype=torch.float32))
    return hexed(data), Full8().decode(data, len(values), torch.float32)[0].tolist()


def hexed(data: torch.Tensor) -> str:
    return bytes(data[0].tolist()).hex()


def test_raw_is_the_bytes_of_the_dtype():
    for dtype, expected in (
        ("float32", "0000803f000020c00000c07f"),
        ("bfloat16", "803f20c0c07f"),
        ("float16", "003c00c1007e"),
    ):
        rows = torch.tensor([[1.0, -2.5, torch.nan]], dtype=DTYPES[dtype])
        assert hexed(Raw().encode(rows)) == expected, dtype


@given(st.data())
def test_raw_comes_back_bit_by_bit_whatever_the_bits(data):
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16]))
    bits = data.draw(st.lists(st.integers(0, 65535), min_size=1, max_size=8))
    rows = from_bits([bits], dtype)
    found = Raw().decode(Raw().encode(rows), len(bits), dtype)
    assert torch.equal(found.view(torch.int16), rows.view(torch.int16))


def test_raw_copies_nothing_when_it_need_not():
    rows = torch.randn(3, 5).bfloat16()
    data = Raw().encode(rows)
    assert data.data_ptr() == rows.data_ptr()
    assert Raw().decode(data, 5, torch.bfloat16).data_ptr() == rows.data_ptr()


def test_the_bytes_of_full8():
    for values, scale, zero, steps in (
        ((0.0, 255.0, 1.0, 100.4), "0000803f", "00000000", "00ff0164"),
        ((-1.0, 254.0, 0.5, 1.5), "0000803f", "000080bf", "00ff0202"),  # halves to the even
        ((7.5, 7.5, 7.5), "00000000", "0000f040", "000000"),
        ((0.0, 0.0), "00000000", "00000000", "0000"),
        ((-0.0, -0.0), "00000000", "00000000", "0000"),
        ((-0.0, 510.0), "00000040", "00000000", "00ff"),
        ((1.0, torch.nan), "00000000", "0000c07f", "0000"),
        ((torch.inf, 1.0), "00000000", "0000c07f", "0000"),
        # 1/255 is not a float32: the next above it.
        ((0.0, 1.0), "8180803b", "00000000", "00ff"),
        # The range is beyond float32; its 255th part is not, and happens to be exact.
        ((-MAX, MAX, 0.0), "8080007c", "ffff7fff", "00ff80"),
        # The smallest denormal is its own step.
        ((0.0, TINY, 3 * TINY), "01000000", "00000000", "000103"),
    ):
        assert full8(*values)[0] == scale + zero + steps, values


def within_the_bound(rows: torch.Tensor) -> None:
    """|x − x̂| ≤ scale · (1/2 + 2⁻¹⁴) + |x̂| · 2⁻²⁴, and float32's least denormal."""
    data = Full8().encode(rows)
    Full8().check(data, rows.shape[1], rows.dtype)
    found = Full8().decode(data, rows.shape[1], rows.dtype).double()
    scale = data[:, :4].reshape(-1).view(torch.float32).double()[:, None]
    bound = scale * (0.5 + 2**-14) + found.abs() * 2**-24 + TINY / 2
    assert ((found - rows.double()).abs() <= bound).all()
    span = rows.double().amax(1) - rows.double().amin(1)
    least = span / 255
    assert (scale.squeeze(1) >= least).all()
    assert (scale.squeeze(1) <= least * (1 + 2**-23) + TINY).all()


@given(finite_rows())
def test_no_value_is_off_by_more_than_half_a_step_whatever_the_row(rows):
    within_the_bound(rows)


def test_no_value_of_a_usual_row_is_off_by_more_than_half_a_step():
    for dtype in DTYPES.values():
        for size in (1e-6, 1.0, 300.0):
            for offset in (0.0, 1e3):
                within_the_bound((torch.randn(64, 1024) * size + offset).to(dtype))


@given(finite_rows())
def test_full8_is_what_the_page_says_byte_by_byte(rows):
    data = Full8().encode(rows)
    values = rows.float().numpy()
    assert [bytes(row.tolist()) for row in data] == [codec_page.affine(row) for row in values]
    found = Full8().decode(data, rows.shape[1], rows.dtype).numpy()
    expected = [codec_page.read_affine(bytes(row.tolist())) for row in data]
    assert (found == np.stack(expected)).all()
