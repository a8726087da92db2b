"""Controllers in the engine core: which scores they are given, and when a call has failed."""

import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.score_rules import scores_by_definition

from midstream.config.controllers import DeclaredController
from midstream.errors import ConfigError
from midstream.plan import Match, Where
from midstream.plan.scores.rule import ScoreRule
from midstream.runtime.core import controller_calls
from midstream.runtime.core.controller_calls import DeclaredCalls
from midstream.runtime.core.controllers import Decision, RunningController, controlled, decide
from midstream.runtime.core.probe_stops import is_overtaken
from midstream.runtime.protocol.cache_keys import CacheKeys
from midstream.runtime.protocol.control import Control, ReadProbe, VersionChoice
from midstream.runtime.protocol.plan_version import PlanVersion
from midstream.runtime.protocol.step_scores import ScoresOfStep
from midstream.runtime.vllm.attributes import DECLARED

PROMPT = 4
KEYS = CacheKeys((0,), ("",), None)
EVERYWHERE = Where(((0, None),))
SCALES = (1.0, 0.0, 0.5)


def control(where: Where = EVERYWHERE, on_error: str = "keep", **given: Any) -> Control:
    choices = [
        VersionChoice(name, scale, PlanVersion(1 + nth, b"%d" % nth, KEYS))
        for nth, (name, scale) in enumerate((n, s) for n in ("", "calm") for s in SCALES)
    ]
    law = {"probe": "p", "above": 3.0, "on": 0.0, "off": 1.0}
    kind = {"law": law, "declared": "", **given}
    return Control(
        name="c", on_error=on_error, probes=(ReadProbe("p", 1, where),), choices=tuple(choices),
        **kind,
    )  # fmt: skip


def request(one: Control, calls: DeclaredCalls | None = None) -> RunningController:
    scheduler = SimpleNamespace()
    DECLARED.set(scheduler, {} if calls is None else {one.declared: calls})
    asked = SimpleNamespace(request_id="r", num_prompt_tokens=PROMPT)
    found = controlled(scheduler, asked, one)
    assert controlled(scheduler, asked, one) is found
    return found


def take(
    one: RunningController, first: int, scores: Sequence[float], stop: int, token: Any = int
) -> bool:
    """Give a controller the scores of positions from the first on, behind a row of another."""
    values = np.array([[0.0, 9.0], *([-9.0, score] for score in scores)], np.float32)
    step = ScoresOfStep(["other", "r"], [7, first], [0, 1], [1, len(scores)], values)
    return one.take(step, 1, stop, token)


def declared(function: Any, seconds: float = 0.5) -> DeclaredCalls:
    name = f"made_{id(function)}"
    globals()[name] = function
    return DeclaredCalls("d", DeclaredController(f"{__name__}:{name}", seconds=seconds))


def asking(calls: DeclaredCalls, on_error: str = "keep") -> RunningController:
    found = request(control(declared="d", law={}, on_error=on_error), calls)
    assert take(found, 0, [1.0], PROMPT)
    return found


def test_a_position_is_given_once_and_a_rejected_draft_never():
    one = request(control())
    assert take(one, 0, [1, 2], 4)  # a chunk of the prompt
    assert one.tokens == 0
    assert take(one, 2, [3, 4], 4)
    seen = one.observed()
    assert (seen.tokens, seen.scores["p"].tolist()) == (1, [1, 2, 3, 4])
    one.unseen = {}
    # Two of three drafts were accepted: the tokens of 4, 5 and 6 are known.
    assert take(one, 4, [5, 6, 7, 8], 7)
    assert one.observed().scores["p"].tolist() == [5, 6, 7]
    assert one.tokens == 4
    one.unseen = {}
    # A preemption: all is computed again.
    assert not take(one, 0, [1, 2, 3, 4, 5, 6, 7], 8)
    assert take(one, 6, [7, 8], 8)
    assert one.observed().scores["p"].tolist() == [8]


@pytest.mark.parametrize(
    "rule", [ScoreRule(2, link="softmax"), ScoreRule(2, "softmax"), ScoreRule(2, "max", pool="max")]
)
def test_scores_are_given_as_their_rule_makes_them(rule):
    one = request(
        replace(control(declared="d", law={}), probes=(ReadProbe("p", 0, EVERYWHERE, rule),)),
        declared(int),
    )
    seen = one.observed().scores["p"]
    assert seen.shape == ((0, 2) if rule.outputs else (0,))
    numbers = [[0.0, score] for score in (1.0, -2.0, 3.0, 0.5)]
    expected = scores_by_definition(rule, [[-9.0, number] for _, number in numbers])
    for first, stop in ((0, 3), (1, 4)):  # two of them are computed again
        assert take(one, first, [score for _, score in numbers[first:stop]], stop)
        observed = one.observed().scores["p"].numpy()
        np.testing.assert_allclose(observed, expected[3 * (first > 0) : stop], rtol=1e-6)
        one.unseen.clear()
    assert one.slot is None


def test_only_selected_tokens_are_given():
    one = request(control(Where((), (Match(((4, None),), (7,)),))))
    assert not take(one, 0, [1, 2, 3, 4, 5], 6, lambda _: 3)
    assert take(one, 5, [6, 7], 7, lambda position: 7 if position == 6 else 3)
    assert one.observed().scores["p"].tolist() == [7]


