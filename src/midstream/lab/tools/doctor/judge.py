"""Verdict on a model, from the outputs of the engine and of transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from midstream.lab.attribution.hooked.end_hooks import COMPARED
from midstream.lab.tools.doctor import compare
from midstream.lab.tools.doctor.cases import Case
from midstream.lab.tools.doctor.compare import ErrorLimits
from midstream.lab.tools.doctor.own_modules import OwnModules
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
from midstream.sites import IN_LAYERS, Tap

# An error that is this many times one of a right site is not one of rounding.
_ROUNDING = 3.0


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
    reference: Any, table: SiteTable, plain: CaseOutputs, edited: CaseOutputs, dtype: str
) -> Judgement:
    """Compare every site and operation with a reference.

    Where vLLM's own logits differ from transformers' and sites do too, nothing is shown: the
    outcome is `INCOMPARABLE`.

    Args:
        reference: a `Reference` or `OwnModules`.
    """
    own = isinstance(reference, OwnModules)
    tie = compare.TIES[dtype]
    difference = compare.logit_error(plain.cases, plain.outputs, tie)
    limits = compare.limits_for(dtype, difference, own)
    errors = compare.site_errors(plain.cases, plain.outputs, limits.tie)
    sites = _sites(reference, table, errors, limits)
    differing = {(site.site, site.layer): 0.0 for site in sites if site.outcome == WRONG}
    operations = [
        compare.judge_operation(case, output, limits, differing)
        for case, output in zip(edited.cases, edited.outputs, strict=True)
    ]
    note = ""
    if difference > tie:
        note = (
            f"vLLM's own logits of plain requests differ from {reference.name}' by {difference:.1e}"
        )
        note += "" if own else ", so the tolerance was increased"
    outcome, reason = verdict(sites, operations, note)
    if outcome == WRONG and not math.isfinite(difference):
        # For example because vLLM did not load some weights.
        outcome, reason = UNCOMPARED, "vLLM's own logits of plain requests are not finite"
    elif outcome == WRONG and difference > tie and not own:
        outcome = INCOMPARABLE
        reason = (
            f"vLLM itself differs from transformers by {difference:.1e} in the logits of plain "
            "requests"
        )
    return Judgement(tuple(sites), tuple(operations), outcome, reason, limits.tolerance)


def merge(theirs: Judgement, own: Judgement) -> Judgement:
    """Return the judgement `own`, with what the other showed of the sites that it says nothing of.
    Where vLLM itself differs from transformers, only what matches is shown; in half precision, what
    differs no more than sites do that `own` proves right is no evidence.
    """
    proven = {(site.site, site.layer) for site in own.sites if site.outcome == OK}
    rounding = max(
        (site.error or 0.0 for site in theirs.sites if (site.site, site.layer) in proven),
        default=0.0,
    )

    def shows(finding: SiteFound | OperationFound) -> bool:
        if finding.outcome != WRONG or theirs.outcome == INCOMPARABLE:
            return finding.outcome == OK
        return finding.error is None or not finding.error <= _ROUNDING * rounding

    others = {(site.site, site.layer): site for site in theirs.sites if shows(site)}
    sites = [
        others.get((site.site, site.layer), site) if site.outcome == UNCOMPARED else site
        for site in own.sites
    ]
    shown = {(operation.name, operation.site, operation.layer) for operation in own.operations}
    operations = [
        *own.operations,
        *(
            operation
            for operation in theirs.operations
            if shows(operation) and (operation.name, operation.site, operation.layer) not in shown
        ),
    ]
    outcome, reason = verdict(sites, operations, "")
    return Judgement(tuple(sites), tuple(operations), outcome, reason, own.tolerance)


def _sites(
    reference: Any, table: SiteTable, errors: Mapping[Tap, float], limits: ErrorLimits
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
            findings.append(SiteFound(*tap, UNCOMPARED, None, "no request captured it"))
        elif error <= limits.tolerance:
            findings.append(SiteFound(*tap, OK, error))
        else:
            findings.append(
                SiteFound(*tap, WRONG, error, f"its values differ from {reference.name}'")
            )
    return findings


def verdict(
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
    if not any(site.outcome == OK for site in sites):
        return UNCOMPARED, "no site of this engine was found in the reference's layers"
    return OK, note
