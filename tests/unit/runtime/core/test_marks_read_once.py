"""Tokens between marks that several probes of a request read, each of them once."""

from types import SimpleNamespace

import pytest

from midstream.plan.control.act import Condition, Progress
from midstream.plan.positions.automaton import Marks, automaton_of
from midstream.plan.positions.position_set import Match, Where
from midstream.plan.scores.rule import PLAIN
from midstream.runtime.core.controllers import RunningController
from midstream.runtime.core.probe_stops import ProbeProgress, advance

PROMPT_LEN, STEPS = 4, 200
MARKS = Marks((1,), (3,))
WHERE = Where(
    (), (Match(((PROMPT_LEN, None),), automaton=automaton_of(4, [(MARKS, MARKS.first)], [])),)
)


class Scores:
    def __init__(self, position: int) -> None:
        self.first, self.length = [position], [1]

    def at(self, index, slot, positions):
        return [float(position) for position in positions]


TOKENS = [7] * PROMPT_LEN + [1, 2, 2, 3, 2] * (STEPS // 5)


def run_acts(scores, read, token):
    acts = [
        SimpleNamespace(
            slot=slot, where=WHERE, condition=Condition(above=1e9), version=None, rule=PLAIN
        )
        for slot in range(3)
    ]
    before = ProbeProgress(scores.first[0], (Progress(),) * 3, read)
    advance(acts, before, scores, 0, len(TOKENS), token)


def run_controller(controller, scores, token):
    controller.take(scores, 0, len(TOKENS), token)


@pytest.mark.parametrize("kind", ["acts", "controller"])
def test_each_token_is_read_once_by_each_probe(kind: str) -> None:
    seen: list[int] = []

    def token(position: int) -> int:
        seen.append(position)
        return TOKENS[position]

    probes = [
        SimpleNamespace(name=f"p{slot}", slot=slot, where=WHERE, rule=PLAIN) for slot in range(3)
    ]
    controller = RunningController(None, SimpleNamespace(probes=probes), None, None, {})
    read = ({}, {}, {})
    for position in range(PROMPT_LEN, len(TOKENS)):
        if kind == "acts":
            run_acts(Scores(position), read, token)
        else:
            run_controller(controller, Scores(position), token)
    assert len(seen) == 3 * STEPS
    if kind == "controller":
        inside = [float(p) for p in range(PROMPT_LEN, len(TOKENS)) if p % 5 in (0, 1)]
        assert controller.unseen == dict.fromkeys(("p0", "p1", "p2"), inside)
