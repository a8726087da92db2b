"""Whether what the engine gave back is what transformers has."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from midstream.doctor import formulas
from midstream.doctor.cases import Case
from midstream.doctor.reference import Tap
from midstream.doctor.report import OK, WRONG, OperationFound

# Relative to a row's length. Kernels sum in another order than transformers does.
TOLERANCES = {"float32": 2e-3, "bfloat16": 1.5e-1, "float16": 3e-2}
# Where vLLM's own outputs are that far from transformers' (some of its kernels round to less than
# float32), sites are held to less; a tap at the wrong place is far beyond that.
LOOSE = {"float32": 2e-2, "bfloat16": 1.5e-1, "float16": 3e-2}
# Of log-probabilities, by how far the best is above the middle: when two tokens are equally
# likely, and when outputs differ.
TIES = {"float32": 5e-4, "bfloat16": 1e-1, "float16": 3e-2}
# An edit that moves its rows by less than this many tolerances shows nothing.
LEAST_EFFECT = 5.0


def row_error(found: Tensor, expected: Tensor) -> float:
    """The largest ‖found − expected‖ of a row by that row's length. Rows far shorter than most are
    measured by a tenth of the median. Infinite where the shapes differ or a number is none.
    """
    if found.shape != expected.shape:
        return math.inf
    if found.numel() == 0:
        return 0.0
    a, b = found.double().cpu(), expected.double()
    lengths = b.norm(dim=-1)
    floor = max(1e-6, 0.1 * float(lengths.median()))
    error = float(((a - b).norm(dim=-1) / lengths.clamp_min(floor)).max())
    return error if math.isfinite(error) else math.inf


def same_rows(case: Case, output: Any, tie: float) -> tuple[int, str]:
    """How many rows of a request are of the same tokens on both sides, and what is wrong.

    Greedy tokens may part where two are equally likely; rows after that are of other tokens. Where
    they are not equally likely, that is an error.

    Args:
        case: the request.
        output: its vLLM output.
        tie: what counts as equally likely, of log-probabilities.
    """
    told = list(output.outputs[0].token_ids)
    for nth, (ours, theirs) in enumerate(zip(told, case.tokens, strict=False)):
        if ours == theirs:
            continue
        likely = case.logits[len(case.prompt) - 1 + nth].log_softmax(dim=-1)
        gap = float(likely[theirs] - likely[ours]) / _spread(likely)
        problem = f"token {nth} is {ours}, expected {theirs}" if gap > tie else ""
        return len(case.prompt) + nth, problem
    return len(case.prompt) + len(told) - 1, ""


def site_errors(cases: Sequence[Case], outputs: Sequence[Any], tie: float) -> dict[Tap, float]:
    """The worst error of each captured tap over plain requests."""
    found: dict[Tap, float] = defaultdict(float)
    for case, output in zip(cases, outputs, strict=True):
        rows, _ = same_rows(case, output, tie)
        for tap, value in output.activations.items():
            if tap in case.values:
                error = row_error(value[:rows], case.values[tap][:rows])
                found[tap] = max(found[tap], error)
    return dict(found)


def logit_error(cases: Sequence[Case], outputs: Sequence[Any], tie: float) -> float:
    """How far the log-probabilities of generated tokens are from transformers', at most, by how far
    the best is above the middle; infinite where a number is none.
    """
    worst = 0.0
    for case, output in zip(cases, outputs, strict=True):
        rows, _ = same_rows(case, output, tie)
        for nth, step in enumerate(output.outputs[0].logprobs):
            if len(case.prompt) + nth > rows:
                break
            expected = case.logits[len(case.prompt) - 1 + nth].log_softmax(dim=-1)
            for token, one in step.items():
                if token < expected.shape[0]:
                    error = abs(one.logprob - float(expected[token])) / _spread(expected)
                    worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def _spread(likely: Tensor) -> float:
    return max(1e-9, float(likely.max() - likely.median()))


@dataclass(frozen=True)
class Held:
    """What values are held to.

    Attributes:
        tolerance: relative, of a row.
        tie: by how much greedy tokens may be below the best.
    """

    tolerance: float
    tie: float


def held(dtype: str, apart: float) -> Held:
    """What an engine of this dtype is held to, whose outputs are that far from transformers'."""
    if apart <= TIES[dtype]:
        return Held(TOLERANCES[dtype], TIES[dtype])
    return Held(LOOSE[dtype], max(TIES[dtype], LOOSE[dtype]))


def judge_operation(
    case: Case, output: Any, held_to: Held, skipped: Mapping[Tap, float]
) -> OperationFound:
    """Whether one operation did what its definition says.

    Args:
        case: the request.
        output: its vLLM output.
        held_to: tolerances.
        skipped: taps whose plain values differ already.
    """
    assert case.tap is not None
    site, layer = case.tap
    tolerance = held_to.tolerance
    rows, problem = same_rows(case, output, held_to.tie)
    worst, where = 0.0, ""
    for tap, value in output.activations.items():
        if tap in skipped or tap not in case.values:
            continue
        error = row_error(value[:rows], case.values[tap][:rows])
        if error > worst:
            worst, where = error, f"{tap[0]} of layer {tap[1]}"
    if case.probe is not None:
        expected = formulas.score(case.probe, case.values[case.tap])[:rows]
        told = output.probes["score"].double()[:rows]
        error = float((told - expected).abs().max() / expected.abs().max())
        if error > worst:
            worst, where = error, "its scores"
    problems = [problem, *output.receipt.problems]
    if not worst <= tolerance:
        problems.append(f"{where}: off by {worst:.1e}")
    if case.edit is not None and case.effect < LEAST_EFFECT * tolerance:
        problems.append(f"it moved what is there by only {case.effect:.1e}, too little to tell")
    found = "; ".join(one for one in problems if one)
    return OperationFound(case.name, site, layer, WRONG if found else OK, worst, found)
