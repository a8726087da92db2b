"""Fits: rows from memory, from a store or from prompts, to an estimate per layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from midstream.errors import SpecError
from midstream.lab.fit.estimate import Estimate, estimate
from midstream.lab.fit.folds import Folds, Indices, number
from midstream.lab.fit.methods import Method
from midstream.lab.fit.prompts import CapturedClass
from midstream.lab.fit.samples import ArraySamples, Samples, StoredSamples, check_alike, pair_up
from midstream.plan.selection import read_site
from midstream.validation import at, kind, read_int

if TYPE_CHECKING:
    from midstream.store.selection import Selection

Fitted = tuple[Mapping[int, Estimate], str, str, int, str]
"""Estimates by layer, site, name of the method, number of folds, type of the model."""


@dataclass(frozen=True)
class FitOptions:
    """How rows of one site are fitted; see `Directions.fit`. `groups` are as they were given."""

    method: Method
    site: str
    folds: int
    groups: Any
    seed: int

    @staticmethod
    def read(method: object, site: str, folds: object, groups: Any, seed: object) -> FitOptions:
        """Check the options. `groups` are checked with the rows."""
        with at("method"):
            chosen = Method.read(method)
        with at("site"):
            site = read_site(site)
        with at("folds"):
            most = read_int(folds)
            if most < 0 or most == 1:
                raise SpecError("", f"expected 0, or at least 2, got {most}")
        with at("seed"):
            number = read_int(seed)
            if number < 0:
                raise SpecError("", f"expected 0 or more, got {number}")
        return FitOptions(chosen, site, most, groups, number)


def fit_rows(positive: object, negative: object, layers: object, options: FitOptions) -> Fitted:
    """Fit rows in memory; see `Directions.from_rows`."""
    samples = [
        ArraySamples.read(path, value, layers)
        for path, value in (("positive", positive), ("negative", negative))
    ]
    owners = [np.arange(len(class_samples)) for class_samples in samples]
    return _fit(samples[0], samples[1], options, _keyed(options.groups, owners))


@dataclass(frozen=True)
class PromptFit:
    """A fit to prompts: its arguments, read before the prompts are captured."""

    options: FitOptions
    counts: tuple[int, int]  # number of prompts of each class

    @staticmethod
    def read(positive: Any, negative: Any, options: FitOptions) -> PromptFit:
        """Check that a method that needs pairs has them."""
        counts = len(positive), len(negative)
        if options.method.needs_pairs and counts[0] != counts[1]:
            raise _no_pairs(options.method, *counts, "prompts")
        return PromptFit(options, counts)

    def fit(self, llm: Any, classes: Sequence[CapturedClass]) -> Fitted:
        """Fit the rows of both classes, the positives first, captured on `llm`."""
        samples = [ArraySamples(captured.rows) for captured in classes]
        check_alike(*samples)
        owners = [captured.owners for captured in classes]
        method = self.options.method
        if method.needs_pairs and any(
            len(set(class_owners.tolist())) < len(class_owners) for class_owners in owners
        ):
            raise SpecError(
                "positions",
                f'method="{method.name}" compares one row of each prompt, got several; '
                'select one token, or give reduce="mean"',
            )
        keys = _keyed(self.options.groups, owners, self.counts)
        fitted = _fit(samples[0], samples[1], self.options, keys)
        return (*fitted[:4], _model_type(llm))


def fit_store(
    positive: Selection, negative: Selection, method: object, folds: int, groups: Any, seed: int
) -> Fitted:
    """Fit rows of a store; see `Directions.from_store`."""
    from midstream.store.selection import as_selection

    samples = (
        StoredSamples(as_selection(positive), "positive"),
        StoredSamples(as_selection(negative), "negative"),
    )
    if samples[0].site != samples[1].site:
        raise SpecError(
            "negative", f"its rows are of {samples[1].site}, those of positive {samples[0].site}"
        )
    requests = [class_samples.requests() for class_samples in samples]
    if groups is None:
        counts = len(set(requests[0])), len(set(requests[1]))
        keys = pair_up(requests[0], requests[1], counts)
    elif callable(groups):
        numbers: dict[Any, int] = {}
        keys = (
            number(map(groups, requests[0]), numbers),
            number(map(groups, requests[1]), numbers),
        )
    else:
        raise SpecError("groups", f"expected a function of a request's id, got {kind(groups)}")
    options = FitOptions.read(method, samples[0].site, folds, groups, seed)
    return _fit(samples[0], samples[1], options, keys)


def _fit(
    positive: Samples,
    negative: Samples,
    options: FitOptions,
    groups: tuple[Indices, Indices],
) -> Fitted:
    chosen, seed = options.method, options.seed
    check_alike(positive, negative)
    if chosen.needs_pairs:
        if len(positive) != len(negative):
            raise _no_pairs(chosen, len(positive), len(negative), "rows")
        if len(positive) < 3:
            raise SpecError(
                "method",
                f'"{chosen.name}" needs at least 3 pairs, got {len(positive)}; use "mean"',
            )
    assigned = Folds.assign(*groups, options.folds, seed)
    if chosen.needs_pairs and not np.array_equal(assigned.positive, assigned.negative):
        raise SpecError("groups", "the two rows of a pair must be of one group")
    estimates = {
        layer: estimate(positive, negative, layer, chosen, assigned, seed)
        for layer in positive.layers
    }
    return estimates, options.site, chosen.name, assigned.count, ""


def _keyed(
    groups: Any, owners: Sequence[Indices], counts: tuple[int, int] | None = None
) -> tuple[Indices, Indices]:
    """Return the group of each row of both classes.

    `groups` None: a pair is a group, or without pairs a prompt is. `owners`: the prompt of each
    row. `counts`: number of prompts of each class; None: of rows.
    """
    first, second = counts or (len(owners[0]), len(owners[1]))
    if groups is None:
        # Without pairs, numbers of the second class come after those of the first.
        return owners[0], owners[1] if first == second else owners[1] + first
    if isinstance(groups, (str, bytes)) or not hasattr(groups, "__len__"):
        raise SpecError("groups", f"expected a list of keys, got {kind(groups)}")
    sides = [groups, groups]
    is_two = isinstance(groups, tuple) and len(groups) == 2
    if is_two and all(
        hasattr(class_groups, "__len__") and not isinstance(class_groups, str)
        for class_groups in groups
    ):
        sides = [list(groups[0]), list(groups[1])]
    for side, count, name in zip(sides, (first, second), ("positive", "negative"), strict=True):
        if len(side) != count:
            raise SpecError(
                "groups", f"expected {count} keys, one for each {name}, got {len(side)}"
            )
    numbers: dict[Any, int] = {}
    try:
        keys = [number(side, numbers) for side in sides]
    except TypeError:
        raise SpecError("groups", "expected keys that can be hashed, such as texts") from None
    return keys[0][owners[0]], keys[1][owners[1]]


def _no_pairs(method: Method, positives: int, negatives: int, of: str) -> SpecError:
    return SpecError(
        "method",
        f'"{method.name}" needs pairs, got {positives} positive and {negatives} negative {of}; '
        'give as many of each, or use "mean", "lda" or "logistic"',
    )


def _model_type(llm: Any) -> str:
    config = getattr(getattr(llm, "model_config", None), "hf_config", None)
    return str(getattr(config, "model_type", ""))
