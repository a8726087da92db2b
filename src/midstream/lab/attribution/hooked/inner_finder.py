"""Location of the sites inside attention and the MLP of a transformers layer, by arithmetic.

Attention's function gets `rot_q` and `rot_k`. A rotary embedding changes nothing at position 0, so
`q` and `k` are the columns of a matrix's output that equal these there, up to a factor, or that a
norm read. `v` equals attention's values; `z` and `mlp_act` are what the last matrices read, and
`mlp_pre` is what the module reads that makes `mlp_act`, or its factor beside `mlp_pre_linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from midstream.sites import INNER

# Relative to the norms; see `site_finder.TOLERANCE`.
TOLERANCE = 1e-5
ATTENTION = ("q", "k", "v", "rot_q", "rot_k", "z")
NO_FUNCTION = "transformers' attention calls no function with queries, keys and values"
NO_COLUMNS = "no matrix of transformers' attention returns it in adjoining columns"
NO_MATRIX = "no matrix returns what this branch adds to the stream"
NO_ACTIVATION = "transformers has no module for the activation, or one for several matrices"
NO_EXPERTS = "no matrix of transformers' layer has one row per expert"


@dataclass(frozen=True)
class InnerSitePlace:
    """Location of an inner site in a transformers layer."""

    path: str  # module within the layer; of `query` and `key`: the attention
    at: Literal["input", "output", "query", "key"]
    start: int
    width: int
    heads: int = 0  # 0: none
    fixed: bool = False  # not editable: the module returns further values made of it


@dataclass
class InnerSitePlaces:
    """Locations of one layer's inner sites; `missing` has the reasons of those not found."""

    found: dict[str, InnerSitePlace] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SubmoduleCall:
    """One call of a sub-module in a plain pass."""

    path: str  # within the layer
    module: nn.Module
    given: Tensor | None  # first tensor argument, [T, W]; None: there is none
    returned: Tensor | None  # likewise
    several: bool  # whether it returned more than one value

    @property
    def is_matrix(self) -> bool:
        weight = getattr(self.module, "weight", None)
        return isinstance(weight, Tensor) and weight.dim() == 2


@dataclass(frozen=True)
class AttentionCall:
    """The call of attention's function in one layer."""

    path: str
    states: tuple[Tensor, Tensor, Tensor]  # queries, keys, values; [T, heads · width]
    heads: tuple[int, int, int]  # of each


def rows_of(value: Any, length: int) -> Tensor | None:
    """Return a tensor of a single request as [T, W], heads side by side; None for another shape."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    if value.dim() in (3, 4) and value.shape[0] == 1:
        value = value[0]
    if value.dim() == 3 and value.shape[0] != length and value.shape[1] == length:
        value = value.transpose(0, 1)
    if value.dim() not in (2, 3) or value.shape[0] != length:
        return None
    rows: Tensor = value.detach().flatten(1)
    return rows


def find_inner(
    calls: Sequence[SubmoduleCall],
    attention: Sequence[AttentionCall],
    mlp_out: Tensor | None,
    hidden_size: int,
    experts: int,
) -> InnerSitePlaces:
    """Return the locations of all inner sites of one layer, from calls by order of their ends.

    `mlp_out`: what the MLP adds to the stream, [T, H]; None: not known, for example because it is
    scaled. The last matrix with an activation in front is then taken for the MLP's.
    """
    places = InnerSitePlaces()
    above = None
    if len(attention) == 1:
        above = attention[0].path
        _find_attention(places, attention[0], [call for call in calls if _within(call.path, above)])
    else:
        places.missing.update(dict.fromkeys(ATTENTION, NO_FUNCTION))
    others = [call for call in calls if above is None or not _within(call.path, above)]
    _find_mlp(places, others, mlp_out, hidden_size)
    _find_router(places, others, experts)
    assert {*places.found, *places.missing} == set(INNER)
    return places


def _within(path: str, above: str) -> bool:
    return path == above or path.startswith(f"{above}.") or not above


# --------------------------------------------------------------------- attention


def _find_attention(
    places: InnerSitePlaces, call: AttentionCall, calls: Sequence[SubmoduleCall]
) -> None:
    for index, site in enumerate(("q", "k", "v")):
        rotated = site != "v"
        source = _source(
            call.states[index], calls, slice(0, 1) if rotated else slice(None), rotated
        )
        if source is None:
            places.missing[site] = NO_COLUMNS
        else:
            matrix, start = source
            width = call.states[index].shape[1]
            places.found[site] = InnerSitePlace(
                matrix.path, "output", start, width, call.heads[index]
            )
    for site, at, index in (("rot_q", "query", 0), ("rot_k", "key", 1)):
        width = call.states[index].shape[1]
        places.found[site] = InnerSitePlace(call.path, at, 0, width, call.heads[index])  # type: ignore[arg-type]
    own = next(submodule for submodule in calls if submodule.path == call.path)
    last = None if own.returned is None else _returning(own.returned, calls)
    if last is None or last.given is None:
        places.missing["z"] = NO_MATRIX
    else:
        places.found["z"] = InnerSitePlace(
            last.path, "input", 0, last.given.shape[1], call.heads[0]
        )


def _source(
    wanted: Tensor, calls: Sequence[SubmoduleCall], rows: slice, scaled: bool
) -> tuple[SubmoduleCall, int] | None:
    """Return the matrix, and its first column, that returned `wanted` [T, W], or a norm's input."""
    for call, start in _columns(wanted, calls, rows, scaled):
        if call.is_matrix:
            return call, start
        if call.given is not None and call.given.shape == wanted.shape:
            for other, column in _columns(call.given, calls, slice(None), False):
                if other.is_matrix:
                    return other, column
    return None


