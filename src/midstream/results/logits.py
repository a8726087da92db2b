"""Logits of one completion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from midstream.results.arrays import array_of, from_base64, to_base64

if TYPE_CHECKING:
    from torch import Tensor


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

    values: Tensor
    ids: Tensor
    logsumexp: Tensor
    positions: Tensor

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
