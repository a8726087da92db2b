"""Edits and probes of one model for random requests: every operation, at many taps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from midstream import Feature, Gate, Probe, Replace, Vector
from support.edit_cases import Maker, earlier_taps
from support.oracle_edits import EVERY_SITE, EditOracle, Tap

MOST_ROWS = 40
FEW = 6


@dataclass(frozen=True)
class Spread:
    """A `Replace` whose rows are laid over as many positions; how many is the request's choice.

    Attributes:
        rows: [MOST_ROWS, hidden].
    """

    rows: Tensor
    tap: Tap

    def over(self, count: int, written: dict[str, Any]) -> Replace:
        """Its first rows, one for each of `count` positions."""
        site, layer = self.tap
        return Replace(self.rows[:count], layer=layer, site=site, **written)


@dataclass(frozen=True)
class Catalogue:
    """What requests choose from.

    Attributes:
        edits: without positions; the first `FEW` are of one tap.
        spreads: as many rows as positions.
        directions: for probes, by tap.
        taps: all that the model has.
    """

    edits: tuple[Any, ...]
    spreads: tuple[Spread, ...]
    directions: dict[Tap, Tensor]
    taps: tuple[Tap, ...]

    def edit(self, draw: random.Random) -> Any:
        """One of them; a few, all of one tap, are asked for again and again."""
        return draw.choice(self.edits[:FEW] if draw.random() < 0.4 else self.edits)

    def probe(self, draw: random.Random, name: str, written: dict[str, Any]) -> Probe:
        tap = draw.choice(list(self.directions))
        return Probe(self.directions[tap], tap[1], bias=0.5, site=tap[0], name=name, **written)


def catalogue(
    oracle: EditOracle, prompt: Sequence[int], seed: int, *, jumps: bool = True, taps: int = 7
) -> Catalogue:
    """Every operation, sized by a plain run.

    Args:
        oracle: the model, in transformers.
        prompt: of the plain run; at least a dozen different tokens.
        seed: of what is drawn.
        jumps: whether edits may jump from one token to the next as a score passes a threshold.
            Where sums depend on the batch's shape, a score may fall either side of it.
        taps: at how many taps.
    """
    plain = oracle.run(prompt)
    draw, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    every = [(site, layer) for layer in range(oracle.num_layers) for site in EVERY_SITE]
    # Each site at least once where there are enough.
    chosen = [(site, choose.randrange(oracle.num_layers)) for site in EVERY_SITE[:taps]]
    chosen += choose.sample(
        [tap for tap in every if tap not in chosen], max(0, taps - len(EVERY_SITE))
    )
    edits: list[Any] = []
    spreads, directions = [], {}
    for tap in chosen:
        maker = Maker(tap, plain, draw)
        edits += [edit for _, edit in maker.plain_edits("all")]
        edits += [edit for _, edit, _ in maker.conditional_edits(earlier_taps(tap))]
        rows = torch.stack([maker.vector() for _ in range(MOST_ROWS)])
        spreads.append(Spread(rows, tap))
        directions[tap] = maker.direction()
    edits = [edit for edit in edits if jumps or not _jumps(edit)]
    choose.shuffle(edits)
    # What differs in nothing but the operation or the vector is what keys must tell apart.
    edits.sort(key=lambda edit: (edit.sites.names[0], edit.layers.indices[0]) != chosen[-1])
    return Catalogue(tuple(edits), tuple(spreads), directions, tuple(every))


def placed(edit: Any, **written: Any) -> Any:
    """The edit with other arguments that say where; of a gate, the edit in it."""
    if isinstance(edit, Gate):
        return Gate(edit.edit.replace(**written), edit.probe, edit.threshold, edit.sharpness)
    return edit.replace(**written)


def vector_of(edit: Any) -> Vector | None:
    """The vector for which a name can stand in a `Steer`; None of other edits."""
    return getattr(edit, "vector", None) if edit.op == "steer" else None


def _jumps(edit: Any) -> bool:
    if isinstance(edit, Gate):
        return edit.sharpness is None or _jumps(edit.edit)
    return isinstance(edit, Feature) and edit.threshold > 0
