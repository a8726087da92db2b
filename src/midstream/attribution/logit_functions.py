"""Metrics as differentiable functions of logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from midstream.attribution.prompts import PromptReader
from midstream.errors import SpecError
from midstream.validation import kind

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LogitFunction:
    """A metric as a function of logits.

    Attributes:
        function: takes logits, float32 [T, V]; returns a tensor of one number.
        last_only: whether it reads the last token's logits only; it then gets [1, V].
    """

    function: Callable[[Tensor], Tensor]
    last_only: bool

    @staticmethod
    def of(metric: Any, prompts: PromptReader) -> LogitFunction:
        if callable(metric):
            return LogitFunction(metric, False)
        raise SpecError("metric", f"expected a metric, got {kind(metric)}")
