"""Logits of one completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from midstream.results.arrays import array_of, from_base64, to_base64

if TYPE_CHECKING:
    from torch import Tensor

    from midstream.plan.readouts.logits import Logits
    from midstream.plan.resolved import ResolvedCapture
    from midstream.results.activations import Activations


@dataclass(frozen=True, slots=True, eq=False)
class LogitRows:
    """What a `Logits` returned.

    Attributes:
        values: float32 [positions, n], the logits: of `top`, descending; of `tokens`, in the order
            in which these were given; of all tokens, by id.
        ids: int64 [positions, n], the token of each.
        logsumexp: float32 [positions], ln Σ exp(logit) over the whole vocabulary.
        positions: int64 [positions], ascending. Row p has the logits of token p + 1.
    """

    rows_field: ClassVar[str] = ""
    about: ClassVar[str] = "Logits of the positions asked for."
    json_type: ClassVar[str] = "object"
    fewer: ClassVar[str] = "fewer positions or tokens"

    values: Tensor
    ids: Tensor
    logsumexp: Tensor
    positions: Tensor

    @staticmethod
    def decode(
        rows: Activations, readouts: Sequence[tuple[ResolvedCapture, Logits]]
    ) -> LogitRows | None:
        """Return what read-outs have among the rows of a completion; None: they have none."""
        for capture, asked in readouts:
            if capture.taps[0] in rows.counts():
                return _logits_of(rows, capture, asked)
        return None

    @property
    def logprobs(self) -> Tensor:
        """Natural logarithms of the tokens' probabilities, float32 [positions, n]."""
        return self.values - self.logsumexp[:, None]

    def __len__(self) -> int:
        """Return the number of positions."""
        return len(self.positions)

    def __repr__(self) -> str:
        return f"LogitRows({self.values.shape[0]} positions × {self.values.shape[1]} tokens)"

    @property
    def nbytes(self) -> int:
        """Bytes of the JSON form's numbers, before base64."""
        return 4 * (2 * self.values.shape[0] * self.values.shape[1] + len(self))

    def to_json(self) -> dict[str, Any]:
        """Return an object with `positions`, `shape`, and as little-endian bytes in base64
        `values` and `logsumexp`, float32, and `ids`, int32.
        """
        return {
            "positions": self.positions.tolist(),
            "shape": list(self.values.shape),
            "values": to_base64(self.values, "<f4"),
            "ids": to_base64(self.ids, "<i4"),
            "logsumexp": to_base64(self.logsumexp, "<f4"),
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> LogitRows:
        """Read what `to_json` returned."""
        shape = tuple(value["shape"])
        return LogitRows(
            from_base64(value["values"], shape, "<f4", "float32"),
            from_base64(value["ids"], shape, "<i4", "int64"),
            from_base64(value["logsumexp"], shape[:1], "<f4", "float32"),
            array_of(value["positions"], "int64"),
        )


def _logits_of(rows: Activations, capture: ResolvedCapture, asked: Logits) -> LogitRows:
    """Return the logits of a completion, in memory of their own."""
    import torch

    (tap,) = capture.taps
    values = rows[tap].as_subclass(torch.Tensor).clone()
    positions = rows.positions_of(*tap).clone()
    values, total = values[:, :-1], values[:, -1]
    count = values.shape[1]
    if asked.top:
        count //= 2
        ids = values[:, :count].contiguous().view(torch.int32).long()
        return LogitRows(values[:, count:], ids, total, positions)
    if isinstance(asked.tokens, str):
        return LogitRows(values, torch.arange(count).expand(len(values), -1), total, positions)
    assert capture.pattern is not None
    chosen = torch.tensor([token for token, _ in capture.pattern.keys])
    return LogitRows(values, chosen.expand(len(values), -1), total, positions)
