"""Controllers of an engine that its caller steps: when they are called, and what is done then."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from midstream import Controller, Probe
from midstream.errors import BusyError, SpecError
from midstream.plan import ModelShape, Plan, Prompt
from midstream.plan.resolve.resolve import resolve
from midstream.runtime.frontend.request.call_plan import CallPlan
from midstream.runtime.frontend.step_controllers import StepControllers
from midstream.runtime.protocol.rpc import ReadScores, RunningScores
from midstream.runtime.protocol.scores import RequestScores

PROMPT = [5, 6, 7]
TAP = ("resid_post", 0)


class Changes:
    """What controllers change, of requests with the ids u0, u1, …"""

    def __init__(self) -> None:
        self.found: list[Any] = []
        self.raises: Exception | None = None

    def ids_of(self, uid: str) -> list[str]:
        return [f"vllm-{uid}"]

    def update(self, call_plan: CallPlan, edits: Any, scale: Any, source: str) -> None:
        self._record(call_plan, edits, scale, source)

    def stop(self, call_plan: CallPlan, reason: str, is_error: bool = False) -> None:
        self._record(call_plan, reason, is_error)

    def _record(self, call_plan: CallPlan, *what: Any) -> None:
        if self.raises is not None:
            raise self.raises
        assert call_plan.controller is not None
        self.found.append((call_plan.controller.name, *what))


class Engine:
    """Running requests, whose score at a position is the position."""

    def __init__(self, *controllers: Controller) -> None:
        self.changes = Changes()
        self.spans: list[dict[str, Any]] = []
        part: Any = {"taps": [TAP], "parts": [1], "tensor_rank": 0, "tensor_ranks": 1}
        worker: Any = SimpleNamespace(info=SimpleNamespace(**part))
        changes: Any = self.changes
        self.requests = StepControllers(changes, [worker], self._call)
        self.tokens: list[int] = []
        self.names = [f"u{nth}" for nth in range(len(controllers))]
        plan = Plan.make(probes=Probe([1.0, 0.0], 0, name="p"))
        shape = ModelShape(1, 2, frozenset([TAP]))
        resolved = resolve(plan, shape, Prompt(len(PROMPT)), 99)
        request = SimpleNamespace(request_id="r", prompt_token_ids=PROMPT)
        for name, controller in zip(self.names, controllers, strict=True):
            call_plan = CallPlan(plan, controller=controller)
            self.requests.add(name, call_plan, resolved, request)

    def _call(self, request: Any) -> Any:
        assert isinstance(request, ReadScores)
        self.spans.append(dict(request.spans))
        scores = [
            RequestScores(uid, 1, [(start, stop - start)])
            for uid, (start, stop) in request.spans.items()
        ]
        values = [np.arange(*span, dtype=np.float32) for span in request.spans.values()]
        return [RunningScores(scores, np.concatenate(values).tobytes())]

    def step(self, tokens: int = 1, waits_for: str | None = "u") -> None:
        """Generate tokens, and wait for the controllers of some requests that were called."""
        self.tokens += [9] * tokens
        state = SimpleNamespace(detokenizer=SimpleNamespace(output_token_ids=self.tokens))
        self.requests.step({f"vllm-{name}": state for name in self.names})
        for name, one in self.requests._running.items():
            if one.call is not None and waits_for is not None and name.startswith(waits_for):
                one.call.exception(5)


def test_each_is_given_its_new_scores_with_one_call_and_answers_hold_from_then_on():
    seen: list[Any] = []

    def first(observed: Any) -> Any:
        seen.append((observed.tokens, observed.scores["p"].tolist()))
        return [0.5, 0.5, None, {"edits": []}, None][len(seen) - 1]

    engine = Engine(Controller(first, name="a"), Controller(lambda _: 0.0, name="b"))
    engine.step()
    assert engine.changes.found == []
    engine.step(0)  # no new token: what was answered is done, and nobody is called
    assert engine.changes.found == [
        ("a", None, 0.5, "controller:a"), ("b", None, 0.0, "controller:b"),
    ]  # fmt: skip
    for tokens in (1, 2, 1, 1):
        engine.step(tokens)
    assert seen == [(1, [0, 1, 2]), (2, [3]), (4, [4, 5]), (5, [6]), (6, [7])]
    # The same scale as before is no change.
    assert engine.changes.found[2:] == [("a", [], None, "controller:a")]
    assert engine.spans[:2] == [{"u0": (0, 3), "u1": (0, 3)}, {"u0": (3, 4), "u1": (3, 4)}]


def test_scores_of_a_prompt_are_given_once_all_of_it_was_computed():
    """A request that waits, or whose prompt comes in chunks, has no score yet that is read."""
    seen: list[Any] = []
    engine = Engine(Controller(lambda one: seen.append(one.scores["p"].tolist()), name="a"))
    for tokens in (0, 0, 1, 1):
        engine.step(tokens)
    assert seen == [[0, 1, 2], [3]]
    assert engine.spans == [{"u0": (0, 3)}, {"u0": (3, 4)}]


def test_one_that_computes_delays_nobody_and_is_forgotten_with_its_request():
    go = threading.Event()
    engine = Engine(
        Controller(lambda _: float(go.wait(30)), name="slow", seconds=30),
        Controller(lambda seen: float(seen.tokens + 1), name="b"),
    )
    for _ in range(3):
        engine.step(waits_for="u1")
    assert [(name, scale) for name, _, scale, _ in engine.changes.found] == [("b", 2), ("b", 3)]
    assert engine.spans == [{"u0": (0, 3), "u1": (0, 3)}, {"u1": (3, 4)}, {"u1": (4, 5)}]
    engine.requests.end(["u0", "u1"])
    go.set()
    engine.step()
    assert len(engine.changes.found) == 2


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("keep", []),
        ("off", [("c", None, 0.0, "controller:c")]),
        ("end", [("c", "controller 'c' of request 'r' failed: took too long", True)]),
    ],
)
def test_a_call_that_takes_too_long_failed_and_it_is_not_called_again(policy, expected):
    go = threading.Event()
    engine = Engine(Controller(lambda _: go.wait(30), name="c", seconds=0.01, on_error=policy))
    engine.step(waits_for=None)
    time.sleep(0.05)
    for _ in range(3):
        engine.step(waits_for=None)
    go.set()
    assert engine.changes.found == expected
    assert len(engine.spans) == 1


def test_a_stop_ends_the_calls_and_full_tables_or_an_end_meanwhile_are_no_failures():
    engine = Engine(Controller(lambda _: {"stop": True}, name="c"))
    for _ in range(4):
        engine.step()
    assert engine.changes.found == [("c", "controller:c", False)]
    for error in (BusyError("no room", 1), SpecError("request_id", "it has ended")):
        engine = Engine(Controller(lambda _: 0.5, name="c", on_error="end"))
        engine.changes.raises = error
        for _ in range(3):
            engine.step()
        assert len(engine.spans) == 3


@pytest.mark.parametrize("policy", ["off", "end"])
def test_what_a_failure_cannot_change_any_more_ends_no_step(policy):
    """Nothing is there to be turned off, or the request has ended."""
    engine = Engine(Controller(lambda _: "much", name="c", on_error=policy))
    path = "scale" if policy == "off" else "request_id"
    engine.changes.raises = SpecError(path, "there is none")
    for _ in range(3):
        engine.step()
    assert len(engine.spans) == 1