def test_a_step_that_a_preemption_overtook_is_known():
    from vllm.v1.request import RequestStatus

    for status, stale, expected in (
        (RequestStatus.RUNNING, 0, False), (RequestStatus.PREEMPTED, 0, True),
        (RequestStatus.RUNNING, 2, True),
    ):  # fmt: skip
        asked = SimpleNamespace(status=status, num_stale_output_tokens=stale)
        assert is_overtaken(asked) is expected


class Hostile(dict):
    """An answer that cannot be read."""

    def __repr__(self) -> str:
        raise RuntimeError("hostile")

    __str__ = __repr__

    def __iter__(self) -> Any:
        raise RuntimeError("hostile")


def test_an_answer_is_a_version_a_stop_or_a_failure():
    answers: list[Any] = []
    calls = declared(lambda _: answers[-1])
    one = asking(calls)

    def answer(value: Any) -> Decision:
        answers.append(value)
        one.unseen = {"p": [0.0]}
        (found,) = decide([one])
        return found

    def number(value: Any) -> int | None:
        version = answer(value).version
        return None if version is None else version.number

    assert [number(each) for each in (None, 1, 0.5, 0.5, {"edits": "calm", "scale": 0.5})] == [
        None, None, 3, None, 6,
    ]  # fmt: skip
    # A scale alone is one of the edits given last; edits alone have their own strength.
    assert [number(each) for each in (1.0, {"edits": ""}, {"scale": 0})] == [4, 1, 2]
    assert answer({"stop": True}) == Decision(reason="controller:c")
    for value in (
        "much", float("nan"), 0.3, {"edits": "who"}, {"edits": []}, {"stop": 1}, {"stop": False},
        {"stop": True, "scale": 1}, {"what": 1}, [1.0], True, Hostile(scale=1.0, edits=2),
        {"stop": {"scale": Hostile()}},
    ):  # fmt: skip
        one.has_failed = False
        found = answer(value)
        assert found.version is not None
        assert found.version.number == 6 + 2
        assert one.has_failed
        assert answer(0.5) == Decision(), "it is not called again"


@pytest.mark.parametrize(
    ("policy", "expected"), [("keep", (7, b"0")), ("off", (8, b"1")), ("end", None)]
)
def test_a_failure_is_what_the_policy_says(policy, expected):
    def fails(_):
        raise KeyError("it")

    (found,) = decide([asking(declared(fails), policy)])
    if expected is None:
        assert found.is_error
        assert found.reason == "controller 'c' failed: KeyError('it')"
    else:
        assert (found.version.number, found.version.plan) == expected


def test_a_threshold_changes_nothing_with_the_answer_that_holds():
    law = {"probe": "p", "above": 2.0, "on": 0.5, "off": 1.0}
    one, numbers = request(control(law=law)), []
    for nth, score in enumerate((1.0, 3.0, 4.0, 1.0, 1.0, 3.0)):
        assert take(one, nth, [score], nth + 1)
        (found,) = decide([one])
        numbers.append(found.version and found.version.number)
    assert numbers == [None, 3, None, 1, None, 3]


def test_a_step_waits_no_longer_than_the_limit_and_the_others_are_called_in_the_next_one():
    go, seen = threading.Event(), []

    def slow(observed):
        seen.append(observed.scores["p"].tolist())
        if len(seen) == 1:
            go.wait(30)
        return 0.5

    calls = declared(slow, seconds=0.1)
    first, second = asking(calls), asking(calls)
    quick = request(control())
    take(quick, 0, [9.0], PROMPT)
    begun = time.monotonic()
    found = decide([first, quick, second])
    assert time.monotonic() - begun < 20
    assert [one and one.version and one.version.number for one in found] == [7, 2, None]
    assert (first.has_failed, second.has_failed) == (True, False)
    take(second, 1, [2.0], PROMPT)
    (found,) = decide([second])
    assert (found.version.number, seen) == (3, [[1.0], [1.0, 2.0]])
    go.set()


def test_code_that_hangs_in_many_requests_is_not_called_any_more(monkeypatch):
    go = threading.Event()
    calls = declared(lambda _: go.wait(30), seconds=0.2)
    monkeypatch.setattr(controller_calls, "MOST_HANGING", 2)
    for _ in range(2):
        assert decide([asking(calls)])[0].version.number == 7
    before = threading.active_count()
    (found,) = decide([asking(calls, "end")])
    assert found.reason == "controller 'c' failed: it has not returned from 2 earlier calls"
    assert threading.active_count() == before
    go.set()
    for thread in calls._hanging:
        thread.join(5)
    monkeypatch.setattr(calls, "seconds", 5)
    assert decide([asking(calls)])[0].version.number == 7  # True is no answer
    assert not calls._hanging


def test_a_class_is_made_for_each_request_and_what_cannot_be_imported_says_so():
    class Counter:
        def __init__(self) -> None:
            self.count = 0

        def __call__(self, observed: Any) -> float:
            self.count += 1
            return [1.0, 0.5][self.count - 1]

    calls = declared(Counter)
    ones = [asking(calls), asking(calls)]
    for expected in (None, 3):
        for one in ones:
            one.unseen = {"p": [0.0]}
        found = [each.version and each.version.number for each in decide(ones)]
        assert found == [expected] * 2
    for path, words in (("no.such:Name", "cannot be imported"), ("os:sep", "neither")):
        with pytest.raises(ConfigError, match=words):
            DeclaredCalls("d", DeclaredController(path))
