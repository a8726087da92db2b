"""Each site held to its neighbours, where vLLM's model is itself not what transformers' is.

In a pass of transformers every tap is set to what was captured in vLLM, one after the other. What
transformers makes of one tap on the way to the next must then be what was captured there: the
stream after attention is the stream before it and what attention added; what the MLP reads is the
norm of that. A module that computes something else in vLLM shows at its own output alone, and
that this output is what is added to the stream shows in the stream behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from midstream.doctor import formulas
from midstream.doctor.cases import Case
from midstream.doctor.compare import Held, row_error
from midstream.doctor.reference import Reference, Tap
from midstream.doctor.report import OK, UNCOMPARED, WRONG, OperationFound
from midstream.sites import NAMES

# What a module of its own computes, which may be another in vLLM.
COMPUTED = ("attn_out", "mlp_out")
IRREGULAR = "vLLM's own values of one prompt depend on what else is in the batch"


def site_errors(
    reference: Reference, cases: Sequence[Case], outputs: Sequence[Any], held: Held
) -> dict[Tap, float | None]:
    """How far each captured tap is from what transformers makes of those before it, at most.

    What a module computed (`attn_out`, `mlp_out`) has the error of the stream that it was added
    to. None where that cannot be told: there is no such stream, or it is not as expected and a
    module computed on the way whose output was not captured.
    """
    worst: dict[Tap, float | None] = {}
    for case, output in zip(cases, outputs, strict=True):
        for tap, error in _errors(reference, case, output, held).items():
            before = worst.setdefault(tap, 0.0)
            worst[tap] = None if error is None or before is None else max(before, error)
    return worst


def judge_operation(
    reference: Reference, case: Case, output: Any, plain: Sequence[Any], held: Held
) -> OperationFound:
    """Whether one operation did what its definition says, to what was there in vLLM.

    Args:
        reference: transformers' side.
        case: the request.
        output: its vLLM output.
        plain: outputs of the same prompt without an edit, in other batches or places of one.
        held: tolerances.
    """
    assert case.tap is not None
    site, layer = case.tap
    values = _captured(output)
    told = _errors(reference, case, output, held)
    errors = {tap: error for tap, error in told.items() if error is not None}
    if site in COMPUTED and case.edit is not None:
        # What a module computed before the edit is known from the plain request alone.
        before, size = _captured(plain[0]), len(case.prompt)
        others = [_captured(one) for one in plain[1:]]
        if not _regular(case, before, [values, *others], held.tolerance):
            return OperationFound(case.name, site, layer, UNCOMPARED, None, IRREGULAR)
        own = formulas.apply(case.edit, before[case.tap][:size]).float()
        error = row_error(values[case.tap][:size], own)
        errors[case.tap] = max(error, errors.get(case.tap, 0.0))
    where = max(errors, key=lambda tap: errors[tap])
    worst, place = errors[where], f"{where[0]} of layer {where[1]}"
    if case.probe is not None:
        expected = formulas.score(case.probe, values[case.tap])
        scores = output.probes["score"].double()
        error = float((scores - expected).abs().max() / expected.abs().max())
        if error > worst:
            worst, place = error, "its scores"
    problems = list(output.receipt.problems)
    if not worst <= held.tolerance:
        problems.append(f"{place}: off by {worst:.1e}")
    found = "; ".join(problems)
    return OperationFound(case.name, site, layer, WRONG if found else OK, worst, found)


def _regular(
    case: Case, plain: dict[Tap, Tensor], others: list[dict[Tap, Tensor]], tolerance: float
) -> bool:
    """Whether all have the same in their prompts: the first of the others, which is edited, before
    the edit, and the rest at the edit's place too.
    """
    assert case.tap is not None
    size = len(case.prompt)
    here = case.tap[1], NAMES.index(case.tap[0])
    return all(
        row_error(values[tap][:size], plain[tap][:size]) <= tolerance
        for nth, values in enumerate(others)
        for tap in values
        if (tap[1], NAMES.index(tap[0])) < here or (nth and tap == case.tap)
    )


def _errors(reference: Reference, case: Case, output: Any, held: Held) -> dict[Tap, float | None]:
    values = _captured(output)
    known = [tap for tap in values if reference.missing(tap) is None]
    tokens = [*case.prompt, *output.outputs[0].token_ids][:-1]
    seen = reference.run(tokens, {tap: _set_to(values[tap]) for tap in known})
    made = dict(seen.before)
    if case.edit is not None and case.tap in made:
        made[case.tap] = formulas.apply(case.edit, made[case.tap]).float()
    errors = {tap: row_error(values[tap], made[tap]) for tap in known}
    told: dict[Tap, float | None] = {}
    for tap, error in errors.items():
        site, layer = tap
        if site in COMPUTED:
            told[tap] = _error_behind(tap, errors)
        else:
            needed = [(one, layer) for one in COMPUTED if _lies_before(one, site)]
            proven = error <= held.tolerance or all(one in errors for one in needed)
            told[tap] = error if proven else None
    return told


def _lies_before(computed: str, site: str) -> bool:
    """Whether a module's output is added between this stream site and the one before it."""
    return (computed, site) in (("attn_out", "resid_mid"), ("mlp_out", "resid_post"))


def _error_behind(tap: Tap, errors: dict[Tap, float]) -> float | None:
    """The error of the next stream site of the same layer."""
    site, layer = tap
    for name in NAMES[NAMES.index(site) :]:
        if name.startswith("resid_") and (name, layer) in errors:
            return errors[name, layer]
    return None


def _captured(output: Any) -> dict[Tap, Tensor]:
    return {tap: value.float().cpu() for tap, value in output.activations.items()}


def _set_to(value: Tensor) -> Any:
    return lambda _rows: value
