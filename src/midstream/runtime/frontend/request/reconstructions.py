"""Reconstructions of a request by registered SAEs: where they may be, and which SAEs they use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from midstream.errors import SpecError
from midstream.ops.layout import Op
from midstream.ops.sae import layout
from midstream.plan import Plan, Probe, ResolvedPlan
from midstream.plan.operations import Edit, Gate, Reconstruct
from midstream.plan.plan import ServerWide
from midstream.plan.resolved import ResolvedEdit
from midstream.validation import at, show

if TYPE_CHECKING:
    from midstream.runtime.frontend.sae_registry import SaeRegistry


def read_saes(
    plan: Plan | None,
    before: Sequence[ServerWide],
    resolved: ResolvedPlan,
    saes: SaeRegistry | None,
) -> tuple[tuple[str, str], ...]:
    """Return the SAEs that the edits of a request reconstruct with: ("sae", name), each once."""
    used_saes: dict[tuple[str, str], None] = {}
    own = () if plan is None else plan.edits
    for path, edit in _named(plan, own, before):
        inner = edit.edit if isinstance(edit, Gate) else edit
        if not isinstance(inner, Reconstruct):
            continue
        assert saes is not None
        with at(path):
            if saes.source(inner.sae).reconstructs() != inner.code:
                raise SpecError(
                    "sae",
                    f"the SAE {show(inner.sae)} was registered again since this edit was; give "
                    "the edit again",
                )
        used_saes["sae", inner.sae] = None
    for nth_edit in reading(resolved):
        assert saes is not None
        _check_place(nth_edit, saes)
    return tuple(used_saes)


def reading(plan: ResolvedPlan) -> list[ResolvedEdit]:
    """Return the edits of a plan that encode vectors, at the tap where they do."""
    return [
        edit for edit in plan.edits if any(step.op is Op.CODE for step in edit.steps.instructions)
    ]


def check_same_saes(first: ResolvedPlan, later: ResolvedPlan) -> None:
    """Check that a version reconstructs where its first one does, with the same SAEs."""
    if not _places(later) <= _places(first):
        raise SpecError(
            "edits",
            "an update may change what a Reconstruct does, and at which positions, and not which "
            "SAE reconstructs where: give a Reconstruct with this SAE there when the request is "
            "sent, for example at the last prompt token alone",
        )


def _places(plan: ResolvedPlan) -> set[tuple[str, int, tuple[float, ...]]]:
    """Return (site, layer, place and digest) of the SAEs with which a plan reconstructs."""
    places = set()
    for edit in reading(plan):
        for step in edit.steps.instructions:
            if step.op is Op.CODE and step.read is not None:
                numbers = step.read.numpy()
                sae = [*numbers[: layout.ERROR], *numbers[layout.DIGEST : layout.DESCRIPTION]]
                places.add((edit.site, edit.layer, tuple(map(float, sae))))
    return places


def _named(
    plan: Plan | None, own: Sequence[Edit], before: Sequence[ServerWide]
) -> Iterator[tuple[str, Edit]]:
    for index, edit in enumerate(before):
        if not isinstance(edit, Probe):
            yield f"steering[{index - len(before)}]", edit
    for index, edit in enumerate(own):
        assert plan is not None
        yield f"edits[{plan.origin(index)}]", edit


def _check_place(edit: ResolvedEdit, saes: SaeRegistry) -> None:
    path = f"edits[{edit.source}]" if edit.source >= 0 else f"steering[{edit.source}]"
    (code,) = [step for step in edit.steps.instructions if step.op is Op.CODE]
    assert code.read is not None
    most = saes.reconstructed.get((edit.site, edit.layer))
    here = f"{edit.site}:{edit.layer}"
    if most is None:
        raise SpecError(
            f"{path}.layer",
            f"midstream's setting `reconstruct` does not name {here}; it names "
            f"{', '.join(f'{site}:{layer}' for site, layer in saes.reconstructed)}",
        )
    features = int(code.read.numpy()[layout.WIDEST])
    if features > most:
        raise SpecError(
            f"{path}.sae",
            f"it has {features} features, and midstream's setting `reconstruct` allows {most} at "
            f"{here}",
        )
