"""Where the six sites are in a transformers layer: found by arithmetic, not by name.

In one plain pass each sub-module's input and output is looked at. Attention's branch is the
output that, added to what enters the layer, is the input of a later module; the MLP's is the
output that, added to that, leaves the layer. So what the comparison holds midstream to is the
meaning of the sites, and owes nothing to midstream's own table of conventions. Where the sums do
not come out (a branch is scaled where it is added, several are added at once), a site is not
found, and is said to be not compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Of the sum of the lengths: float32 sums taken in another order differ by less.
TOLERANCE = 4e-6
# A branch shorter than this part of the sum cannot be told from nothing.
LEAST = 1e-3
SCALED = "no module returns what is added to the stream: it is scaled, or several are summed"
_NORM = re.compile(r"norm|(^|\.)ln", re.IGNORECASE)
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_MLP = re.compile(r"mlp|ffn|feed_forward|moe|expert|(^|\.)fc", re.IGNORECASE)


@dataclass(frozen=True)
class Call:
    """One call of a sub-module in a plain pass.

    Attributes:
        path: of the module, from the layer.
        cls: its class's name.
        entered, left: when, as numbers that grow.
        given, returned: the first tensors as wide as the stream, [T, H], or None.
    """

    path: str
    cls: str
    entered: int
    left: int
    given: Tensor | None
    returned: Tensor | None

    @property
    def depth(self) -> int:
        return self.path.count(".")

    @property
    def idle(self) -> bool:
        """Whether it returned what it was given."""
        return (
            self.given is not None
            and self.returned is not None
            and torch.equal(self.given, self.returned)
        )

    def matches(self, pattern: re.Pattern[str]) -> bool:
        """Whether path or class say so."""
        return bool(pattern.search(self.path) or pattern.search(self.cls))


@dataclass(frozen=True)
class Place:
    """A site that is what a module of a layer is called with, or returns.

    Attributes:
        path: of the module, from the layer.
        entry: whether it is what the module is called with.
        shared: whether others read that tensor too, so that an edit needs a copy.
    """

    path: str
    entry: bool = False
    shared: bool = False


@dataclass
class Places:
    """Where one layer's sites are; the two at its ends need no finding.

    Attributes:
        found: by site.
        missing: why a site was not found, by site.
    """

    found: dict[str, Place] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def find(entering: Tensor, leaving: Tensor, calls: list[Call]) -> Places:
    """The places of `attn_out`, `resid_mid`, `mlp_in` and `mlp_out` in one layer.

    Args:
        entering, leaving: the stream before and after the layer, float32 [T, H].
        calls: of the layer's sub-modules, by when they were entered.
    """
    # A dropout that does nothing makes nothing.
    calls = [call for call in calls if not call.idle]
    for scaled in (False, True):
        for first in calls:
            if first.given is None or _same(first.given, entering):
                continue
            before = [call for call in calls if call.left < first.entered]
            added = first.given - entering
            if scaled and _scaled(added, first.given, before) is not None:
                return _sequential(None, first, leaving, calls)
            branch = None if scaled else _branch(added, first.given, before)
            if branch is not None:
                return _sequential(branch, first, leaving, calls)
    for first in calls:
        # Several branches were added at once, and then the MLP's: the stream between is known by
        # what is added to it.
        if first.given is None or not first.matches(_NORM) or _same(first.given, entering):
            continue
        after = [call for call in calls if call.left > first.entered]
        if _scaled(leaving - first.given, leaving, after) is not None:
            return _sequential(None, first, leaving, calls)
    return _one_step(entering, leaving, calls)


def _sequential(branch: Call | None, first: Call, leaving: Tensor, calls: list[Call]) -> Places:
    """Attention was added, then the MLP is: `first` is called with the stream between them."""
    places = Places()
    assert first.given is not None
    if branch is None:
        places.missing["attn_out"] = SCALED
    else:
        places.found["attn_out"] = Place(branch.path)
    places.found["resid_mid"] = Place(first.path, entry=True)
    # A norm feeds the MLP, or the MLP is called with the stream itself.
    normed = first.matches(_NORM) and first.returned is not None
    places.found["mlp_in"] = (
        Place(first.path) if normed else Place(first.path, entry=True, shared=True)
    )
    after = [call for call in calls if call.left > first.entered]
    added = _branch(leaving - first.given, leaving, after)
    if added is None:
        places.missing["mlp_out"] = SCALED
    else:
        places.found["mlp_out"] = Place(added.path)
    return places


def _one_step(entering: Tensor, leaving: Tensor, calls: list[Call]) -> Places:
    """All branches are added at once: two side by side, or one alone."""
    places = Places()
    places.missing["resid_mid"] = "no module is called with the stream and one branch added to it"
    alone = _branch(leaving - entering, leaving, calls)
    if alone is not None:
        site = "mlp_out" if alone.matches(_MLP) and not alone.matches(_ATTENTION) else "attn_out"
        places.found[site] = Place(alone.path)
        if site == "mlp_out":
            places.found["mlp_in"] = Place(alone.path, entry=True, shared=True)
    else:
        for attention, mlp in _pairs(entering, leaving, calls):
            places.found["attn_out"] = Place(attention.path)
            places.found["mlp_out"] = Place(mlp.path)
            if mlp.given is not None:
                places.found["mlp_in"] = Place(mlp.path, entry=True, shared=True)
            break
    for site in ("attn_out", "mlp_in", "mlp_out"):
        if site not in places.found:
            places.missing[site] = "no module returns what is added to the stream"
    return places


def _pairs(entering: Tensor, leaving: Tensor, calls: list[Call]) -> Iterator[tuple[Call, Call]]:
    returning = sorted(
        (call for call in calls if call.returned is not None), key=lambda call: call.depth
    )
    for attention in returning:
        if not attention.matches(_ATTENTION):
            continue
        assert attention.returned is not None
        rest = leaving - entering - attention.returned
        others = [call for call in returning if not call.path.startswith(attention.path)]
        mlp = _branch(rest, leaving, others)
        if mlp is not None:
            yield attention, mlp


def _branch(wanted: Tensor, total: Tensor, calls: list[Call]) -> Call | None:
    """The outermost, latest call that returned this."""
    if float(wanted.norm()) < LEAST * float(total.norm()):
        return None
    found = [
        call for call in calls if call.returned is not None and _same(call.returned, wanted, total)
    ]
    return min(found, key=lambda call: (call.depth, -call.left), default=None)


def _scaled(wanted: Tensor, total: Tensor, calls: list[Call]) -> Call | None:
    """The first call that returned this up to a factor."""
    if float(wanted.norm()) < LEAST * float(total.norm()):
        return None
    for call in calls:
        if call.returned is None or not call.returned.any():
            continue
        factor = (call.returned * wanted).sum() / call.returned.square().sum()
        if _same(factor * call.returned, wanted, total):
            return call
    return None


def _same(one: Tensor, other: Tensor, total: Tensor | None = None) -> bool:
    """Equal to the rounding of sums as long as the longest of these."""
    lengths = one.norm(dim=-1) + other.norm(dim=-1)
    if total is not None:
        lengths = lengths + total.norm(dim=-1)
    return bool(((one - other).norm(dim=-1) <= TOLERANCE * lengths).all())
