"""A forward pass whose sums do not depend on which tokens share a step, so that the scores of a
cached and of a computed prompt are comparable bit by bit. On a CPU they depend on it in two places:
vLLM's attention adds in an order that depends on where a step begins, and PyTorch divides an
activation among threads, whose last elements have another `exp`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def same_sums() -> Iterator[None]:
    """Within, engines of this process, which have started, attend by `_attend` in one thread."""
    threads = torch.get_num_threads()
    # vLLM replaces torch's own function by one that does nothing.
    set_threads: Any = torch._C.set_num_threads  # type: ignore[attr-defined]
    set_threads(1)
    try:
        with mock.patch.multiple(
            "vllm._custom_ops",
            cpu_attn_reshape_and_cache=_keep,
            cpu_attention_with_kv_cache=_attend,
        ):
            yield
    finally:
        set_threads(threads)


def _keep(
    key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any, *_: Any, **__: Any
) -> None:
    """Write keys and values [tokens, heads, size] to their slots."""
    size = key_cache.shape[2]
    slots = slot_mapping[: len(key)]
    for cache, rows in ((key_cache, key), (value_cache, value)):
        cache[slots // size, :, slots % size] = rows[: len(slots)]


def _attend(**named: Any) -> None:
    """Write the attention of queries [tokens, heads, size]: of each over all blocks of its request,
    where what comes after it has the weight 0. So the number of terms of a sum is always the same.
    """
    assert named["causal"]
    query, output = named["query"], named["output"]
    edges = named["query_start_loc"].tolist()
    for request, length in enumerate(named["seq_lens"].tolist()):
        start, stop = edges[request], edges[request + 1]
        rows = query[start:stop]
        blocks = named["block_table"][request].long()
        keys, values = (
            named[name][blocks].transpose(0, 1).flatten(1, 2)
            for name in ("key_cache", "value_cache")
        )  # [heads, slots, size]
        repeats = rows.shape[1] // keys.shape[0]
        slots = torch.arange(keys.shape[1])
        keys, values = (
            part.repeat_interleave(repeats, 0).where(slots[:, None] < length, 0.0)
            for part in (keys, values)
        )
        logits = (rows[:, :, None] * keys).sum(-1) * named["scale"]
        ahead = slots > torch.arange(length - len(rows), length)[:, None]
        weights = logits.masked_fill(ahead[:, None], -torch.inf).softmax(-1)
        output[start:stop] = (weights[..., None] * values).sum(2).view_as(output[start:stop])
