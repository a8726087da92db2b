"""How strong the edits of a completion were, from what the workers measured."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import numpy as np

from midstream.errors import ScaleWarning
from midstream.plan import ResolvedPlan
from midstream.plan.resolved import path_of
from midstream.results.receipt import Dose
from midstream.runtime.frontend.request.prepared_plan import LaterPlan
from midstream.runtime.protocol.results import DoseSums, WorkerResult

_warned: set[tuple[str, str, int]] = set()  # of which this process has warned


def doses_of(
    plan: ResolvedPlan,
    parts: Sequence[WorkerResult],
    length: int,
    later: Mapping[int, LaterPlan],
) -> tuple[Dose, ...]:
    """Return the doses of the edits of a completion with so many rows, by version of its plan."""
    # All ranks of a stage have the same rows.
    stages: dict[int, list[DoseSums]] = {}
    for part in sorted(parts, key=lambda part: part.worker.tensor_rank):
        stages.setdefault(part.worker.stage, part.doses())
    doses = []
    for sent in sorted((sent for stage in stages.values() for sent in stage), key=_version):
        version = later.get(sent.version)
        if sent.version and version is None:
            continue  # which is a problem of the receipt
        measured = (plan if version is None else version.plan).measured
        prefix = f"versions[{sent.version}]." if later else ""
        latest = sent.latest[sent.positions < length]
        is_dose = latest >= 0
        totals = sent.totals[0] + np.where(is_dose, latest, 0).sum(0)
        counts = sent.totals[1] + is_dose.sum(0)
        largest = np.maximum(sent.totals[2], latest.max(0, initial=0))
        for (source, site, layer), column in measured.items():
            if column < counts.size and counts[column]:
                mean, count = totals[column] / counts[column], int(counts[column])
                most = float(largest[column])
                doses.append(Dose(prefix + path_of(source), site, layer, float(mean), most, count))
    return tuple(doses)


def _version(sent: DoseSums) -> int:
    return sent.version


def warn_of_doses(doses: Sequence[Dose], bound: float | None) -> None:
    """Warn of edits whose mean dose is above a bound, once for each place of an edit."""
    for dose in doses:
        place = dose.what, dose.site, dose.layer
        if bound is None or dose.mean <= bound or place in _warned:
            continue
        _warned.add(place)
        warnings.warn(
            f"{dose.what} changed {dose.site} of layer {dose.layer} by {dose.mean:.3g} times its "
            f"length, the mean of {dose.tokens} tokens, so the output is likely to be noise: use a "
            f"smaller scale, or raise midstream's setting warn_dose={bound:g}. This is shown once "
            "per process for each such place.",
            ScaleWarning,
            stacklevel=3,
        )
