"""Tokens between two marks, found by a scan of the whole request, and requests that have marks."""

import random
from collections.abc import Sequence
from typing import Any

import torch

from midstream import Between, Capture, SamplingParams
from support.oracle_edits import EVERY_SITE, At, EditOracle

# Of so few tokens that marks come often.
FEW = (3, 4, 5, 6, 7, 8)
Mark = Sequence[int] | None
MARKS: tuple[tuple[Mark, Mark], ...] = (
    ([5], [7]),
    (None, [7]),
    ([7], None),
    ([5], [5]),
    ([3, 4], [7]),
    ([5], [3, 3, 4]),
    ([5, 5], [5, 6]),
    ([99], [7]),
    ([6], [99]),
)


def between(ids: Sequence[int], start: Mark, end: Mark) -> list[int]:
    """The positions after a start mark and before the next end mark."""
    chosen, inside, begun = [], start is None, 0
    for position in range(len(ids)):
        mark = end if inside else start
        seen = list(ids[begun : position + 1])
        if mark is not None and seen[-len(mark) :] == list(mark):
            inside, begun = not inside, position + 1
        elif inside:
            chosen.append(position)
    return chosen


def item(start: Mark, end: Mark) -> Between:
    return Between(*(None if mark is None else list(mark) for mark in (start, end)))


def prompt(seed: int, size: int) -> list[int]:
    return random.Random(seed).choices(FEW, k=size)


def few(count: int, **more: Any) -> SamplingParams:
    """Parameters of a request that generates the few tokens, at random."""
    return SamplingParams(
        temperature=1.0, max_tokens=count, ignore_eos=True, detokenize=False,
        allowed_token_ids=list(FEW), **more,
    )  # fmt: skip


def ids_of(given: Sequence[int], completion: Any) -> list[int]:
    """The token of each row."""
    return [*given, *completion.token_ids][:-1]


def problems(
    oracle: EditOracle, ids: Sequence[int], completion: Any, edits: Sequence[tuple[Any, list[int]]]
) -> list[str]:
    """In what all rows and the receipt differ from edits at some positions."""
    places = [At(edit, frozenset(chosen).__contains__) for edit, chosen in edits]
    seen = oracle.run(ids, places)
    found = list(completion.receipt.problems)
    for tap, rows in completion.activations.items():
        expected = seen.values[tap]
        if rows.shape != expected.shape or not torch.allclose(rows, expected, 1e-3, 1e-4):
            found.append(f"{tap} differs")
    told = {
        one.what: [place for span in one.positions for place in range(*span)]
        for one in completion.receipt.selected
    }
    for index, (_, chosen) in enumerate(edits):
        if told[f"edits[{index}]"] != chosen:
            found.append(f"edits[{index}] is said to be at {told[f'edits[{index}]']}, not {chosen}")
    done = sum(len(chosen) * len(oracle.taps(edit)) for edit, chosen in edits)
    if not completion.receipt.edited.applied == completion.receipt.edited.expected == done:
        found.append(f"{completion.receipt.edited}, expected {done}")
    return found


EVERYTHING = Capture("all", EVERY_SITE)
