"""Attention both ways among the tokens of an image, which vLLM's kernels for GPUs have and its
kernel for the CPU lacks: there it is computed here, for the rows of images, in PyTorch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from support.engines import HAS_GPU


@contextmanager
def two_way_attention() -> Iterator[None]:
    """Within, engines of this process let the tokens of an image attend to each other."""
    if HAS_GPU:
        yield
        return
    from vllm.v1.attention.backends.cpu_attn import (
        CPUAttentionBackendImpl,
        CPUAttentionMetadataBuilder,
    )

    build = CPUAttentionMetadataBuilder.build
    forward = CPUAttentionBackendImpl.forward
    update = CPUAttentionBackendImpl.do_kv_cache_update

    def build_with_ranges(self: Any, prefix: int, common: Any, *args: Any, **named: Any) -> Any:
        metadata = build(self, prefix, common, *args, **named)
        metadata.image_ranges = common.mm_req_doc_ranges or {}
        return metadata

    def update_both(
        self: Any, layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor
    ) -> None:
        update(self, layer, key, value, cache, slots)
        # The kernel's own layout is of its instruction set: a second cache is plain.
        if not hasattr(self, "plain_cache"):
            count = cache.shape[0] * cache.shape[2]
            self.plain_cache = torch.zeros(2, count, *key.shape[1:], dtype=key.dtype)
        self.block_size = cache.shape[2]
        real = slots >= 0
        rows = torch.stack([key[: len(slots)][real], value[: len(slots)][real]])
        self.plain_cache[:, slots[real].long()] = rows

    def forward_both_ways(
        self: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, cache: Tensor,
        metadata: Any, output: Tensor, *args: Any, **named: Any
    ) -> Tensor:  # fmt: skip
        out = forward(self, layer, query, key, value, cache, metadata, output, *args, **named)
        if metadata is not None:
            starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
            for index, ranges in metadata.image_ranges.items():
                rows = slice(starts[index], starts[index + 1])
                blocks = metadata.block_table[index]
                _attend(self, query, output, rows, lengths[index], blocks, ranges)
        return out

    with (
        mock.patch.object(CPUAttentionMetadataBuilder, "build", build_with_ranges),
        mock.patch.object(CPUAttentionBackendImpl, "forward", forward_both_ways),
        mock.patch.object(CPUAttentionBackendImpl, "do_kv_cache_update", update_both),
    ):
        yield


def _attend(
    attention: Any,
    query: Tensor,  # [T, heads, size]
    output: Tensor,
    rows: slice,  # those of one request, the last of its `length` tokens
    length: int,
    blocks: Tensor,
    ranges: list[tuple[int, int]],  # of its images, first and last position
) -> None:
    """Write the rows of images, (causal and in the window) or in the same image."""
    places = torch.arange(length - (rows.stop - rows.start), length)
    within = [(places >= first) & (places <= last) for first, last in ranges]
    if not any(bool(inside.any()) for inside in within):
        return
    seen = torch.arange(length)
    slots = blocks[seen // attention.block_size].long() * attention.block_size
    keys, values = attention.plain_cache[:, slots + seen % attention.block_size].float()
    group = query.shape[1] // keys.shape[1]
    keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))
    mask = seen[None] <= places[:, None]
    if attention.sliding_window > 0:
        mask &= places[:, None] - seen[None] < attention.sliding_window
    for (first, last), inside in zip(ranges, within, strict=True):
        mask |= inside[:, None] & ((seen >= first) & (seen <= last))[None]
    scores = torch.einsum("thd,shd->hts", query[rows].float(), keys) * attention.scale
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    new = torch.einsum("hts,shd->thd", weights, values)
    chosen = torch.stack(within).any(0)
    target = output[rows].view(len(places), query.shape[1], -1)
    target[chosen] = new[chosen].to(output.dtype)
