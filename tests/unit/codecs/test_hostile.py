"""Bytes that no encoder wrote are refused by name, and never read."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.codec_rows import LOSSY, codec

from midstream.codecs import Full8, Topk8
from midstream.errors import CodecError

HIDDEN = 10
NAN, INF = float("nan"), float("inf")


def spoiled(spec: str, offset: int, written: bytes) -> torch.Tensor:
    """Three rows of a codec, whose second has other bytes at an offset."""
    data = codec(spec).encode(torch.randn(3, HIDDEN))
    data[1, offset : offset + len(written)] = torch.tensor(list(written), dtype=torch.uint8)
    return data


def refused(spec: str, data: torch.Tensor, problem: str) -> None:
    for method in (codec(spec).check, codec(spec).decode):
        with pytest.raises(CodecError, match=f"^{spec}: row 1: {problem}"):
            method(data, HIDDEN, torch.float32)


@pytest.mark.parametrize("spec", LOSSY)
def test_scales_and_zeros_that_no_row_has_are_refused(spec):
    for scale, zero, problem in (
        (NAN, 0.0, "the scale is not a finite number"),
        (-INF, 0.0, "the scale is not a finite number"),
        (NAN, NAN, "the scale is not a finite number"),
        (-1.0, 0.0, "the scale is negative"),
        (-0.0, 0.0, "the scale is negative"),
        (1.0, NAN, "the zero is not a finite number"),
        (1.0, INF, "the zero is not a finite number"),
        (0.0, -INF, "the zero is not a finite number"),
        (2e38, 0.0, "the values exceed float32's range"),
        (3e36, 3e38, "the values exceed float32's range"),
        (0.0, 1.0, "the scale is 0, but the quantised values are not"),
        (0.0, NAN, "the scale is 0, but the quantised values are not"),
    ):
        refused(spec, spoiled(spec, 0, struct.pack("<ff", scale, zero)), problem)


def test_only_the_one_nan_is_the_mark():
    for bits in ("0100c07f", "0000c0ff", "0100807f"):
        data = Full8().encode(torch.full((3, HIDDEN), NAN))
        data[1, 4:8] = torch.tensor(list(bytes.fromhex(bits)), dtype=torch.uint8)
        refused("full8", data, "the zero is not a finite number")


def test_indices_out_of_range_out_of_order_or_there_twice_are_refused():
    for indices, problem in (
        ((0, 1, HIDDEN), "an index is not below 10"),
        ((65535, 1, 2), "an index is not below 10"),
        ((1, 1, 2), "the indices do not ascend"),
        ((2, 1, 0), "the indices do not ascend"),
        ((0, 3, 3), "the indices do not ascend"),
    ):
        data = spoiled("topk8:k=3", 11, struct.pack("<HHH", *indices))
        refused("topk8:k=3", data, problem)


def test_indices_of_32_bits_are_held_to_the_width_too():
    found = Topk8(k=1)
    data = found.encode(torch.zeros(1, 70000))
    for index, well in ((69999, True), (70000, False), (2**32 - 1, False), (2**31, False)):
        data[0, 9:] = torch.tensor(list(struct.pack("<I", index)), dtype=torch.uint8)
        if well:
            found.check(data, 70000, torch.float32)
            continue
        with pytest.raises(CodecError, match="an index is not below 70000"):
            found.decode(data, 70000, torch.float32)


@pytest.mark.parametrize("spec", LOSSY)
@given(data=st.data())
def test_any_bytes_are_refused_or_read_without_an_infinity(spec, data):
    width = codec(spec).row_bytes(HIDDEN, torch.float32)
    raw = data.draw(st.binary(min_size=width, max_size=width))
    row = torch.tensor([list(raw)], dtype=torch.uint8)
    try:
        found = codec(spec).decode(row, HIDDEN, torch.float32)
    except CodecError:
        return
    marked = raw[:8].hex() == "000000000000c07f"
    assert found.isnan().all() if marked else found.isfinite().all()
