"""Triton kernel that copies the results of a step into pinned memory, which a device can write to
by its address on the host.
"""

from __future__ import annotations

import triton
import triton.language as tl

PROGRAMS, BLOCK = 8, 1024  # 64 KiB are two rounds of words


@triton.jit
def _copy_words(source, target, first, count, every, lanes):
    """Copy words, those of this program in each round."""
    for begin in range(first, count, every):
        at = begin + lanes
        inside = at < count
        tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "num_scores", "num_pieces"])
def copy_kernel(
    tally,  # int32, 4 words a token
    host_tally,
    scores,  # float32
    host_scores,
    pieces,  # int32, 4 words each
    host_pieces,
    num_tokens,
    num_scores,
    num_pieces,
    block: tl.constexpr,
):
    """Copy a step's tally, its scores, and its rows in pieces of 16 bytes; clear the tally. All
    addresses are multiples of 16.
    """
    lanes = tl.arange(0, block)
    first, every = tl.program_id(0) * block, tl.num_programs(0) * block
    for begin in range(first, num_tokens * 4, every):
        at = begin + lanes
        inside = at < num_tokens * 4
        tl.store(host_tally + at, tl.load(tally + at, mask=inside), mask=inside)
        tl.store(tally + at, 0, mask=inside)
    _copy_words(scores, host_scores, first, num_scores, every, lanes)
    _copy_words(pieces, host_pieces, first, num_pieces * 4, every, lanes)
