"""`HeldOutScores`: what the scores of held-out texts say of a probe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import numpy as np

from midstream.errors import SpecError
from midstream.lab.fit.folds import Indices
from midstream.lab.fit.probes.calibration import (
    CalibrationReport,
    calibration_of,
    cross_fitted,
    report_of,
)
from midstream.lab.fit.probes.curves import LearningCurve, Roc
from midstream.lab.fit.probes.held_out import Split, fit_split, splits_of
from midstream.lab.fit.probes.intervals import Floats, Interval, auc_of, rate_of, read_share
from midstream.lab.fit.probes.labelled_rows import LabelledRows
from midstream.lab.fit.probes.rates import SliceTable, ThresholdChoice, threshold_for
from midstream.lab.fit.probes.recipe import Recipe
from midstream.plan.probe import Probe
from midstream.plan.probe_files.info import METHODS, ProbeInfo
from midstream.validation import at, is_int, kind, read_word, show

CONFIDENCE, _SIZES = 0.95, 5

H = TypeVar("H", bound="HeldOutScores")


@dataclass(frozen=True, eq=False)
class HeldOutScores:
    """A probe, its scores of texts that were held out of its fit, and what these say of it.

    Attributes:
        probe: the probe; its `info` has the model, the recipe, the hash of the data, and scores.
        scores: float64 [held-out texts]; of more than two classes their probabilities,
            [held-out texts, classes], of which `of` has one.
        labels: int64 [held-out texts], the index of the class: 1 for the positive one.
        texts: int64 [held-out texts], indices of the texts as they were given; of a store, of its
            requests.
        folds: int64 [held-out texts], the fold of each; 0 if one part is held out.
        data: the rows.
        recipe: how they were fitted.
        llm: the engine; None: it was fitted to rows.
        output: the class against the others that `of` has chosen, as an index; None: none.
    """

    probe: Probe
    scores: Floats
    labels: Indices
    texts: Indices
    folds: Indices
    data: LabelledRows = field(repr=False)
    recipe: Recipe
    llm: Any = field(default=None, repr=False)
    output: int | None = None

    @property
    def info(self) -> ProbeInfo:
        """What is known of the probe."""
        assert self.probe.info is not None
        return self.probe.info

    @property
    def auc(self) -> Interval:
        """The area below the ROC curve of held-out texts, with its 95 % interval: Newcombe 2006."""
        return self._auc(CONFIDENCE)

    @property
    def accuracy(self) -> Interval:
        """The share of held-out texts whose class is told, with its 95 % interval."""
        if self.scores.ndim == 2:
            told = self.scores.argmax(1) == self.labels
        else:
            told = (self.scores >= self.boundary) == (self.labels == 1)
        return rate_of(told, CONFIDENCE)

    @property
    def boundary(self) -> float:
        """The score of a text that is as likely of one class as of the other: 0 of log odds."""
        return 0.0 if self.output is None else 0.5

    def of(self: H, name: str) -> H:
        """Return the same for one of more than two classes against the others: its probability.

        Raises:
            SpecError: there are two classes, or none of this name.
        """
        classes = self.data.labels.classes
        if self.scores.ndim == 1 or name not in classes:
            known = ", ".join(map(show, classes[:8])) if self.scores.ndim == 2 else "no class"
            raise SpecError("name", f"expected one of {known}, got {show(name)}")
        index = classes.index(name)
        info = replace(self.info, recipe={**self.info.recipe, "class": name})
        return replace(
            self,
            probe=self.probe.with_info(info),
            scores=self.scores[:, index],
            labels=(self.labels == index).astype(np.int64),
            output=index,
        )

    def summary(self) -> dict[str, float]:
        """Return the numbers of held-out texts that a probe's file has."""
        if self.scores.ndim == 2:
            share = self.accuracy
            numbers = {"accuracy": share.value, "accuracy_low": share.low}
            return {**numbers, "accuracy_high": share.high, "texts": len(self.texts)}
        auc, positives = self.auc, int(self.labels.sum())
        numbers = {"auc": auc.value, "auc_low": auc.low, "auc_high": auc.high}
        return {**numbers, "positives": positives, "negatives": len(self.texts) - positives}

    def roc(self, confidence: float = CONFIDENCE) -> Roc:
        """Return the ROC curve of held-out texts."""
        from sklearn.metrics import roc_curve

        auc = self._auc(read_share("confidence", confidence))
        fpr, tpr, thresholds = roc_curve(self.labels, self.scores, drop_intermediate=False)
        return Roc(fpr, tpr, thresholds, auc)

    def threshold(self, fpr: float = 0.01, confidence: float = CONFIDENCE) -> ThresholdChoice:
        """Return the threshold for a false positive rate, with the rates of held-out texts.

        Args:
            fpr: the share of the negatives that may be flagged.
            confidence: of the intervals of Clopper and Pearson.

        Raises:
            SpecError: there are fewer than 1 / fpr held-out negatives.
        """
        self._check_two()
        target, level = read_share("fpr", fpr), read_share("confidence", confidence)
        value = threshold_for(self.scores, self.labels, target)
        (whole,) = SliceTable.of([""] * len(self.texts), self.scores, self.labels, value, level)
        numbers = {"target_fpr": target}
        for name, rate in (("fpr", whole.fpr), ("tpr", whole.tpr)):
            numbers |= {name: rate.value, f"{name}_low": rate.low, f"{name}_high": rate.high}
        info = replace(self.info, threshold=value, scores={**self.info.scores, **numbers})
        negatives = int((1 - self.labels).sum())
        probe = self.probe.with_info(info)
        return ThresholdChoice(value, target, whole.fpr, whole.tpr, negatives, level, probe)

    def calibrate(
        self,
        method: Literal["isotonic", "sigmoid"] = "sigmoid",
        confidence: float = CONFIDENCE,
    ) -> CalibrationReport:
        """Fit a map of scores to probabilities, and say how well it does.

        The map is fitted to all held-out scores, by scikit-learn. Its report is of maps that are
        each fitted without a fold: without folds, five parts of the held-out texts.

        Args:
            method: "isotonic", or "sigmoid" (Platt 1999), for fewer texts.
            confidence: of the intervals of the reliability table.

        Raises:
            SpecError: another method, or too few held-out texts.
        """
        self._check_two()
        with at("method"):
            name = read_word(method, METHODS)
        level, folds = read_share("confidence", confidence), self.folds
        if len(np.unique(folds)) == 1:
            mine = self.data.of(self.texts)
            folds = np.empty(len(self.texts), np.int64)
            for index, split in enumerate(splits_of(mine, 5, self.recipe.seed)):
                folds[split.held_out] = index
        shares = cross_fitted(self.scores, self.labels, folds, name)
        calibration = calibration_of(self.scores, self.labels, name)
        parts = report_of(self, shares, self.labels, level)
        scores = {**self.info.scores, "brier": parts["brier"], "ece": parts["ece"]}
        info = replace(self.info, calibration=calibration, scores=scores)
        fitted = replace(self, probe=self.probe.with_info(info))
        return CalibrationReport(**{**parts, "fitted": fitted})

    def by_slice(
        self,
        values: Sequence[Any],
        threshold: float | ThresholdChoice | None = None,
        confidence: float = CONFIDENCE,
    ) -> SliceTable:
        """Return AUC and rates of held-out texts by slice, such as their source or topic.

        Args:
            values: the slice of each text, of all as they were given.
            threshold: a score of at least so much counts as positive; what `threshold` returned, a
                number, or None: `boundary`.
            confidence: of the intervals.
        """
        self._check_two()
        if isinstance(values, (str, bytes)) or not hasattr(values, "__len__"):
            raise SpecError("values", f"expected a list with a value per text, got {kind(values)}")
        count = len(self.data.labels)
        if len(values) != count:
            raise SpecError("values", f"expected {count}, one for each text, got {len(values)}")
        mine = [values[index] for index in self.texts.tolist()]
        level = read_share("confidence", confidence)
        limit = self.boundary if threshold is None else float(threshold)
        return SliceTable.of(mine, self.scores, self.labels, limit, level)

    def learning_curve(self, sizes: Sequence[int] | None = None) -> LearningCurve:
        """Return the held-out AUC by the number of texts that are fitted.

        For each size and fold, a probe is fitted to so many of the fold's texts, with a share of
        each class; a larger size has the texts of a smaller one, and others. The held-out texts are
        the same for all sizes.

        Args:
            sizes: numbers of texts; None: five, up to all.

        Raises:
            SpecError: a size is above the texts that a fold fits, or has fewer than 4.
        """
        self._check_two()
        splits = splits_of(self.data, self.recipe.held_out, self.recipe.seed)
        most = min(len(split.fitted) for split in splits)
        if sizes is None:
            sizes = np.unique(np.geomspace(min(8, most), most, _SIZES).round().astype(int)).tolist()
        assert sizes is not None
        for index, size in enumerate(sizes):
            if not is_int(size) or not 4 <= int(size) <= most:
                raise SpecError(f"sizes[{index}]", f"expected 4 to {most} texts, got {size!r}")
        aucs = [self._auc_at(splits, int(size)) for size in sorted(sizes)]
        return LearningCurve(tuple(sorted(map(int, sizes))), tuple(aucs))

    def _auc_at(self, splits: Sequence[Split], size: int) -> Interval:
        """Return the AUC of probes that are fitted to `size` texts of each split."""
        recipe, classes = self.recipe, self.data.labels.indices
        scores, labels = [], []
        for split in splits:
            generator = np.random.default_rng(recipe.seed)
            # Of each class in turn so many that every beginning has a share of each.
            order = np.empty(len(split.fitted))
            for label in range(len(self.data.labels.classes)):
                mine = classes[split.fitted] == label
                order[mine] = generator.permutation(int(mine.sum())) / mine.sum()
            chosen = split.fitted[np.argsort(order, kind="stable")[:size]]
            part = Split(np.sort(chosen), split.held_out)
            held_out = fit_split(self.data, part, recipe.estimator, recipe.pool, recipe.seed)[2]
            scores.append(held_out if self.output is None else held_out[:, self.output])
            positive = 1 if self.output is None else self.output
            labels.append((classes[split.held_out] == positive).astype(np.int64))
        both = np.concatenate(scores), np.concatenate(labels)
        return auc_of(both[0][both[1] == 1], both[0][both[1] == 0], CONFIDENCE)

    def _auc(self, confidence: float) -> Interval:
        self._check_two()
        return auc_of(self.scores[self.labels == 1], self.scores[self.labels == 0], confidence)

    def _check_two(self) -> None:
        if self.scores.ndim == 2:
            known = ", ".join(map(show, self.data.labels.classes[:8]))
            raise SpecError("", f"there are several classes; fitted.of(…) is of one of {known}")
