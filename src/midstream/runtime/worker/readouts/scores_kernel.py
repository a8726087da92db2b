"""Scores of queries against keys in a paged cache: a Triton kernel, and its launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

KEYS = 64  # keys of a program
# Sizes that change from step to step, for which no kernel of their own is compiled.
_VARYING = (
    "q_run", "q_row", "q_head", "table_row", "k_block", "rows", "row_blocks", "heads", "begin",
    "stop", "window",
)  # fmt: skip


@triton.jit(do_not_specialize=_VARYING)
def scores_kernel(
    queries, keys, table, requests, positions, key_heads, slopes, out,
    q_run, q_row, q_head, table_row, k_block, k_token, k_head, k_dim,
    rows, row_blocks, heads, begin, stop, window, scale, cap,
    size: tl.constexpr, dim: tl.constexpr, padded: tl.constexpr,
    has_cap: tl.constexpr, has_slopes: tl.constexpr,
    block_rows: tl.constexpr, block_keys: tl.constexpr,
):  # fmt: skip
    """Write the scores of a tile; see `scores_triton`."""
    head = tl.program_id(1)
    run = (tl.program_id(2) // row_blocks).to(tl.int64)
    row = tl.program_id(2) % row_blocks * block_rows + tl.arange(0, block_rows)
    is_row = row < rows
    at = tl.load(positions + run * rows + row, mask=is_row, other=-1)
    first = begin + tl.program_id(0) * block_keys
    key = first + tl.arange(0, block_keys)
    is_key = key < stop
    tile = tl.full((block_rows, block_keys), float("-inf"), tl.float32)
    # A tile without a key that a row sees is not read.
    if first <= tl.max(at, 0):
        column = tl.arange(0, padded)
        is_column = column < dim
        block = tl.load(
            table + tl.load(requests + run) * table_row + key // size, mask=is_key, other=0
        )
        place = block.to(tl.int64) * k_block + key % size * k_token
        place += tl.load(key_heads + head) * k_head
        key_vectors = tl.load(
            keys + place[None, :] + column[:, None] * k_dim,
            mask=is_column[:, None] & is_key[None, :],
            other=0.0,
        )
        query = tl.load(
            queries + run * q_run + row[:, None] * q_row + head * q_head + column[None, :],
            mask=is_row[:, None] & is_column[None, :],
            other=0.0,
        )
        # Numbers of fp8 are numbers of the queries' dtype too.
        scores = tl.dot(query, key_vectors.to(query.dtype), input_precision="ieee") * scale
        if has_cap:
            scores = cap * (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0)
        distance = at[:, None] - key[None, :]
        if has_slopes:
            scores -= tl.load(slopes + head) * distance.to(tl.float32)
        seen = (distance >= 0) & is_key[None, :]
        seen &= (window == 0) | (distance < window)
        # Not by adding −∞: what the cache holds after the last key may be anything.
        tile = tl.where(seen, scores, tile)
    width = stop - begin
    place = ((run * rows + row[:, None]) * heads + head) * width + (key - begin)[None, :]
    tl.store(out + place, tile, mask=is_row[:, None] & is_key[None, :])


def scores_triton(
    queries: Tensor,  # [runs, rows, heads, head_dim], of the cache's dtype; of any where it is fp8
    positions: Tensor,  # int64 [runs, rows], contiguous
    keys: Tensor,  # the cache's, [blocks, tokens, key-value heads, head_dim], a view
    table: Tensor,  # integers [requests, blocks]
    requests: Tensor,  # int64 [runs], row of `table` of each run
    key_heads: Tensor,  # int64 [heads], key-value head of each query head
    begin: int,  # position of the first key; no query may see an earlier one
    stop: int,  # of the last + 1, likewise
    out: Tensor,  # float32 [runs, rows, heads, stop − begin], contiguous, to be written
    *,
    scale: float,
    soft_cap: float,
    window: int,
    slopes: Tensor | None,  # float32 [heads]
) -> None:
    """Write scores: products of queries and keys, changed as attention does; −∞: not seen."""
    runs, rows, heads, dim = queries.shape
    if not out.numel():
        return
    queries = queries if queries.stride(3) == 1 else queries.contiguous()
    # `tl.dot` takes sixteen rows or more.
    block_rows = min(max(16, triton.next_power_of_2(rows)), 64)
    row_blocks = triton.cdiv(rows, block_rows)
    with torch.cuda.device_of(keys):
        scores_kernel[(triton.cdiv(stop - begin, KEYS), heads, runs * row_blocks)](
            queries, keys, table, requests, positions, key_heads,
            out if slopes is None else slopes, out,
            *queries.stride()[:3], table.stride(0), *keys.stride(),
            rows, row_blocks, heads, begin, stop, window, scale, soft_cap,
            size=keys.shape[1], dim=dim, padded=max(16, triton.next_power_of_2(dim)),
            has_cap=soft_cap != 0, has_slopes=slopes is not None,
            block_rows=block_rows, block_keys=KEYS,
        )  # fmt: skip
