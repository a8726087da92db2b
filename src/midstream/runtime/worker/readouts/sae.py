"""Rows of vectors through the encoder of a registered SAE, on the worker, after a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from midstream.plan.resolved import SaeEncoder
from midstream.runtime.worker.readouts.rank_weights import RankWeights
from midstream.runtime.worker.readouts.tiles import QueryRun
from midstream.runtime.worker.tables.device_buffers import on_device
from midstream.runtime.worker.tables.pattern_records import PatternColumns

# Of layer_norm, as SAELens has it: it is added to the standard deviation.
_EPSILON = 1e-5


class SaeReader:
    """Encodes vectors, and keeps the most active features. Everything is float32."""

    def __init__(self, weights: RankWeights, workspace: int) -> None:
        self._numbers = weights.numbers(torch.float32)
        self._workspace = workspace

    def rows(
        self, index: int, columns: PatternColumns, records: Tensor, runs: Sequence[QueryRun]
    ) -> Tensor:
        """Return a pattern's rows of features, float32 [n, size], of records [n, numbers]."""
        encoder = columns.encoder
        assert encoder is not None
        features = [[feature for feature, _ in run.keys[index]] for run in runs]
        length = torch.tensor([run.length for run in runs])
        ids = torch.tensor(features, dtype=torch.int64).view(len(runs), -1)
        chosen = on_device(ids.repeat_interleave(length, 0), records.device)
        vectors = records[:, columns.start : columns.start + columns.width]
        out = torch.empty(len(vectors), columns.size, device=vectors.device)
        # The activations, what keeps some of them, and what the largest are found in.
        step = max(1, self._workspace // (4 * 3 * encoder.features))
        for first in range(0, len(vectors), step):
            part = slice(first, first + step)
            active = self.encode(vectors[part], encoder)
            out[part] = _row(active, columns.size, chosen[part])
        return out

    def encode(self, vectors: Tensor, encoder: SaeEncoder) -> Tensor:
        """Return the activations of all features, [n, features]."""
        width, count = vectors.shape[1], encoder.features
        matrix = self._at(encoder.matrix, width * count).view(width, count)
        activations = _normalized(vectors.float(), encoder) @ matrix
        activations += self._at(encoder.bias, count)
        # Thresholds are not negative: what passes is positive.
        activations.mul_(activations > self._at(encoder.threshold, count))
        if encoder.top_k and encoder.top_k < count:
            values, ids = activations.topk(encoder.top_k, -1)
            activations = torch.zeros_like(activations).scatter_(1, ids, values)
        return activations

    def _at(self, first: int, count: int) -> Tensor:
        return self._numbers[first : first + count]


def _normalized(x: Tensor, encoder: SaeEncoder) -> Tensor:
    if encoder.centered:
        x = x - x.mean(-1, keepdim=True)
    if encoder.normalize == "constant_norm_rescale":
        norm: Tensor = x.norm(dim=-1, keepdim=True)
        x = x * (x.shape[-1] ** 0.5 / norm)
    elif encoder.normalize == "layer_norm":
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.std(-1, keepdim=True) + _EPSILON)
    return x


def _row(active: Tensor, size: int, chosen: Tensor) -> Tensor:
    values, ids = active.topk((size - 1 - chosen.shape[1]) // 2, -1)
    ids = torch.where(values > 0, ids, -1).int()
    number = (active > 0).sum(-1, keepdim=True).int()
    parts = (ids.view(torch.float32), values, active.gather(1, chosen), number.view(torch.float32))
    return torch.cat(parts, -1)
