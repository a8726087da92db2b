"""Attention weights of chosen queries over keys in memory, and their reductions, in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Returns keys [begin, stop) of each request, [requests, stop − begin, key-value heads, head_dim].
Keys = Callable[[int, int], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionForm:
    """What attention of a layer does with the products of queries and keys."""

    scale: float
    soft_cap: float = 0.0  # s becomes c · tanh(s / c); 0: it does not
    window: int = 0  # keys that a query sees at most, its own included; 0: all before it
    # ALiBi, float32 [heads]: slope · (key's − query's position) is added
    slopes: Tensor | None = None
    sinks: Tensor | None = None  # float32 [heads], logit of a key without a value, in the softmax

    def of_heads(self, heads: Tensor) -> AttentionForm:
        slopes = None if self.slopes is None else self.slopes[heads]
        sinks = None if self.sinks is None else self.sinks[heads]
        return AttentionForm(self.scale, self.soft_cap, self.window, slopes, sinks)


@dataclass(frozen=True, slots=True, eq=False)
class Queries:
    """Queries of one layer, as attention reads them."""

    vectors: Tensor  # [requests, rows, heads, head_dim]
    positions: Tensor  # int64 [requests, rows]
    key_heads: Tensor | None  # int64 [heads]; None: equally many neighbours share a key-value head


def scores(
    queries: Queries, keys: Keys, span: range, form: AttentionForm, out: Tensor | None = None
) -> Tensor:
    """Return scores of keys of a span, [requests, rows, heads, keys]: products, changed as
    attention does; −∞: not seen. The span's step is how many keys are read at a time. `out` is to
    be written, if given.
    """
    vectors, key_heads = queries.vectors, queries.key_heads
    begin, stop = span.start, span.stop
    scores = out
    if scores is None:
        scores = vectors.new_empty((*vectors.shape[:3], stop - begin), dtype=torch.float32)
    scaled = vectors.float() * form.scale
    for first in span:
        last = min(first + span.step, stop)
        some = keys(first, last)
        if key_heads is None:
            grouped = scaled.unflatten(2, (some.shape[2], -1))
            products = torch.einsum("nrgpd,nkgd->nrgpk", grouped, some.float()).flatten(2, 3)
        else:
            some = some[:, :, key_heads].float()
            products = torch.einsum("nrhd,nkhd->nrhk", scaled, some)
        scores[..., first - begin : last - begin] = products
    if form.soft_cap:
        scores.div_(form.soft_cap).tanh_().mul_(form.soft_cap)
    distance = queries.positions[:, :, None] - torch.arange(begin, stop, device=vectors.device)
    if form.slopes is not None:
        scores -= form.slopes[:, None] * distance[:, :, None]
    seen = distance >= 0
    if form.window:
        seen &= distance < form.window
    # Not by adding −∞: what the cache holds after the last key may be anything.
    return scores.masked_fill_(~seen[:, :, None], -torch.inf)


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return weights, [layers, requests, rows, heads, keys], of scores; sinks: [layers, heads]."""
    if sinks is None:
        return torch.softmax(scores, -1)
    sinks = sinks[:, None, None, :, None].expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, sinks), -1), -1)[..., :-1]


def top_keys(weights: Tensor, begin: int, k: int) -> Tensor:
    """Return [..., 2k]: int32 bits of k positions (−1: weight 0), and the k largest weights."""
    count = min(k, weights.shape[-1])
    values, places = weights.topk(count, -1)
    ids = torch.where(values > 0, places + begin, -1)
    # A weight that is not a number stays with its key.
    ids = torch.where(values.isnan(), places + begin, ids).int()
    if count < k:
        ids = torch.nn.functional.pad(ids, (0, k - count), value=-1)
        values = torch.nn.functional.pad(values, (0, k - count))
    return torch.cat((ids.view(torch.float32), values), -1)


def mass(weights: Tensor, chosen: Tensor) -> Tensor:
    """Return the weight of `chosen` keys, bool [(layers,) requests, keys]: float32 [..., 1]."""
    return torch.where(chosen[..., None, None, :], weights, 0.0).sum(-1, keepdim=True)


def entropy(weights: Tensor) -> Tensor:
    """Return −Σ w · ln w in nats, float32 [..., 1]."""
    return -torch.xlogy(weights, weights).sum(-1, keepdim=True)


def full(weights: Tensor, begin: int, size: int, outside: float = 0.0) -> Tensor:
    """Return weights or scores of keys [0, size), float32 [..., size]."""
    after = size - begin - weights.shape[-1]
    return torch.nn.functional.pad(weights, (begin, after), value=outside)


def chosen_keys(
    ranges: Sequence[Sequence[tuple[int, int | None]]], begin: int, stop: int
) -> Tensor:
    """Return which keys [begin, stop) are in ranges, bool [requests, keys] on the host."""
    mask = torch.zeros(len(ranges), stop - begin, dtype=torch.bool)
    for row, mine in enumerate(ranges):
        for first, last in mine:
            end = stop if last is None else min(last, stop)
            mask[row, max(0, first - begin) : max(0, end - begin)] = True
    return mask
