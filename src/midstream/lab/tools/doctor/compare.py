"""Comparison of the engine's outputs with transformers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from midstream.lab.tools.doctor import formulas
from midstream.lab.tools.doctor.cases import Case
from midstream.lab.tools.doctor.report import OK, UNCOMPARED, WRONG, OperationFound
from midstream.sites import Tap

# Relative to a row's norm. Kernels sum in a different order than transformers.
TOLERANCES = {"float32": 2e-3, "bfloat16": 1.5e-1, "float16": 3e-2}
# Used where vLLM's own logits differ from transformers (some of its kernels round to less than
# float32). A tap at the wrong place still exceeds these by far.
LOOSE = {"float32": 2e-2, "bfloat16": 1.5e-1, "float16": 3e-2}
# Of vLLM's own modules: the same kernels ran on both sides; edits are rounded to the dtype in other
# places.
OWN = {"float32": 1e-5, "bfloat16": 4e-2, "float16": 5e-3}
# Differences of log-probabilities, as a fraction of (maximum - median): below these, two tokens
# count as equally likely and two outputs as equal.
TIES = {"float32": 5e-4, "bfloat16": 1e-1, "float16": 3e-2}
# An edit that moves its rows by less than this many tolerances proves nothing.
LEAST_EFFECT = 5.0


def row_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest relative error of a row, ‖found − expected‖ / ‖expected‖.

    The denominator is at least a tenth of the median row norm. The result is infinite where the
    shapes differ or a value is not finite.

    Args:
        actual, expected: [T, H].
    """
    if actual.shape != expected.shape:
        return math.inf
    if actual.numel() == 0:
        return 0.0
    a, b = actual.double().cpu(), expected.double().cpu()
    lengths = b.norm(dim=-1)
    floor = max(1e-6, 0.1 * float(lengths.median()))
    error = float(((a - b).norm(dim=-1) / lengths.clamp_min(floor)).max())
    return error if math.isfinite(error) else math.inf


def same_rows(case: Case, output: Any, tie: float) -> tuple[int, str]:
    """Return the number of rows with the same tokens on both sides, and a description of the error.

    Greedy tokens may diverge where two are equally likely; later rows then belong to different
    tokens. A divergence between tokens that are not equally likely is an error.

    Args:
        tie: largest difference of log-probabilities at which tokens count as equally likely; see
            `TIES`.

    Returns:
        (number of rows, description); the description is empty if there is no error.
    """
    generated = list(output.outputs[0].token_ids)
    for index, (ours, theirs) in enumerate(zip(generated, case.tokens, strict=False)):
        if ours == theirs:
            continue
        likely = case.logits[len(case.prompt) - 1 + index].log_softmax(dim=-1)
        gap = float(likely[theirs] - likely[ours]) / _spread(likely)
        problem = f"token {index} is {ours}, expected {theirs}" if gap > tie else ""
        return len(case.prompt) + index, problem
    return len(case.prompt) + len(generated) - 1, ""


def site_errors(cases: Sequence[Case], outputs: Sequence[Any], tie: float) -> dict[Tap, float]:
    """Return the largest error of each captured tap over plain requests."""
    errors: dict[Tap, float] = defaultdict(float)
    for case, output in zip(cases, outputs, strict=True):
        rows, _ = same_rows(case, output, tie)
        for tap, value in output.activations.items():
            if tap in case.values:
                error = row_error(value[:rows].flatten(1), case.values[tap][:rows])
                errors[tap] = max(errors[tap], error)
    return dict(errors)


def logit_error(cases: Sequence[Case], outputs: Sequence[Any], tie: float) -> float:
    """Return the largest error of the generated tokens' log-probabilities, as a fraction of
    (maximum - median); infinite where a value is not finite.
    """
    worst = 0.0
    for case, output in zip(cases, outputs, strict=True):
        rows, _ = same_rows(case, output, tie)
        for index, step in enumerate(output.outputs[0].logprobs):
            if len(case.prompt) + index > rows:
                break
            expected = case.logits[len(case.prompt) - 1 + index].log_softmax(dim=-1)
            for token, logprob in step.items():
                if token < expected.shape[0]:
                    error = abs(logprob.logprob - float(expected[token])) / _spread(expected)
                    worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def _spread(likely: Tensor) -> float:
    return max(1e-9, float(likely.max() - likely.median()))


@dataclass(frozen=True)
class ErrorLimits:
    """Limits that the engine's values are compared with.

    Attributes:
        tie: how far a greedy token's log-probability may be below the best one; see `TIES`.
    """

    tolerance: float
    tie: float


def limits_for(dtype: str, difference: float, own: bool = False) -> ErrorLimits:
    """Return the limits for an engine of this dtype whose logits have this error; see
    `logit_error`.

    Args:
        own: compared with vLLM's own modules.
    """
    if own:
        return ErrorLimits(OWN[dtype], TIES[dtype])
    if difference <= TIES[dtype]:
        return ErrorLimits(TOLERANCES[dtype], TIES[dtype])
    return ErrorLimits(LOOSE[dtype], max(TIES[dtype], LOOSE[dtype]))


def judge_operation(
    case: Case, output: Any, limits: ErrorLimits, skipped: Mapping[Tap, float]
) -> OperationFound:
    """Compare the result of one operation with its definition.

    Args:
        skipped: taps whose values already differ without edits.
    """
    assert case.tap is not None
    site, layer = case.tap
    tolerance = limits.tolerance
    rows, problem = same_rows(case, output, limits.tie)
    worst, where = 0.0, ""
    for tap, value in output.activations.items():
        if tap in skipped or tap not in case.values:
            continue
        error = row_error(value[:rows].flatten(1), case.values[tap][:rows])
        if error > worst:
            worst, where = error, f"{tap[0]} of layer {tap[1]}"
    if case.probe is not None:
        expected = formulas.score(case.probe, case.values[case.tap], case.heads)[:rows]
        scores = output.probes["score"].double()[:rows]
        error = float((scores - expected).abs().max() / expected.abs().max())
        if error > worst:
            worst, where = error, "its scores"
    problems = [problem, *output.receipt.problems]
    if not worst <= tolerance:
        problems.append(f"{where}: off by {worst:.1e}")
    reason = "; ".join(text for text in problems if text)
    if not reason and case.edit is not None and case.effect < LEAST_EFFECT * tolerance:
        reason = f"the edit changes its tap by {case.effect:.1e} (relative), too little to verify"
        return OperationFound(case.name, site, layer, UNCOMPARED, None, reason)
    return OperationFound(case.name, site, layer, WRONG if reason else OK, worst, reason)
