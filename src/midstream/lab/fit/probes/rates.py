"""A threshold with the rates that it has on held-out texts, and these rates by slice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import Any

import numpy as np

from midstream.errors import SpecError
from midstream.lab.fit.folds import Indices
from midstream.lab.fit.probes.intervals import Floats, Interval, auc_of, rate_of
from midstream.plan.probe import Probe
from midstream.steering.listing import html_table, text_table
from midstream.validation import kind

HEADINGS = ("slice", "texts", "positives", "AUC", "FPR", "TPR")


@dataclass(frozen=True)
class ThresholdChoice:
    """A threshold for a false positive rate.

    Attributes:
        value: a text whose score is at least so much counts as positive.
        target: the false positive rate that was asked for.
        fpr, tpr: rates on held-out texts, with Clopper–Pearson intervals.
        num_negatives: held-out negatives.
        confidence: of the intervals.
        probe: the probe, whose `info` has the threshold and the rates.
    """

    value: float
    target: float
    fpr: Interval
    tpr: Interval
    num_negatives: int
    confidence: float
    probe: Probe

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        return (
            f"score ≥ {self.value:.6g}: FPR {self.fpr}, TPR {self.tpr} of held-out texts "
            f"({self.confidence:.0%} intervals; target {self.target:g})"
        )


def threshold_for(scores: Floats, labels: Indices, fpr: float) -> float:
    """Return a threshold that at most a share `fpr` of the negatives reach.

    It is between the highest negative that does not reach it and the next score above, so that a
    rounding of float32 changes nothing. Because it is an order statistic of the negatives, the
    Clopper–Pearson interval of the rate holds although they also chose it.

    Raises:
        SpecError: there are too few negatives for such a rate.
    """
    negative = np.sort(scores[labels == 0])[::-1]
    needed = ceil(1 / fpr - 1e-9)
    if len(negative) < needed:
        raise SpecError(
            "fpr",
            f"a false positive rate of {fpr:g} needs at least {needed} held-out negatives, of which"
            f" one may be flagged; there are {len(negative)}",
        )
    allowed = floor(fpr * len(negative) + 1e-9)
    highest = float(negative[allowed]) if allowed < len(negative) else -np.inf
    above = scores[scores > highest]
    if not np.isfinite(highest):
        return float(scores.min())
    if not len(above):
        return highest + max(abs(highest), 1.0) * 1e-3
    return (highest + float(above.min())) / 2


@dataclass(frozen=True)
class Slice:
    """Held-out texts of one value.

    Attributes:
        value: the value.
        num_texts, num_positives: how many.
        auc, fpr, tpr: at the table's threshold; NaN without texts of a class.
    """

    value: Any
    num_texts: int
    num_positives: int
    auc: Interval
    fpr: Interval
    tpr: Interval


@dataclass(frozen=True)
class SliceTable:
    """Rates by slice; prints as a table.

    Attributes:
        slices: in the order in which values occur.
        threshold: a score of at least so much counts as positive.
    """

    slices: tuple[Slice, ...]
    threshold: float

    @staticmethod
    def of(
        values: Sequence[Any], scores: Floats, labels: Indices, threshold: float, confidence: float
    ) -> SliceTable:
        """Return the table of held-out texts with a value each."""
        numbers: dict[Any, int] = {}
        try:
            index = np.array([numbers.setdefault(value, len(numbers)) for value in values])
        except TypeError:
            raise SpecError("values", "expected values that can be hashed") from None
        slices = []
        for value, place in numbers.items():
            mine = index == place
            positive, negative = (scores[mine & (labels == label)] for label in (1, 0))
            slices.append(
                Slice(
                    value,
                    int(mine.sum()),
                    len(positive),
                    auc_of(positive, negative, confidence),
                    rate_of(negative >= threshold, confidence),
                    rate_of(positive >= threshold, confidence),
                )
            )
        return SliceTable(tuple(slices), threshold)

    def __getitem__(self, value: Any) -> Slice:
        """Return the slice of a value."""
        for part in self.slices:
            if part.value == value:
                return part
        known = ", ".join(repr(part.value) for part in self.slices[:8])
        raise SpecError("value", f"expected one of {known}, got {kind(value)}")

    def __iter__(self) -> Iterator[Slice]:
        return iter(self.slices)

    def __len__(self) -> int:
        return len(self.slices)

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (
                str(part.value),
                str(part.num_texts),
                str(part.num_positives),
                *map(str, (part.auc, part.fpr, part.tpr)),
            )
            for part in self.slices
        ]

    def __str__(self) -> str:
        return text_table(HEADINGS, self._cells())

    def _repr_html_(self) -> str:
        return html_table(HEADINGS, self._cells())
