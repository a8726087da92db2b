"""Scores that change nothing are passed over, as they would be by the evaluation of all scores."""

import cProfile
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.nightly import rounds

from midstream.plan import Match, Where
from midstream.plan.control.act import Condition
from midstream.runtime.core import probe_stops
from midstream.runtime.core.probe_stops import Watched, update_from_output
from midstream.runtime.protocol.acting_probes import ActingProbe
from midstream.runtime.protocol.cache_keys import CacheKeys
from midstream.runtime.protocol.control import Control, ReadProbe, VersionChoice
from midstream.runtime.protocol.plan_version import PlanVersion
from midstream.runtime.protocol.request_payload import RequestPayload
from midstream.runtime.protocol.step_scores import ScoresOfStep, StepScores
from midstream.runtime.vllm.attributes import STEP_SCORES, WATCHED

KEYS = CacheKeys((0,), ("",), None)
CASES = rounds(suite=40, nightly=200)  # of each test
SLOTS = 2
PROMPT = 4
USUAL = (-0.5, 0.0, 0.5)
SCORES = (*USUAL, -1.0, 1.0, 2.0, -2.0, np.nan, np.inf, -np.inf)
PLACES = (
    Where(((0, None),)), Where(((0, None),)), Where(((PROMPT, None),)), Where(((2, 9),)),
    Where(((0, 2), (6, None))), Where(((0, 2),), (Match(((PROMPT, None),), (1,)),)),
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """What a step has of a request.

    Attributes:
        ahead: its first position is so many behind that of its last token; below 0: before it.
        values: the scores of each position.
        new: the sampled tokens.
        is_dropped: whether vLLM drops them.
        next_input: what the next input of its session brings, which begins; None: none does.
    """

    ahead: int
    values: tuple[tuple[float, ...], ...]
    new: tuple[int, ...]
    is_dropped: bool = False
    next_input: RequestPayload | None = None


class Draws:
    """What is drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._drafts = self._draw.choice([0, 0, 2])

    def payload(self) -> RequestPayload:
        """What a request brings: probes that act, a controller, or both."""
        draw = self._draw
        acts = [self._act(slot) for slot in range(draw.randint(0, SLOTS))]
        control = self._control() if not acts or draw.random() < 0.5 else None
        return RequestPayload("u", b"", KEYS, acts=tuple(acts), control=control)

    def _act(self, slot: int) -> ActingProbe:
        draw = self._draw
        way = draw.choice(["above", "below"])
        condition = Condition(
            **{way: draw.choice([0.5, 1.0, 1e30]) * (1 if way == "above" else -1)},
            for_=draw.choice([1, 2, 3]),
            pool=draw.choice(["none"] * 6 + ["max", "mean:2", "ema:0.5"]),
        )
        version = PlanVersion(90 + slot, b"", KEYS) if draw.random() < 0.5 else None
        return ActingProbe(f"p{slot}", slot, draw.choice(PLACES), condition, version)

    def _control(self) -> Control:
        draw = self._draw
        above = draw.choice([0.5, 1.0, 1e30])
        limits = {"above": above, "below": draw.choice([None, above, 0.0])}
        law = draw.choice([
            *[{"probe": f"p{slot}", **limits, "on": 0.5} for slot in range(SLOTS)],
            {"probe": "p1", **limits, "on": 1.0, "off": 1.0},
            {"probe": "p0", **limits, "on": 7.0},  # which is no choice
        ])  # fmt: skip
        scales = (1.0, 0.0, 0.5, 1.5, 2.0)
        choices = [VersionChoice("", s, PlanVersion(n, b"", KEYS)) for n, s in enumerate(scales, 1)]
        probes = [ReadProbe(f"p{slot}", slot, draw.choice(PLACES)) for slot in range(SLOTS)]
        on_error = draw.choice(["keep", "off", "end"])
        return Control("c", law, "", on_error, tuple(probes), tuple(choices))

    def _values(self, length: int) -> tuple[tuple[float, ...], ...]:
        draw = self._draw
        return tuple(
            tuple(draw.choice(USUAL if draw.random() < 0.9 else SCORES) for _ in range(SLOTS))
            for _ in range(length)
        )

    def chunk(self, first: int, stop: int) -> Part:
        """These positions of the prompt, which is not computed yet."""
        return Part(first + 1 - PROMPT, self._values(stop - first), ())

    def _again(self, payload: RequestPayload) -> RequestPayload:
        acts = [self._act(slot) for slot in range(len(payload.acts))]
        return RequestPayload("u", b"", KEYS, acts=tuple(acts), control=payload.control)

    def part(self, payload: RequestPayload) -> Part:
        """Mostly one new position; or a chunk of the prompt, what a preemption computes again, what
        was found in the prefix cache, or drafts.
        """
        draw = self._draw
        usual = draw.random() < 0.85
        length = 1 if usual or draw.random() < 0.5 else draw.randint(0, 4)
        new = draw.randint(0 if draw.random() < 0.2 else 1, 1 + self._drafts)
        return Part(
            ahead=0 if usual else draw.randint(1 - PROMPT, 2),
            values=self._values(length),
            new=tuple(draw.choices(range(3), k=new)),
            is_dropped=not usual and draw.random() < 0.5,
            next_input=self._again(payload) if draw.random() < 0.05 else None,
        )


@dataclass(eq=False)
class Asked:
    """vLLM's Request, as far as it is looked at."""

    request_id: str
    sampling_params: Any
    all_token_ids: list[int] = field(default_factory=lambda: [0] * PROMPT)
    num_prompt_tokens: int = PROMPT
    status: str = ""
    client_index: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def is_finished(self) -> bool:
        return bool(self.status)


class Run:
    """Requests, and all that was done with them."""

    def __init__(self, given: list[RequestPayload]) -> None:
        self.every = [
            Asked(f"r{nth}", SimpleNamespace(extra_args={"midstream": payload}))
            for nth, payload in enumerate(given)
        ]
        self.requests = {one.request_id: one for one in self.every}
        self.done: list[Any] = []

    def finish_requests(self, names: list[str], status: Any) -> list[Asked]:
        self.done.append((names, status.name))
        for name in names:
            self.requests[name].status = status.name
        return [self.requests[name] for name in names]

    def change(self, _scheduler: Any, changes: list[Any]) -> None:
        self.done.append(
            [(one.request_id, version.number, first) for one, version, first in changes]
        )

    def end(self, _outputs: Any, one: Asked, reason: str, _logprobs: Any) -> None:
        self.done.append((one.request_id, reason))

    def step(self, step: list[Part]) -> None:
        first, row, values = [], [], [(9.0,) * SLOTS]
        for one, part in zip(self.every, step, strict=True):
            if part.next_input is not None:
                one.sampling_params = SimpleNamespace(extra_args={"midstream": part.next_input})
                one.all_token_ids[-1:] = [2]
            first.append(max(0, one.num_tokens - 1 + part.ahead))
            row.append(len(values))
            values += part.values
        length, ids = [len(part.values) for part in step], [one.request_id for one in self.every]
        scores = ScoresOfStep(ids, first, row, length, np.array(values, np.float32))
        output = SimpleNamespace(
            req_id_to_index={name: nth for nth, name in enumerate(ids)},
            sampled_token_ids=[list(part.new) for part in step],
            prompt_logprobs_dict={},
        )
        STEP_SCORES.set(output, StepScores(lambda: scores))
        update_from_output(self._take, self, step, output)

    def _take(self, _scheduler: Any, step: list[Part], output: Any) -> dict[int, Any]:
        self.done.append(output.sampled_token_ids)
        for one, part, new in zip(self.every, step, output.sampled_token_ids, strict=True):
            if not one.status and not part.is_dropped:
                one.all_token_ids += new
        return {}

    def state(self) -> Any:
        """All that decides what becomes of the requests that run."""
        found: list[Any] = []
        for one in self.every:
            watched: Watched | None = WATCHED.get(one)
            if watched is None or one.status:
                continue
            found.append((one.request_id, one.all_token_ids, watched.reached, watched.each))
            if (law := watched.controller) is not None:
                found.append((law.reached, law.unseen, law.chosen, law.answered, law.has_failed))
                found.append([getattr(law.decide, name) for name in type(law.decide).__slots__])
        return repr((self.done, found))  # nan is not equal to itself


@pytest.mark.parametrize("part", range(rounds(suite=2, nightly=100)))
def test_what_passes_is_what_changes_nothing(part):
    """Requests with probes and controllers of any kind, in steps of any kind: each step does what
    it does when all scores are evaluated, and leaves the same state.
    """
    for seed in range(part * CASES, (part + 1) * CASES):
        check(seed)


def check(seed: int) -> None:
    draws = Draws(seed)
    those = [draws.payload() for _ in range(6)]
    chunks = [[draws.chunk(*ends) for _ in those] for ends in ((0, 1), (1, PROMPT - 1))]
    steps = [*chunks, *([draws.part(one) for one in those] for _ in range(16))]
    mine, reference = Run(those), Run(those)
    with pytest.MonkeyPatch.context() as patch:
        for nth, step in enumerate(steps):
            for run in (mine, reference):
                patch.setattr(probe_stops, "change_plans", run.change)
                patch.setattr(probe_stops, "add_end", run.end)
                with patch.context() as other:
                    if run is reference:
                        other.setattr(probe_stops, "changing", every_request)
                    run.step(step)
            assert mine.state() == reference.state(), (seed, nth)


def every_request(requests: dict[str, Any], scores: ScoresOfStep, _: bool) -> list[Any]:
    return [(nth, requests[name]) for nth, name in enumerate(scores.ids)]


def test_a_step_whose_scores_change_nothing_makes_no_call_for_each_request():
    where, above = Where(((0, None),)), Condition(above=1.0)
    acts = tuple(ActingProbe(f"p{slot}", slot, where, above) for slot in range(SLOTS))
    calls = {}
    for count in (16, 48):
        run = Run([RequestPayload("u", b"", KEYS, acts=acts)] * count)
        step = [Part(0, ((0.0, 0.0),), (1,))] * count
        run.step(step)
        profile = cProfile.Profile(builtins=False)
        profile.runcall(run.step, step)
        mine = [row for row in profile.getstats() if "/midstream/" in row.code.co_filename]
        calls[count] = sum(row.callcount for row in mine)
        assert all(WATCHED.get(one).reached == PROMPT + 1 for one in run.every)
    assert calls[16] == calls[48] < 16


@pytest.mark.parametrize("what", ["probe", "controller"])
def test_one_new_score_that_changes_nothing_is_not_evaluated(what, monkeypatch):
    where = Where(((0, None),))
    acts = (ActingProbe("p0", 0, where, Condition(above=1.0, for_=2)),)
    law = {"probe": "p0", "above": 1.0, "on": 0.0, "off": 1.0}
    choices = tuple(VersionChoice("", s, PlanVersion(1, b"", KEYS)) for s in (1.0, 0.0))
    control = Control("c", law, "", "keep", (ReadProbe("p0", 0, where),), choices)
    given = {"acts": acts} if what == "probe" else {"control": control}
    run = Run([RequestPayload("u", b"", KEYS, **given)])
    evaluated = []
    for name in ("advance", "decide"):
        monkeypatch.setattr(probe_stops, name, counted(getattr(probe_stops, name), evaluated))
    monkeypatch.setattr(probe_stops, "change_plans", lambda *_: None)
    counts = []
    for score in (0.0, 1.0, -5.0, 2.0, 0.0, 0.0, np.nan, 0.0):
        evaluated.clear()
        run.step([Part(0, ((score, 9.0),), (1,))])
        counts.append(len(evaluated))
    # Evaluated are the first score, one that exceeds the threshold, and the one after it. What is
    # not a number exceeds nothing, but probes evaluate it.
    assert counts == [1, 0, 0, 1, 1, 0, int(what == "probe"), 0]


def counted(function: Any, calls: list[Any]) -> Any:
    def call(*args: Any) -> Any:
        if args[0]:  # requests, or probes
            calls.append(args)
        return function(*args)

    return call
