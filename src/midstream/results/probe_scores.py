"""Probe scores of one completion, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Probes(Mapping[str, "Tensor"]):
    """The scores of one completion's probes, by name.

    `probes["refusal"]` is float32 [rows], one score for each token that the probe selects, in the
    order of their positions.
    """

    def __init__(
        self, scores: Mapping[str, Tensor], positions: Mapping[str, Tensor], tokens: Tensor
    ) -> None:
        """Create from tensors.

        Args:
            scores: per name, float32 [rows].
            positions: per name, int64 [rows], ascending.
            tokens: int64, tokens of the whole request that were computed, from position 0.
        """
        self._scores = dict(scores)
        self._positions = dict(positions)
        self._tokens = tokens

    def __getitem__(self, name: str) -> Tensor:
        """Return the scores of a probe, float32 [rows].

        Raises:
            KeyError: there is no such probe; the message lists the names.
        """
        if name not in self._scores:
            known = ", ".join(self._scores)
            raise KeyError(f"there is no probe {name!r}; there are {known}")
        return self._scores[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._scores)

    def __len__(self) -> int:
        return len(self._scores)

    def positions_of(self, name: str) -> Tensor:
        """Return the positions of a probe's scores in the request, prompt first, int64 [rows].

        Raises:
            KeyError: there is no such probe.
        """
        self[name]
        return self._positions[name]

    def token_ids_of(self, name: str) -> Tensor:
        """Return the tokens that a probe scored, int64 [rows].

        Raises:
            KeyError: there is no such probe.
        """
        return self._tokens[self.positions_of(name)]

    def __repr__(self) -> str:
        rows = ", ".join(f"{name}: {len(scores)}" for name, scores in self._scores.items())
        return f"Probes({rows})"
