"""Metrics as differentiable functions of logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from midstream.errors import SpecError
from midstream.lab.sweep.metrics import KL, LogitDiff, LogProb, Metric, Recovered, read_metric
from midstream.validation import at, kind


@dataclass(frozen=True, slots=True)
class LogitFunction:
    """A metric as a function of logits."""

    function: Callable[[Tensor], Tensor]  # of float32 [T, V]; returns one number
    last_only: bool  # it gets [1, V], the last token's

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the metric's value as a tensor without dimensions."""
        value: Any = self.function(logits)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            shape = f" of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise SpecError(
                "metric",
                "expected a function of the logits that returns a tensor of one number, got "
                f"{kind(value)}{shape}",
            )
        if not torch.isfinite(value).all():
            raise SpecError("metric", f"its value is {float(value.detach())}")
        return value.reshape(())


def read_with_ids(metric: Any, id_of: Callable[[str], int], vocabulary: int) -> Any:
    """Read a metric, with the ids of its tokens by `id_of`. A function is returned as it is."""
    if callable(metric) and not isinstance(metric, Metric):
        return metric
    with at("metric"):
        parsed = read_metric(metric).with_ids(id_of)
        for token in _ids(parsed):
            if token >= vocabulary:
                raise SpecError("", f"token ids go from 0 to {vocabulary - 1}, got {token}")
    return parsed


def logit_function(metric: Any, clean: Tensor | None = None) -> LogitFunction:
    """Return a metric as a function of logits; of `Recovered` the metric that it is of."""
    if not isinstance(metric, Metric):
        return LogitFunction(metric, False)
    if isinstance(metric, LogProb):
        (token,) = _ids(metric)
        return LogitFunction(lambda logits: logits[-1].log_softmax(-1)[token], True)
    if isinstance(metric, LogitDiff):
        a, b = _ids(metric)
        return LogitFunction(lambda logits: logits[-1, a] - logits[-1, b], True)
    if clean is None:
        raise SpecError(
            "metric",
            f"{type(metric).__name__} compares a run with a clean one; give LogProb(token), "
            "LogitDiff(a, b), or a function of the logits",
        )
    if isinstance(metric, Recovered):
        return logit_function(metric.metric, clean)
    assert isinstance(metric, KL)
    known = clean.log_softmax(-1)

    def divergence(logits: Tensor) -> Tensor:
        return (known.exp() * (known - logits[-1].log_softmax(-1))).sum()

    return LogitFunction(divergence, True)


def _ids(metric: Metric) -> list[int]:
    return [int(token) for token in metric.tokens]
