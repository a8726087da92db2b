"""Comparison of each site with its neighbours, for models that vLLM computes differently.

A forward pass of transformers overwrites every tap with the value captured in vLLM. What
transformers computes from one tap to the next must then equal the value captured at the next: the
stream after attention is the stream before it plus attention's output, and the MLP's input is the
norm of that. A module that vLLM computes differently shows an error at its own output only; whether
that output is what vLLM adds to the stream shows at the next stream site.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from midstream.lab.tools.doctor import formulas
from midstream.lab.tools.doctor.cases import Case
from midstream.lab.tools.doctor.compare import ErrorLimits, row_error
from midstream.lab.tools.doctor.reference import Reference
from midstream.lab.tools.doctor.report import OK, UNCOMPARED, WRONG, OperationFound
from midstream.sites import OUTER, Tap

# Sites computed by a module, which vLLM may implement differently.
COMPUTED = ("attn_out", "mlp_out")
WITHIN = (
    "vLLM computes this model's modules differently, and no neighbouring site tells what is right"
)
IRREGULAR = "vLLM's own values of one prompt depend on the other requests of the batch"


def site_errors(
    reference: Reference, cases: Sequence[Case], outputs: Sequence[Any], limits: ErrorLimits
) -> dict[Tap, float | None]:
    """Return the largest difference of each captured tap from transformers' value, computed from
    the taps before it.

    A module's output (`attn_out`, `mlp_out`) has the error of the stream site after it. The error
    is None where it is unknown: there is no such stream site, or that site differs and a module in
    between has no captured output.
    """
    worst: dict[Tap, float | None] = {}
    for case, output in zip(cases, outputs, strict=True):
        for tap, error in _errors(reference, case, output, limits).items():
            before = worst.setdefault(tap, 0.0)
            worst[tap] = None if error is None or before is None else max(before, error)
    return worst


def judge_operation(
    reference: Reference, case: Case, output: Any, plain: Sequence[Any], limits: ErrorLimits
) -> OperationFound:
    """Compare the result of one operation with its definition, applied to vLLM's own values.

    Args:
        plain: outputs of the same prompt without an edit, from other batches or batch positions.
    """
    assert case.tap is not None
    site, layer = case.tap
    if site not in OUTER:
        return OperationFound(case.name, site, layer, UNCOMPARED, None, WITHIN)
    values = _captured(output)
    known = _errors(reference, case, output, limits)
    errors = {tap: error for tap, error in known.items() if error is not None}
    if site in COMPUTED and case.edit is not None:
        # Only the plain request has the module's output before the edit.
        before, size = _captured(plain[0]), len(case.prompt)
        others = [_captured(plain_output) for plain_output in plain[1:]]
        if not _is_regular(case, before, [values, *others], limits.tolerance):
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
    if not worst <= limits.tolerance:
        problems.append(f"{place}: off by {worst:.1e}")
    reason = "; ".join(problems)
    return OperationFound(case.name, site, layer, WRONG if reason else OK, worst, reason)


def _is_regular(
    case: Case, plain: dict[Tap, Tensor], others: list[dict[Tap, Tensor]], tolerance: float
) -> bool:
    """Return whether all outputs have equal values in the prompt: `others[0]`, which is edited, at
    the taps before the edit, the remaining ones at the edit's tap too.
    """
    assert case.tap is not None
    size = len(case.prompt)
    here = case.tap[1], OUTER.index(case.tap[0])
    return all(
        row_error(values[tap][:size], plain[tap][:size]) <= tolerance
        for index, values in enumerate(others)
        for tap in values
        if (tap[1], OUTER.index(tap[0])) < here or (index and tap == case.tap)
    )


def _errors(
    reference: Reference, case: Case, output: Any, limits: ErrorLimits
) -> dict[Tap, float | None]:
    values = _captured(output)
    known = [tap for tap in values if reference.missing(tap) is None]
    tokens = [*case.prompt, *output.outputs[0].token_ids][:-1]
    forward = reference.run(tokens, {tap: _set_to(values[tap]) for tap in known})
    expected = dict(forward.before)
    if case.edit is not None and case.tap in expected:
        expected[case.tap] = formulas.apply(case.edit, expected[case.tap]).float()
    errors = {tap: row_error(values[tap], expected[tap]) for tap in known}
    comparable: dict[Tap, float | None] = {}
    for tap, error in errors.items():
        site, layer = tap
        if site in COMPUTED:
            comparable[tap] = _error_after(tap, errors)
        else:
            needed = [
                (other_site, layer) for other_site in COMPUTED if _is_added_before(other_site, site)
            ]
            proven = error <= limits.tolerance or all(needed_tap in errors for needed_tap in needed)
            comparable[tap] = error if proven else None
    return comparable


def _is_added_before(computed: str, site: str) -> bool:
    """Return whether this module's output is added between the previous stream site and `site`."""
    return (computed, site) in (("attn_out", "resid_mid"), ("mlp_out", "resid_post"))


def _error_after(tap: Tap, errors: dict[Tap, float]) -> float | None:
    """Return the error of the next stream site in the same layer; None if there is none."""
    site, layer = tap
    for name in OUTER[OUTER.index(site) :]:
        if name.startswith("resid_") and (name, layer) in errors:
            return errors[name, layer]
    return None


def _captured(output: Any) -> dict[Tap, Tensor]:
    # Of single modules nothing can be told: vLLM's compute something else.
    return {
        tap: value.float().cpu() for tap, value in output.activations.items() if tap[0] in OUTER
    }


def _set_to(value: Tensor) -> Any:
    return lambda _rows: value