def _columns(
    wanted: Tensor, calls: Sequence[SubmoduleCall], rows: slice, scaled: bool
) -> Iterator[tuple[SubmoduleCall, int]]:
    """Yield the calls that returned vectors in adjoining columns, and the first of these."""
    width = wanted.shape[1]
    for call in calls:
        if call.returned is None or call.returned.shape[1] < width:
            continue
        whole = call.returned[rows]
        for start in range(0, whole.shape[1] - width + 1, 4):
            if _same(whole[:, start : start + width], wanted[rows], scaled):
                yield call, start
                break


def _returning(wanted: Tensor, calls: Sequence[SubmoduleCall]) -> SubmoduleCall | None:
    """Return the matrix whose output these vectors are."""
    for call in calls:
        if call.is_matrix and call.returned is not None and _same(call.returned, wanted):
            return call
    return None


# --------------------------------------------------------------------------- MLP


def _find_mlp(
    places: InnerSitePlaces,
    calls: Sequence[SubmoduleCall],
    mlp_out: Tensor | None,
    hidden_size: int,
) -> None:
    # A norm may follow the MLP's last matrix.
    wanted = [] if mlp_out is None else [mlp_out]
    for call in calls:
        if mlp_out is None or call.given is None or call.returned is None:
            continue
        if _same(call.returned, mlp_out):
            wanted.append(call.given)
    last = next(filter(None, (_returning(tensor, calls) for tensor in wanted)), None)
    if last is not None and last.given is not None:
        places.found["mlp_act"] = InnerSitePlace(last.path, "input", 0, last.given.shape[1])
        halves = _halves_of(last.given, calls)
        places.found |= halves.found
        places.missing |= halves.missing
        return
    for call in reversed(calls) if mlp_out is None else ():
        if not call.is_matrix or call.given is None or call.returned is None:
            continue
        # Which matrix it is shows in that an activation is in front of it.
        halves = _halves_of(call.given, calls)
        if call.returned.shape[1] == hidden_size and "mlp_pre" in halves.found:
            places.found["mlp_act"] = InnerSitePlace(call.path, "input", 0, call.given.shape[1])
            places.found |= halves.found
            places.missing |= halves.missing
            return
    places.missing.update(dict.fromkeys(("mlp_pre", "mlp_pre_linear", "mlp_act"), NO_MATRIX))


def _halves_of(act: Tensor, calls: Sequence[SubmoduleCall]) -> InnerSitePlaces:
    """Return the locations of `mlp_pre` and `mlp_pre_linear`, of which these neurons are made."""
    places = InnerSitePlaces()
    for call in calls:
        if call.is_matrix or call.given is None or call.returned is None:
            continue
        if call.given.shape != act.shape or call.returned.shape != act.shape:
            continue
        gate = next(_halves(call.given, calls, partial(_same, call.given)), None)
        if gate is None:
            continue
        if _same(call.returned, act) and not torch.equal(call.given, call.returned):
            places.found["mlp_pre"] = gate
            places.missing["mlp_pre_linear"] = "this MLP has no gate"
            return places
        linear = next(_halves(act, calls, partial(_is_product, call.returned, act)), None)
        if linear is not None:
            places.found |= {"mlp_pre": gate, "mlp_pre_linear": linear}
            return places
    places.missing.update(dict.fromkeys(("mlp_pre", "mlp_pre_linear"), NO_ACTIVATION))
    return places


def _is_product(factor: Tensor, product: Tensor, other: Tensor) -> bool:
    return _same(factor * other, product)


def _halves(
    like: Tensor, calls: Sequence[SubmoduleCall], holds: Callable[[Tensor], bool]
) -> Iterator[InnerSitePlace]:
    """Yield the outputs of matrices, or halves of them, for which a condition holds."""
    width = like.shape[1]
    for call in calls:
        if not call.is_matrix or call.returned is None:
            continue
        for start in (0, width):
            part = call.returned[:, start : start + width]
            fits = part.shape == like.shape and call.returned.shape[1] in (width, 2 * width)
            if fits and holds(part):
                yield InnerSitePlace(call.path, "output", start, width)


def _find_router(places: InnerSitePlaces, calls: Sequence[SubmoduleCall], experts: int) -> None:
    for call in calls:
        if not call.is_matrix or call.given is None or call.returned is None:
            continue
        weight: Any = call.module.weight
        if call.returned.shape[1] != experts or weight.shape != (experts, call.given.shape[1]):
            continue
        product = call.given.float() @ weight.float().T
        bias = getattr(call.module, "bias", None)
        if _same(call.returned.float(), product if bias is None else product + bias):
            places.found["router"] = InnerSitePlace(
                call.path, "output", 0, experts, fixed=call.several
            )
            return
    places.missing["router"] = NO_EXPERTS


def _same(tensor: Tensor, other: Tensor, scaled: bool = False) -> bool:
    """Return whether two tensors [n, W] are equal up to rounding, and a factor if `scaled`."""
    if tensor.shape != other.shape or not tensor.any():
        return False
    if scaled:
        tensor = tensor * ((tensor * other).sum() / tensor.square().sum())
    return float((tensor - other).norm()) <= TOLERANCE * float(tensor.norm() + other.norm())
