"""Which texts are held out: folds of a cross-validation, or one part."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from midstream.errors import SpecError
from midstream.lab.fit.folds import Indices
from midstream.lab.fit.probes.estimators import Estimator
from midstream.lab.fit.probes.intervals import Floats, read_share
from midstream.lab.fit.probes.labelled_rows import LabelledRows, least_groups
from midstream.lab.fit.probes.row_scores import score_texts
from midstream.plan.probe import Probe
from midstream.validation import is_int


class Split(NamedTuple):
    """Texts that are fitted, and texts that are held out, int64 ascending."""

    fitted: Indices
    held_out: Indices


def read_held_out(value: Any) -> int | float:
    """Read the number of folds, or the share of the texts of one part."""
    if not is_int(value):
        return read_share("held_out", value)
    if value < 2:
        raise SpecError("held_out", f"expected at least 2 folds, or a share below 1, got {value}")
    return int(value)


def splits_of(data: LabelledRows, held_out: int | float, seed: int) -> list[Split]:
    """Return the splits of whole groups of texts, with a share of each class in each part."""
    from sklearn.model_selection import (
        GroupShuffleSplit,
        StratifiedGroupKFold,
        StratifiedShuffleSplit,
    )

    labels, groups = data.labels.indices, data.groups
    least = least_groups(labels, groups)
    if least < 2:
        raise SpecError("labels", "expected at least 2 texts, or groups, of each class")
    splitter: Any
    parts: tuple[Any, ...] = (labels, labels, groups)
    if isinstance(held_out, int):
        splitter = StratifiedGroupKFold(min(held_out, least), shuffle=True, random_state=seed)
    elif len(np.unique(groups)) == len(groups):
        splitter = StratifiedShuffleSplit(1, test_size=held_out, random_state=seed)
        parts = parts[:2]  # it has no groups
    else:
        splitter = GroupShuffleSplit(1, test_size=held_out, random_state=seed)
    try:
        splits = [Split(*both) for both in splitter.split(*parts)]
    except ValueError as error:  # such as a part without a text
        raise SpecError("held_out", str(error)) from None
    splits = [Split(np.sort(split.fitted), np.sort(split.held_out)) for split in splits]
    for split in splits:
        if len(set(labels[split.fitted].tolist())) < len(data.labels.classes):
            raise SpecError("groups", "a part that is fitted lacks a class: use more groups")
    return splits


def fit_split(
    data: LabelledRows, split: Split, estimator: Estimator, pool: str, seed: int
) -> tuple[Probe, dict[str, Any], Floats]:
    """Fit the first part of a split; return also what was chosen, and scores of the second."""
    probe, chosen = estimator.fit(data.of(split.fitted), seed)
    rest = data.of(split.held_out)
    return probe, chosen, score_texts(probe, rest.rows, rest.owners, pool)
