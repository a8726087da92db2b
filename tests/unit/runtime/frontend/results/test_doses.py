"""Doses of a completion, from what its workers sent."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from midstream.runtime.frontend.results.doses import doses_of
from midstream.runtime.protocol.results import DoseSums

PLAN: Any = SimpleNamespace(measured={(0, "resid_post", 1): 0, (-1, "resid_post", 3): 1})
LATER: Any = SimpleNamespace(plan=SimpleNamespace(measured={(2, "resid_pre", 0): 0}))
FIRST = DoseSums(
    0,
    np.array([[6.0, 0.0], [3.0, 0.0], [4.0, 0.0]]),
    np.array([7.0, 8.0, 9.0]),
    np.array([[1.0, 0.5], [-1.0, 0.25], [9.0, 9.0]]),
)
OTHER = DoseSums(1, np.array([[1.0], [2.0], [0.75]]), np.zeros(0), np.zeros((0, 1)))


def part(stage: int, rank: int, *sent: DoseSums) -> Any:
    return SimpleNamespace(
        worker=SimpleNamespace(stage=stage, tensor_rank=rank), doses=lambda: list(sent)
    )


def shown(doses: Any) -> list[tuple[Any, ...]]:
    return [
        (dose.what, dose.site, dose.layer, dose.mean, dose.largest, dose.tokens) for dose in doses
    ]


def test_doses_are_means_over_the_edited_tokens_before_the_end():
    parts = [part(0, 1, FIRST), part(0, 0, FIRST)]
    assert shown(doses_of(PLAN, parts, 9, {})) == [
        ("edits[0]", "resid_post", 1, 7 / 4, 4.0, 4),
        ("steering[-1]", "resid_post", 3, 0.375, 0.5, 2),
    ]
    assert doses_of(PLAN, [], 9, {}) == ()


def test_a_version_has_the_doses_of_its_own_edits():
    doses = doses_of(PLAN, [part(0, 0, FIRST, OTHER)], 8, {1: LATER})
    assert shown(doses) == [
        ("versions[0].edits[0]", "resid_post", 1, 7 / 4, 4.0, 4),
        ("versions[0].steering[-1]", "resid_post", 3, 0.5, 0.5, 1),
        ("versions[1].edits[2]", "resid_pre", 0, 0.5, 0.75, 2),
    ]


def test_stages_have_the_doses_of_their_own_layers():
    none = DoseSums(0, np.zeros((3, 2)), np.zeros(0), np.zeros((0, 2)))
    parts = [part(0, 0, none), part(1, 0, FIRST)]
    assert len(doses_of(PLAN, parts, 9, {})) == 2
