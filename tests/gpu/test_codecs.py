"""Codecs on CUDA: the bytes that the CPU writes, and the host is never waited for."""

from __future__ import annotations

import pytest
import torch
from support.codec_rows import CODECS, DTYPES, codec


def rows_of(dtype: torch.dtype) -> torch.Tensor:
    """[64, 576] of many sizes, with ties, extremes, and rows that are not finite."""
    torch.manual_seed(0)
    rows = (torch.randn(64, 576) * torch.logspace(-6, 4, 64)[:, None]).to(dtype)
    largest = torch.finfo(dtype).max
    rows[1] = 0
    rows[2] = 2.5
    rows[3, :2] = torch.tensor([largest, -largest], dtype=dtype)
    rows[4] = torch.finfo(dtype).smallest_normal / 8 * torch.arange(576, dtype=dtype)
    rows[5, 7] = torch.nan
    rows[6, 0] = torch.inf
    return rows


@pytest.mark.parametrize("spec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_gpu_writes_the_bytes_that_a_cpu_writes(spec, dtype):
    rows = rows_of(dtype)
    expected = codec(spec).encode(rows)
    found = codec(spec).encode(rows.cuda())
    assert found.is_cuda
    if spec.startswith("cast"):
        # A NaN has many representations.
        mine, theirs = (codec(spec).decode(each, 576, dtype) for each in (found.cpu(), expected))
        assert torch.equal(mine.isnan(), theirs.isnan())
        assert torch.equal(mine.nan_to_num(7), theirs.nan_to_num(7))
        return
    if not spec.startswith("rp8"):
        assert torch.equal(found.cpu(), expected)
        return
    sketch = codec(spec).decode(found.cpu(), 576, dtype)
    other = codec(spec).decode(expected, 576, dtype)
    step = (other.amax(1) - other.amin(1)) / 255
    usual = torch.arange(64) > 6
    assert ((sketch - other).abs()[usual] <= 1.01 * step[usual, None]).all()
    assert sketch[5:7].isnan().all()


@pytest.mark.parametrize("spec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_encoding_does_not_wait_for_the_gpu(spec, dtype):
    rows = rows_of(dtype).cuda()
    codec(spec).encode(rows[:0])  # rp8 makes its projection
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        codec(spec).encode(rows)
        codec(spec).encode(rows[:1])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("spec", CODECS)
def test_a_gpu_reads_as_a_cpu_reads(spec):
    data = codec(spec).encode(rows_of(torch.bfloat16))
    expected = codec(spec).decode(data, 576, torch.bfloat16)
    found = codec(spec).decode(data.cuda(), 576, torch.bfloat16).cpu()
    assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))
