"""Location of the sites in a transformers layer, found by arithmetic rather than by name.

Attention's output is the tensor whose sum with the layer's input is the input of a later module;
the MLP's output is the tensor whose sum with that is the layer's output. Where the sums do not
match (a branch is scaled before it is added, or several are added at once), the site is missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Fraction of the sum of the norms; float32 sums in a different order differ by less.
TOLERANCE = 4e-6
# A branch whose norm is below this fraction of the sum cannot be distinguished from zero.
LEAST = 1e-3
NO_ATTENTION = "no module is named attention and called with a vector as wide as the stream"
SCALED = "no module returns what is added to the stream: it is scaled, or several are summed"
_NORM = re.compile(r"norm|(^|\.)ln", re.IGNORECASE)
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_MLP = re.compile(r"mlp|ffn|feed_forward|moe|expert|(^|\.)fc", re.IGNORECASE)


@dataclass(frozen=True)
class ModuleCall:
    """One call of a sub-module in a plain pass."""

    path: str  # within the layer
    cls: str
    entered: int  # order among all entries and exits
    left: int
    given: Tensor | None  # first tensor argument with the stream's width, [T, H]
    returned: Tensor | None  # likewise

    @property
    def depth(self) -> int:
        return self.path.count(".")

    @property
    def idle(self) -> bool:
        """Whether the module returned its input unchanged."""
        return (
            self.given is not None
            and self.returned is not None
            and torch.equal(self.given, self.returned)
        )

    def matches(self, pattern: re.Pattern[str]) -> bool:
        return bool(pattern.search(self.path) or pattern.search(self.cls))


@dataclass(frozen=True)
class SitePlace:
    """Location of a site: the output of a module in the layer, or its input (`entry`)."""

    path: str
    entry: bool = False


@dataclass
class Places:
    """Locations of one layer's sites between its ends; `missing` has reasons of those not found."""

    found: dict[str, SitePlace] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def find(entering: Tensor, leaving: Tensor, calls: list[ModuleCall]) -> Places:
    """Return the locations of all sites inside one layer; the stream is float32 [T, H]."""
    # Modules that return their input, such as an inactive dropout, are not the source of a site.
    calls = [call for call in calls if not call.idle]
    for scaled in (False, True):
        for first in calls:
            if first.given is None or _same(first.given, entering):
                continue
            after = [call for call in calls if call.left > first.entered]
            if _branch(leaving - entering, leaving, after) is not None:
                continue  # what comes later is added to the layer's input, not to this sum
            before = [call for call in calls if call.left < first.entered]
            added = first.given - entering
            if scaled and _scaled(added, first.given, before) is not None:
                return _sequential(None, first, leaving, calls)
            branch = None if scaled else _branch(added, first.given, before)
            if branch is not None:
                return _sequential(branch, first, leaving, calls)
    for first in calls:
        # Several branches are added at once, and the MLP's output afterwards. The stream between
        # them is identified by what is added to it.
        if first.given is None or not first.matches(_NORM) or _same(first.given, entering):
            continue
        after = [call for call in calls if call.left > first.entered]
        if _scaled(leaving - first.given, leaving, after) is not None:
            return _sequential(None, first, leaving, calls)
    return _one_step(entering, leaving, calls)


def _sequential(
    branch: ModuleCall | None, first: ModuleCall, leaving: Tensor, calls: list[ModuleCall]
) -> Places:
    """Return the locations where attention's output is added before the MLP's."""
    places = Places()
    assert first.given is not None
    _add_attention_input(places, [call for call in calls if call.left < first.entered])
    if branch is None:
        places.missing["attn_out"] = SCALED
    else:
        places.found["attn_out"] = SitePlace(branch.path)
    places.found["resid_mid"] = SitePlace(first.path, entry=True)
    # The MLP's input is either the output of a norm or the stream itself.
    normed = first.matches(_NORM) and first.returned is not None
    places.found["mlp_in"] = SitePlace(first.path, entry=not normed)
    after = [call for call in calls if call.left > first.entered]
    added = _branch(leaving - first.given, leaving, after)
    if added is None:
        places.missing["mlp_out"] = SCALED
    else:
        places.found["mlp_out"] = SitePlace(added.path)
    return places


def _one_step(entering: Tensor, leaving: Tensor, calls: list[ModuleCall]) -> Places:
    """Return the locations where all branches are added at once: two in parallel, or only one."""
    places = Places()
    places.missing["resid_mid"] = "no module is called with the stream and one branch added to it"
    alone = _branch(leaving - entering, leaving, calls)
    if alone is not None:
        site = "mlp_out" if alone.matches(_MLP) and not alone.matches(_ATTENTION) else "attn_out"
        places.found[site] = SitePlace(alone.path)
        if site == "mlp_out":
            places.found["mlp_in"] = SitePlace(alone.path, entry=True)
            places.missing["attn_in"] = NO_ATTENTION
        else:
            _add_attention_input(places, calls)
    else:
        _add_attention_input(places, calls)
        for attention, mlp in _pairs(entering, leaving, calls):
            places.found["attn_out"] = SitePlace(attention.path)
            places.found["mlp_out"] = SitePlace(mlp.path)
            if mlp.given is not None:
                places.found["mlp_in"] = SitePlace(mlp.path, entry=True)
            break
    for site in ("attn_out", "mlp_in", "mlp_out"):
        if site not in places.found:
            places.missing[site] = "no module returns what is added to the stream"
    return places


def _add_attention_input(places: Places, calls: list[ModuleCall]) -> None:
    """Set the location of `attn_in`: the input of the outermost, first attention of `calls`."""
    candidates = [
        call
        for call in calls
        if call.given is not None
        and call.matches(_ATTENTION)
        and not _NORM.search(call.path.rpartition(".")[2])
    ]
    if candidates:
        attention = min(candidates, key=lambda call: (call.depth, call.entered))
        places.found["attn_in"] = SitePlace(attention.path, entry=True)
    else:
        places.missing["attn_in"] = NO_ATTENTION


def _pairs(
    entering: Tensor, leaving: Tensor, calls: list[ModuleCall]
) -> Iterator[tuple[ModuleCall, ModuleCall]]:
    """Yield (attention, MLP) calls whose outputs sum to the layer's change of the stream."""
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


def _branch(wanted: Tensor, total: Tensor, calls: list[ModuleCall]) -> ModuleCall | None:
    """Return the outermost, latest call that returned `wanted`; None if there is none."""
    if float(wanted.norm()) < LEAST * float(total.norm()):
        return None
    candidates = [
        call for call in calls if call.returned is not None and _same(call.returned, wanted, total)
    ]
    return min(candidates, key=lambda call: (call.depth, -call.left), default=None)


def _scaled(wanted: Tensor, total: Tensor, calls: list[ModuleCall]) -> ModuleCall | None:
    """Return the first call that returned `wanted` up to a scalar factor."""
    if float(wanted.norm()) < LEAST * float(total.norm()):
        return None
    for call in calls:
        if call.returned is None or not call.returned.any():
            continue
        factor = (call.returned * wanted).sum() / call.returned.square().sum()
        if _same(factor * call.returned, wanted, total):
            return call
    return None


def _same(tensor: Tensor, other: Tensor, total: Tensor | None = None) -> bool:
    """Return whether two tensors are equal up to rounding, relative to the sum of all norms."""
    lengths = tensor.norm(dim=-1) + other.norm(dim=-1)
    if total is not None:
        lengths = lengths + total.norm(dim=-1)
    return bool(((tensor - other).norm(dim=-1) <= TOLERANCE * lengths).all())
