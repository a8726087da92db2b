"""Verdict on a model, from the outputs of the engine and of transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from midstream.lab.attribution.hooked.end_hooks import COMPARED
from midstream.lab.tools.doctor import compare, local
from midstream.lab.tools.doctor.cases import EDITED, Case
from midstream.lab.tools.doctor.compare import ErrorLimits
from midstream.lab.tools.doctor.reference import Reference
from midstream.lab.tools.doctor.report import (
    INCOMPARABLE,
    LACKING,
    OK,
    UNCOMPARED,
    WRONG,
    OperationFound,
    SiteFound,
)
from midstream.results.site_table import SiteTable
from midstream.sites import IN_LAYERS, OUTER, Tap

UNPROVEN = "vLLM's model differs from transformers' and neighbouring sites are not conclusive"


@dataclass(frozen=True)
class CaseOutputs:
    """Test requests with their vLLM outputs.

    Attributes:
        outputs: vLLM's outputs, in the same order.
    """

    cases: Sequence[Case]
    outputs: Sequence[Any]


@dataclass(frozen=True)
class Judgement:
    """Findings about one model.

    Attributes:
        sites: one finding for every site of every layer.
    """

    sites: tuple[SiteFound, ...]
    operations: tuple[OperationFound, ...]
    outcome: str
    reason: str
    tolerance: float


def judge(
    reference: Reference, table: SiteTable, plain: CaseOutputs, edited: CaseOutputs, dtype: str
) -> Judgement:
    """Compare every site and operation with transformers.

    Values are compared with those of the whole model. Where vLLM's own logits differ from
    transformers' and sites do too, each site is compared with its neighbouring sites instead. That
    finds faults, but it does not show that there are none: the outcome is then `INCOMPARABLE` or
    `WRONG`.
    """
    tie = compare.TIES[dtype]
    difference = compare.logit_error(plain.cases, plain.outputs, tie)
    limits = compare.limits_for(dtype, difference)
    errors = compare.site_errors(plain.cases, plain.outputs, limits.tie)
    sites = _sites(reference, table, errors, limits)
    differing = {(site.site, site.layer): 0.0 for site in sites if site.outcome == WRONG}
    operations = [
        compare.judge_operation(case, output, limits, differing)
        for case, output in zip(edited.cases, edited.outputs, strict=True)
    ]
    note, is_local = "", False
    if difference > tie:
        note = f"vLLM's own logits of plain requests differ from transformers' by {difference:.1e}"
        outcomes = [site.outcome for site in sites] + [
            operation.outcome for operation in operations
        ]
        if WRONG in outcomes:
            try:
                sites, operations = _compare_locally(reference, table, plain, edited, limits)
            except Exception as error:  # noqa: BLE001 - vLLM may have patched its classes
                note += f", and transformers' model fails after vLLM's ({type(error).__name__})"
                return Judgement(tuple(sites), (), UNCOMPARED, note, limits.tolerance)
            is_local = True
        else:
            note += ", so the tolerance was increased"
    outcome, reason = _verdict(sites, operations, note)
    if is_local and outcome != WRONG:
        outcome, reason = INCOMPARABLE, _not_comparable(difference, reason if outcome != OK else "")
    if outcome == WRONG and not math.isfinite(difference):
        # For example because vLLM did not load some weights.
        outcome, reason = UNCOMPARED, "vLLM's own logits of plain requests are not finite"
    return Judgement(tuple(sites), tuple(operations), outcome, reason, limits.tolerance)


def _not_comparable(difference: float, more: str) -> str:
    reason = (
        f"vLLM itself differs from transformers by {difference:.1e} in the logits of plain "
        "requests; the sites fit their neighbours, which does not show that each is in its place"
    )
    return f"{reason} ({more})" if more else reason


def _compare_locally(
    reference: Reference,
    table: SiteTable,
    plain: CaseOutputs,
    edited: CaseOutputs,
    limits: ErrorLimits,
) -> tuple[list[SiteFound], list[OperationFound]]:
    """Compare each site with its neighbouring sites; see `midstream.lab.tools.doctor.local`."""
    errors = local.site_errors(reference, plain.cases, plain.outputs, limits)
    unedited = [
        output
        for case, output in zip(edited.cases, edited.outputs, strict=True)
        if case.edit is None
    ]
    operations = [
        local.judge_operation(reference, case, output, [plain.outputs[EDITED], *unedited], limits)
        for case, output in zip(edited.cases, edited.outputs, strict=True)
    ]
    return _sites(reference, table, errors, limits), operations


def _sites(
    reference: Reference, table: SiteTable, errors: Mapping[Tap, float | None], limits: ErrorLimits
) -> list[SiteFound]:
    """Return what was found at each site of each layer."""
    findings = []
    for state in table.states:
        if state.site not in (*IN_LAYERS, *COMPARED):
            continue
        tap = state.site, state.layer
        missing, error = reference.missing(tap), errors.get(tap)
        if not state.tapped:
            findings.append(SiteFound(*tap, LACKING, None, state.reason))
        elif missing is not None:
            findings.append(SiteFound(*tap, UNCOMPARED, None, missing))
        elif error is None:
            reason = UNPROVEN if state.site in OUTER else local.WITHIN
            findings.append(SiteFound(*tap, UNCOMPARED, None, reason))
        elif error <= limits.tolerance:
            findings.append(SiteFound(*tap, OK, error))
        else:
            findings.append(SiteFound(*tap, WRONG, error, "its values differ from transformers'"))
    return findings


def _verdict(
    sites: Sequence[SiteFound], operations: Sequence[OperationFound], note: str
) -> tuple[str, str]:
    """Return the overall (outcome, reason)."""
    wrong = [
        f"{site.site} of layer {site.layer} (off by {site.error:.1e})"
        for site in sites
        if site.outcome == WRONG
    ]
    wrong += [
        f"{operation.name} at {operation.site} of layer {operation.layer} ({operation.reason})"
        for operation in operations
        if operation.outcome == WRONG
    ]
    if wrong:
        return WRONG, "; ".join([*wrong, *([note] if note else [])])
    if any(site.reason == UNPROVEN for site in sites):
        return UNCOMPARED, f"{note}, which is not conclusive for every site"
    if not any(site.outcome == OK for site in sites):
        return UNCOMPARED, "no site of this engine was found in transformers' layers"
    return OK, note
