"""Gates with memory, compared with a loop over the tokens in transformers, however they are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.edit_cases import Case, Maker, all_problems
from support.oracle_edits import EVERY_SITE, PLACES, At, EditOracle
from support.scheduling import chunks

from midstream import Gate, Reading, Steer

TOLERANCE, TIE = 1e-4, 1e-3
COUNT = 8
LONG = [
    5, 17, 33, 101, 8, 77, 54, 23, 9, 150, 44, 12, 13, 99, 180, 64, 3, 70, 71, 120, 66, 14, 190,
    31, 57, 88, 142, 6, 25, 111, 39, 160, 81, 17, 5, 33, 101,
]  # fmt: skip
SHORT = [44, 8, 150, 9, 3]
MEMORIES: dict[str, dict[str, Any]] = {
    "rest": {"hold": "rest"},
    "hold": {"hold": 2},
    "release": {"release": -1.0},
    "smooth": {"smooth": 0.3},
    "smooth by degrees": {"smooth": 0.4, "sharpness": 2.0},
    "all": {"hold": 1, "smooth": 0.5, "release": -0.5},
}


@pytest.fixture(scope="module")
def oracle(tiny_llama: Path) -> EditOracle:
    return EditOracle(tiny_llama, PLACES["llama"])


def gates(oracle: EditOracle, prompt: list[int], where: dict[str, Any]) -> dict[str, Gate]:
    """Each kind of memory, at the edit's own tap and at earlier ones, closed at first."""
    plain = oracle.run([*prompt, *SHORT])
    draw = torch.Generator().manual_seed(len(prompt))
    found = {}
    for nth, (name, memory) in enumerate(MEMORIES.items()):
        own = (EVERY_SITE[2 + nth % 5], 1 + nth % 2)
        maker = Maker(own, plain, draw)
        read = None if nth % 2 else (EVERY_SITE[nth % 3], nth % 2)
        direction = maker.direction(read)
        scores = maker.scores(direction, read)
        spread = float(scores[len(scores) * 3 // 4] - scores[len(scores) // 4])
        threshold = float(scores[len(scores) * 3 // 5] + scores[len(scores) * 3 // 5 + 1]) / 2
        given = dict(memory)
        if "release" in given:
            given["release"] = threshold + given["release"] * spread
        if "sharpness" in given:
            given["sharpness"] /= spread
        edit = Steer(maker.vector(), scale=0.8, **maker.place, **where)
        place = {} if read is None else {"site": read[0], "layer": read[1]}
        found[name] = Gate(edit, Reading(direction, 0.0, **place), threshold, **given)
    return found


@pytest.mark.parametrize("size", [1, 16])
def test_gates_remember_earlier_tokens_as_a_loop_does(
    wide: Any, oracle: EditOracle, size: int
) -> None:
    """All in one batch with gates without memory and plain requests, prompts cut anywhere."""
    given = []
    for prompt in (LONG, SHORT):
        end = len(prompt)
        for where, chosen in (
            ({}, lambda p: True),
            ({"phase": "generated"}, lambda p, end=end: p >= end),
            ({"exclude": slice(2, 4)}, lambda p: p not in (2, 3)),
        ):
            for name, gate in gates(oracle, prompt, where).items():
                given.append(Case(f"{name} {where} {end}", prompt, [At(gate, chosen)]))
    plain = Gate(given[0].edits[0].edit.edit, torch.ones(tiny.HIDDEN))
    given += [Case("no memory", LONG, [At(plain)]), Case("plain", LONG, [])]
    with chunks(wide, size) as seen:
        found = all_problems(wide, oracle, given, TOLERANCE, TIE, count=COUNT)
    assert max(seen) == min(size, len(LONG))
    assert not found, "\n".join(found[:30])
