"""From what both sides gave back to a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from midstream.doctor import compare, local
from midstream.doctor.cases import EDITED, Case
from midstream.doctor.compare import Held
from midstream.doctor.reference import Reference, Tap
from midstream.doctor.report import (
    LACKING,
    OK,
    UNCOMPARED,
    WRONG,
    OperationFound,
    SiteFound,
)
from midstream.site_table import SiteTable

UNPROVEN = "vLLM's model differs from transformers', and its neighbours do not tell"


@dataclass(frozen=True)
class Answers:
    """Requests, and what vLLM made of them.

    Attributes:
        cases: the requests.
        outputs: vLLM's, in the same order.
    """

    cases: Sequence[Case]
    outputs: Sequence[Any]


@dataclass(frozen=True)
class Judged:
    """The findings.

    Attributes:
        sites: every site of every layer.
        operations: each that was tried.
        outcome, reason: of the whole.
        tolerance: what errors were held to.
    """

    sites: tuple[SiteFound, ...]
    operations: tuple[OperationFound, ...]
    outcome: str
    reason: str
    tolerance: float


def judge(
    reference: Reference, table: SiteTable, plain: Answers, edited: Answers, dtype: str
) -> Judged:
    """Holds every site and operation to transformers: to the whole model, or, where vLLM's own
    outputs are not transformers', each site to its neighbours.
    """
    tie = compare.TIES[dtype]
    apart = compare.logit_error(plain.cases, plain.outputs, tie)
    held = compare.held(dtype, apart)
    errors = compare.site_errors(plain.cases, plain.outputs, held.tie)
    sites = _sites(reference, table, errors, held)
    differing = {(one.site, one.layer): 0.0 for one in sites if one.outcome == WRONG}
    operations = [
        compare.judge_operation(case, output, held, differing)
        for case, output in zip(edited.cases, edited.outputs, strict=True)
    ]
    note = ""
    if apart > tie:
        note = f"vLLM's own outputs of plain requests differ from transformers' by {apart:.1e}"
        outcomes = [one.outcome for one in sites] + [one.outcome for one in operations]
        if WRONG in outcomes:
            try:
                sites, operations = _locally(reference, table, plain, edited, held)
            except Exception as error:  # noqa: BLE001 - vLLM may have changed its classes
                note += f", whose model does not run beside vLLM's ({type(error).__name__})"
                return Judged(tuple(sites), (), UNCOMPARED, note, held.tolerance)
            note += ", so each site was held to its neighbours"
        else:
            note += ", so sites were held to less"
    outcome, reason = _verdict(sites, operations, note)
    if outcome == WRONG and not math.isfinite(apart):
        # Weights that it did not load, for one.
        outcome, reason = UNCOMPARED, "vLLM's own outputs of plain requests are no numbers"
    return Judged(tuple(sites), tuple(operations), outcome, reason, held.tolerance)


def _locally(
    reference: Reference, table: SiteTable, plain: Answers, edited: Answers, held: Held
) -> tuple[list[SiteFound], list[OperationFound]]:
    errors = local.site_errors(reference, plain.cases, plain.outputs, held)
    unedited = [
        output
        for case, output in zip(edited.cases, edited.outputs, strict=True)
        if case.edit is None
    ]
    operations = [
        local.judge_operation(reference, case, output, [plain.outputs[EDITED], *unedited], held)
        for case, output in zip(edited.cases, edited.outputs, strict=True)
    ]
    return _sites(reference, table, errors, held), operations


def _sites(
    reference: Reference, table: SiteTable, errors: Mapping[Tap, float | None], held: Held
) -> list[SiteFound]:
    found = []
    for state in table.states:
        tap = state.site, state.layer
        missing, error = reference.missing(tap), errors.get(tap)
        if not state.tapped:
            found.append(SiteFound(*tap, LACKING, None, state.reason))
        elif missing is not None:
            found.append(SiteFound(*tap, UNCOMPARED, None, missing))
        elif error is None:
            found.append(SiteFound(*tap, UNCOMPARED, None, UNPROVEN))
        elif error <= held.tolerance:
            found.append(SiteFound(*tap, OK, error))
        else:
            found.append(SiteFound(*tap, WRONG, error, "it is not what transformers has"))
    return found


def _verdict(
    sites: Sequence[SiteFound], operations: Sequence[OperationFound], note: str
) -> tuple[str, str]:
    """(outcome, reason) of the whole."""
    wrong = [
        f"{one.site} of layer {one.layer} (off by {one.error:.1e})"
        for one in sites
        if one.outcome == WRONG
    ]
    wrong += [
        f"{one.name} at {one.site} of layer {one.layer} ({one.reason})"
        for one in operations
        if one.outcome == WRONG
    ]
    if wrong:
        return WRONG, "; ".join([*wrong, *([note] if note else [])])
    if any(one.reason == UNPROVEN for one in sites):
        return UNCOMPARED, f"{note}, which do not tell of all of them"
    if not any(one.outcome == OK for one in sites):
        return UNCOMPARED, "no site that this engine has was found in transformers' layers"
    return OK, note
