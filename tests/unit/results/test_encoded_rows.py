"""Rows in pieces: as one tensor, encoded and decoded."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from midstream.codecs import Codec, Raw, parse_codec
from midstream.results.activations import Activations
from midstream.results.encoded_rows import Rows, Scattered

HIDDEN = 16
CODECS = ["raw", "full8", "rp8:k=4,seed=0", "topk8:k=3"]


def pieces(codec: Codec, values: torch.Tensor, lengths: list[int]) -> tuple[torch.Tensor, ...]:
    """[n, taps, hidden] as encoded chunks of these lengths."""
    width = codec.row_bytes(HIDDEN, values.dtype)
    encoded = codec.encode(values.reshape(-1, HIDDEN)).view(*values.shape[:2], width)
    return tuple(encoded.split(lengths))


@given(
    st.sampled_from(CODECS),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.integers(1, 3),
    st.data(),
)
def test_pieces_are_the_rows_in_order_whatever_the_codec(name, dtype, lengths, taps, data):
    codec = parse_codec(name)
    seed = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    values = torch.randn(sum(lengths), taps, HIDDEN, generator=seed).to(dtype)
    place = data.draw(st.integers(0, taps - 1))
    chosen = None
    if sum(lengths) and data.draw(st.booleans()):
        index = st.lists(st.integers(0, sum(lengths) - 1), unique=True)
        chosen = torch.tensor(data.draw(index), dtype=torch.int64)
    chunks = pieces(codec, values, lengths)
    rows = Rows(codec, HIDDEN, dtype, chunks, (place,) * len(chunks), chosen)
    mine = torch.cat(chunks)[:, place]
    expected = (mine if chosen is None else mine[chosen]).contiguous()
    assert len(rows) == len(expected)
    assert torch.equal(rows.encoded(), expected)
    assert torch.equal(rows.decoded(), codec.decode(expected, HIDDEN, dtype))


def test_no_rows_are_as_wide_as_some():
    for name in CODECS:
        codec = parse_codec(name)
        rows = Rows(codec, HIDDEN, torch.bfloat16, (), ())
        assert len(rows) == rows.decoded().shape[0] == 0
        assert rows.encoded().shape == (0, codec.row_bytes(HIDDEN, torch.bfloat16))
        assert (name == "raw") == (rows.decoded().dtype == torch.bfloat16)


def test_raw_rows_in_one_piece_are_not_copied():
    memory = torch.arange(3 * 2 * HIDDEN, dtype=torch.float32)
    chunk = memory.view(torch.uint8).view(3, 2, -1)
    rows = Rows(Raw(), HIDDEN, torch.float32, (chunk,), (1,))
    assert rows.decoded().untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
    rows.decoded()[0, 0] = -1
    assert memory[HIDDEN] == -1


def test_activations_of_tensors_are_raw_and_have_their_bytes():
    values = torch.randn(4, HIDDEN).bfloat16()
    positions = torch.arange(4)
    found = Activations({("resid_post", 1): values}, {("resid_post", 1): positions}, positions)
    assert found.codec == Raw()
    assert found["resid_post", 1] is values
    assert torch.equal(found.encoded("resid_post", 1), Raw().encode(values))
    with pytest.raises(KeyError, match="was not captured"):
        found.encoded("resid_post", 2)


def test_activations_decode_what_is_looked_at_once():
    codec = parse_codec("full8")
    rows = Rows(codec, HIDDEN, torch.float32, pieces(codec, torch.randn(5, 1, HIDDEN), [5]), (0,))
    positions = torch.arange(5)
    found = Activations({("resid_post", 0): rows}, {("resid_post", 0): positions}, positions)
    assert found.codec == codec
    assert found["resid_post", 0] is found["resid_post", 0]
    assert found["resid_post", 0].shape == (5, HIDDEN)
    assert "5 rows of 16, float32" in repr(found)


@given(st.lists(st.integers(0, 60), max_size=8), st.integers(1, 3), st.integers(1, 5), st.data())
def test_scattered_records_are_read_from_where_they_lie(offsets, taps, width, data):
    memory = torch.randint(256, (80,), dtype=torch.uint8)
    records = Scattered(memory.numpy(), np.array(offsets, np.int64), taps, width)
    expected = [memory[start : start + taps * width].view(taps, width) for start in offsets]
    nothing = torch.zeros(0, taps, width, dtype=torch.uint8)
    whole = torch.stack(expected) if expected else nothing
    place = data.draw(st.integers(0, taps - 1))
    assert len(records) == len(offsets)
    assert torch.equal(records.records(), whole)
    assert torch.equal(records.of(place), whole[:, place])
    # They are copies: what lies there is the worker's again one day.
    memory.zero_()
    assert torch.equal(records.of(place), torch.zeros_like(whole[:, place]))


def test_records_that_would_lie_outside_of_their_memory_are_refused():
    memory = torch.zeros(80, dtype=torch.uint8)
    for offset in (-1, 75):
        with pytest.raises(ValueError, match="outside of a memory of 80 bytes"):
            Scattered(memory.numpy(), np.array([0, offset]), 2, 3)


def test_scattered_rows_and_those_in_one_piece_are_rows_in_order():
    values = torch.randn(5, 2, HIDDEN)
    encoded = Raw().encode(values.reshape(-1, HIDDEN)).view(5, 2, -1)
    memory, size = encoded.flatten(), encoded[0].numel()
    chunks = (encoded[:2], Scattered(memory.numpy(), np.array([4, 2, 3]) * size, 2, size // 2))
    rows = Rows(Raw(), HIDDEN, torch.float32, chunks, (1, 1))
    assert len(rows) == 5
    assert torch.equal(rows.decoded(), values[[0, 1, 4, 2, 3], 1])
