"""Which calls of `AsyncLLM.generate` vLLM alone serves."""

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from support.sinking import ORIGIN

from midstream.api.arguments import CallArguments
from midstream.errors import SpecError
from midstream.plan import Capture
from midstream.sinks.sink_set import SinkSet

RESULTS = ("activations", "probes", "receipt", "capture_results")


class NotedCounts(Counter):
    """Running calls by id; each change is an event."""

    def __init__(self, events) -> None:
        super().__init__()
        self.events = events

    def __setitem__(self, name, count) -> None:
        self.events.append((name, count))
        super().__setitem__(name, count)


class Front:
    """A front end that records what was begun and ended."""

    def __init__(self, concerned: bool = False) -> None:
        from midstream.runtime.frontend.results.delivery import set_nothing

        self.concerned = concerned
        self.events: list[Any] = []
        self.steering = SimpleNamespace(epoch=0, plan_edits=lambda: ())
        self.also = lambda call_plan: ()
        self.before = lambda call_plan: ()
        self.directions = SimpleNamespace(needed=lambda plan: {})
        self.sinks = SinkSet((), ORIGIN)
        self.plain = NotedCounts(self.events)
        self.leave = lambda call: self.events.append("leave")

        async def complete(call: Any, output: Any) -> None:
            set_nothing(output)

        async def close_session(call: Any) -> None:
            return None

        async def resolve_ahead(*given: Any) -> None:
            self.events.append("resolve ahead")

        self.completion = SimpleNamespace(complete=complete, close_session=close_session)
        self.plans = SimpleNamespace(
            resolve_ahead=resolve_ahead, forget=lambda plan: self.events.append("forget")
        )

    def concerns(self, params: Any) -> bool:
        return self.concerned

    def begin(self, plan: Any, session: Any) -> Any:
        from midstream.runtime.frontend.results.call import GenerateCall

        self.events.append("begin")
        return GenerateCall(plan, session)


@pytest.fixture
def given(monkeypatch):
    """What vLLM's `generate` was given."""
    from vllm.v1.engine.async_llm import AsyncLLM

    found: list[Any] = []

    async def generate(llm: Any, prompt: Any, params: Any, request_id: str) -> Any:
        found.append((prompt, params, request_id))
        if prompt == "fails":
            raise ValueError("vLLM's")
        yield SimpleNamespace(outputs=[SimpleNamespace(index=0)], finished=True)

    monkeypatch.setattr(AsyncLLM, "generate", generate)
    return found


def outputs(
    front: Front, params: Any, arguments: Any = None, prompt: Any = "p", **more: Any
) -> list[Any]:
    from midstream.api.async_call import AsyncEngineCall, only_front

    call = AsyncEngineCall(None, only_front(front), arguments or CallArguments(), **more)

    async def run() -> list[Any]:
        return [one async for one in call.outputs(prompt, params, "name", {})]

    return asyncio.run(run())


def params(**more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=1, **more)


def test_a_call_that_asks_for_nothing_goes_to_vllm_as_it_is(given):
    front, mine = Front(), params(extra_args={"of_vllm": 1})
    (output,) = outputs(front, mine)
    ((prompt, passed, name),) = given
    assert (prompt, name) == ("p", "name")
    assert passed is mine
    assert front.events == [("name", 1), ("name", 0)]
    assert not front.plain
    for holder in (output, output.outputs[0]):
        assert [getattr(holder, each) for each in RESULTS] == [None] * len(RESULTS)


def test_a_call_that_asks_for_nothing_ends_if_vllm_raises(given):
    front = Front()
    with pytest.raises(ValueError, match="vLLM's"):
        outputs(front, params(), prompt="fails")
    assert front.events == [("name", 1), ("name", 0)]
    assert not front.plain


def test_a_call_to_which_something_applies_is_begun(given):
    for arguments, extra_args, concerned in (
        (CallArguments(capture=Capture("all")), None, False),
        (CallArguments(edits=[]), None, False),
        (None, {"midstream": {"capture": {"layers": "all"}}}, False),
        (None, None, True),
    ):
        front = Front(concerned)
        outputs(front, params(extra_args=extra_args), arguments)
        ((_, passed, _),) = given
        assert "midstream" in passed.extra_args
        given.clear()
        assert front.events == ["begin", "resolve ahead", "forget", "leave"]


def test_extra_args_that_would_be_ignored_are_refused(given):
    front = Front()
    with pytest.raises(SpecError, match="midstraem"):
        outputs(front, params(extra_args={"midstraem": {}}))
    assert not given
    assert not front.events


def test_a_plain_call_that_ends_leaves_another_of_its_id(given):
    front = Front()
    front.plain.update(["name"])
    outputs(front, params())
    assert front.plain == {"name": 1}


def test_something_set_for_every_request_does_not_fail_a_plain_call_that_has_begun():
    from midstream.runtime.frontend.async_frontend import AsyncFrontEnd

    front = AsyncFrontEnd.__new__(AsyncFrontEnd)
    front._calls, front.plain = {}, Counter(["name"])
    request = SimpleNamespace(request_id="name", sampling_params=params())
    assert front.admit(request, None) is None
    front.plain.clear()
    with pytest.raises(SpecError, match="generate"):
        front.admit(request, None)
