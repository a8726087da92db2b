"""Edits and probes of one model for random requests: every operation, at many taps and heads."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from midstream import Feature, Gate, Probe, Replace, Scale
from midstream.plan import Vector
from support.edit_cases import Maker, earlier_taps
from support.inner_cases import InnerMaker, earlier, head_choices
from support.inner_oracle import InnerOracle
from support.oracle_edits import EVERY_SITE, EditOracle, Tap

MOST_ROWS = 40
FEW = 6


@dataclass(frozen=True)
class Spread:
    """A `Replace` whose rows are laid over as many positions; how many is the request's choice."""

    rows: Tensor  # [MOST_ROWS, width]
    place: dict[str, Any]  # the arguments of a `Replace` that name layer, site and heads

    def over(self, count: int, written: dict[str, Any]) -> Replace:
        """Its first rows, one for each of `count` positions."""
        return Replace(self.rows[:count], **self.place, **written)


@dataclass(frozen=True)
class Catalogue:
    """What requests choose from."""

    # Without positions; the first `FEW` are of one tap of the stream or a branch, and as many
    # after them of the values of one layer, where the oracle knows them.
    edits: tuple[Any, ...]
    spreads: tuple[Spread, ...]  # as many rows as positions
    probes: tuple[Probe, ...]  # without names and positions
    taps: tuple[Tap, ...]  # all that the model has
    heads: dict[str, int]  # the number of heads of each site that has heads

    def edit(self, draw: random.Random) -> Any:
        """One of them; a few, of one tap or two, are asked for again and again."""
        few = FEW * (2 if self.heads else 1)
        return draw.choice(self.edits[:few] if draw.random() < 0.4 else self.edits)

    def probe(self, draw: random.Random, name: str, written: dict[str, Any]) -> Probe:
        return draw.choice(self.probes).replace(name=name, **written)

    def heads_of(self, draw: random.Random, sites: Sequence[str]) -> list[int] | None:
        """Heads that all of some sites have; at times, and where one has none, None: all of it."""
        most = min(self.heads.get(site, 0) for site in sites)
        if not most or draw.random() < 0.3:
            return None
        return draw.sample(range(most), draw.randint(1, most))


def catalogue(
    oracle: EditOracle,
    prompt: Sequence[int],
    seed: int,
    *,
    jumps: bool = True,
    memory: bool = False,
    taps: int = 7,
) -> Catalogue:
    """Every operation, sized by a plain run. Without `jumps` none hangs on a threshold, which
    scores pass or not where sums depend on the batch's shape.
    """
    plain = oracle.run(prompt)
    draw, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    every = [(site, layer) for layer in range(oracle.num_layers) for site in EVERY_SITE]
    # Each site at least once where there are enough.
    chosen = [(site, choose.randrange(oracle.num_layers)) for site in EVERY_SITE[:taps]]
    chosen += choose.sample(
        [tap for tap in every if tap not in chosen], max(0, taps - len(EVERY_SITE))
    )
    makers: list[tuple[Maker, list[Tap]]] = [
        (Maker(tap, plain, draw), earlier_taps(tap)) for tap in chosen
    ]
    inner = oracle if isinstance(oracle, InnerOracle) else None
    heads: dict[str, int] = {}
    if inner is not None:
        every += [(site, layer) for layer in range(inner.num_layers) for site in inner.sites]
        heads = {site: inner.heads(site) for site in inner.sites if inner.heads(site)}
        for site in inner.sites:
            tap = (site, choose.randrange(inner.num_layers))
            whole, *of_heads = head_choices(inner, site)
            for some in [whole, *of_heads[-1:]]:
                maker = InnerMaker(tap, some, inner.head_dim, plain, draw)
                makers.append((maker, earlier(inner, tap)))
    edits: list[Any] = []
    spreads, probes = [], []
    for maker, before in makers:
        edits += [edit for _, edit in maker.plain_edits("all")]
        edits += [edit for _, edit, _ in maker.conditional_edits(before)]
        for count in () if inner is None else (1, 9):
            dims = choose.sample(range(maker.h.shape[1]), count)
            edits.append(Scale(-0.7, dims=dims, **maker.place))
            edits.append(Replace(maker.vector(), alpha=0.8, dims=dims, **maker.place))
        rows = torch.stack([maker.vector() for _ in range(MOST_ROWS)])
        spreads.append(Spread(rows, maker.place))
        probes += maker.probes()[:1]
    if memory:
        for maker, before in makers[: len(chosen)]:
            edits += [edit for _, edit in maker.remembering(before)]
    edits = [edit for edit in edits if jumps or not _jumps(edit)]
    choose.shuffle(edits)
    # What differs in nothing but the operation or the vector is what keys must tell apart.
    few = _few(edits, chosen[-1])
    if inner is not None:
        few += _few(edits, next((m.site, m.layer) for m, _ in makers if m.site == "v"))
    rest = [edit for edit in edits if not any(edit is one for one in few)]
    return Catalogue(tuple(few + rest), tuple(spreads), tuple(probes), tuple(every), heads)


def _few(edits: Sequence[Any], tap: Tap) -> list[Any]:
    return [e for e in edits if (e.sites.names[0], e.layers.indices[0]) == tap][:FEW]


def placed(edit: Any, **written: Any) -> Any:
    """The edit with other arguments that say where; of a gate, the edit in it."""
    if isinstance(edit, Gate):
        return replace(edit, edit=edit.edit.replace(**written))
    return edit.replace(**written)


def vector_of(edit: Any) -> Vector | None:
    """The vector for which a name can stand in a `Steer`; None of other edits."""
    return getattr(edit, "vector", None) if edit.op == "steer" else None


def _jumps(edit: Any) -> bool:
    if isinstance(edit, Gate):
        return edit.sharpness is None or _jumps(edit.edit)
    return isinstance(edit, Feature) and max(edit.threshold) > 0
