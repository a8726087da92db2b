"""Sessions of streaming input: what the front end makes of inputs, outputs and what workers say."""

import asyncio
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.plans import plan_of
from support.stored import worker_info

from midstream.errors import SpecError
from midstream.runtime.frontend.input_session import (
    InputSession,
    as_one_request,
    closing,
    with_call_plan,
)
from midstream.runtime.frontend.request.call_plan import CallPlan
from midstream.runtime.protocol.results import RequestHeader, ResultHeader, WorkerAnswer

INPUTS = [[1, 2, 3], [4], [5, 6]]
# Three turns; the 12, the 21 and the 31 were sampled last and are fed nowhere.
GENERATED = [10, 11, 12, 21, 30, 31]
PROMPT = [1, 2, 3, 10, 11, 4, 5, 6]
TURNS = [6, 8]


def ended(turns: list[int] = TURNS, prompt: list[int] = PROMPT, inputs: Any = INPUTS) -> Any:
    """What comes of a session: (output, plan, the problem that its workers' answers have)."""
    session = InputSession(inputs=[list(each) for each in inputs])
    headers = [RequestHeader("x", "", 0, list(prompt), list(turns), 0, [], []) for _ in range(2)]
    answers = [
        WorkerAnswer(worker_info(), ResultHeader("u", [header], 0, None), b"") for header in headers
    ]
    one = SimpleNamespace(token_ids=[31], index=0)
    output = SimpleNamespace(prompt_token_ids=[1, 2, 3, 4, 5, 6], outputs=[one])
    whole, plan = as_one_request(output, GENERATED, session.inputs, plan_of(), answers)
    assert output.prompt_token_ids == [1, 2, 3, 4, 5, 6]
    assert one.token_ids == [31]
    assert headers[0].problem == headers[1].problem
    return whole, plan, headers[0].problem


def test_a_session_is_one_request_whose_prompt_is_all_that_was_fed_before_the_last_turn():
    whole, plan, problem = ended()
    assert whole.prompt_token_ids == PROMPT
    assert whole.outputs[0].token_ids == [30, 31]
    assert plan.prompt_len == len(PROMPT)
    assert not problem


def test_a_turn_that_came_twice_because_it_was_preempted_counts_once():
    whole, _, problem = ended(turns=[3, 6, 6, 8, 8])
    assert whole.outputs[0].token_ids == [30, 31]
    assert not problem


def test_a_session_of_one_input_is_an_ordinary_request():
    whole, plan, problem = ended(turns=[], prompt=[], inputs=INPUTS[:1])
    assert whole.prompt_token_ids == INPUTS[0]
    assert whole.outputs[0].token_ids == GENERATED
    assert plan.prompt_len == 3
    assert not problem


@pytest.mark.parametrize(
    ("turns", "prompt"),
    [
        ([8], PROMPT),  # a turn is missing
        ([6, 7], PROMPT),  # another length than the prompt's
        ([5, 8], PROMPT),  # an input elsewhere
        (TURNS, [1, 2, 3, 10, 99, 4, 5, 6]),  # another token than was generated
        (TURNS, [1, 2, 9, 10, 11, 4, 5, 6]),  # another first input
        (TURNS, [1, 2, 3, 10, 11, 4, 5, 9]),  # another last input
        ([], []),  # nothing known of it
    ],
)
def test_what_does_not_fit_together_is_a_problem_of_the_receipt(turns, prompt):
    _, _, problem = ended(turns, prompt)
    assert "not its inputs and what was generated" in problem


@dataclass
class Completion:
    text: str = "ab"
    token_ids: list[int] = field(default_factory=lambda: [1, 2])
    logprobs: Any = None


@pytest.mark.parametrize("is_delta", [False, True])
def test_a_session_that_ends_without_a_word_gets_its_latest_output_once_more(is_delta):
    latest = SimpleNamespace(finished=False, outputs=[Completion(logprobs=[{}, {}])])
    output = closing(InputSession(latest=latest), is_delta)
    assert output.finished
    assert not latest.finished
    assert latest.outputs[0].token_ids == [1, 2]
    one = output.outputs[0]
    if is_delta:
        assert (one.text, one.token_ids, one.logprobs) == ("", [], [])
    else:
        assert (one.text, one.token_ids, one.logprobs) == ("ab", [1, 2], [{}, {}])


def test_a_session_that_ended_or_never_began_needs_no_other_output():
    assert closing(InputSession(), False) is None
    assert closing(InputSession(latest=SimpleNamespace(finished=True)), False) is None


@dataclass
class Input:
    prompt: list[int]
    sampling_params: Any = None


def gathered(inputs: list[Input], call: Any, plan: CallPlan) -> list[Input]:
    async def stream() -> Any:
        for each in inputs:
            yield each

    async def run() -> list[Input]:
        return [each async for each in with_call_plan(stream(), plan, call)]

    return asyncio.run(run())


def params(kind: str = "DELTA", extra: Any = None) -> Any:
    return SimpleNamespace(output_kind=SimpleNamespace(name=kind), extra_args=extra)


def test_inputs_with_params_of_their_own_carry_the_plan_and_the_callers_stay_as_they_are():
    plan, call = CallPlan(None), params()
    own = replace(Input([2]), sampling_params=params(extra={"theirs": 1}))
    own.sampling_params.output_kind = call.output_kind
    first, second = gathered([Input([1]), own], call, plan)
    assert first.sampling_params is None
    assert second.sampling_params.extra_args == {"theirs": 1, "midstream": plan}
    assert own.sampling_params.extra_args == {"theirs": 1}


def test_an_input_with_a_plan_or_another_output_kind_is_refused():
    for extra in ({"midstream": {}}, {"output_residual_stream": [1]}):
        with pytest.raises(SpecError, match="cannot bring a plan of its own"):
            gathered([Input([1], params(extra=extra))], params(), CallPlan(None))
    with pytest.raises(SpecError, match="CUMULATIVE, in a call with DELTA"):
        gathered([Input([1], params("CUMULATIVE"))], params(), CallPlan(None))
