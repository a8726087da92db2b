"""Rows of `LLM(layers=…)`, and of the last token, by a second request."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine.asking import ask_all
from support.engines import greedy, tokens
from support.oracle import HookEdit, Oracle

from midstream import Capture, Probe, SamplingParams, Steer, Threshold
from midstream.api.default_capture import DefaultCapture
from midstream.errors import SpecError, UnsupportedError

PROMPT = [5, 17, 42, 8, 99, 3]
VECTOR = torch.randn(64, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def default(llm: Any) -> Iterator[Any]:
    """Give the engine a default capture, as `LLM(layers=[0, -1], …)` does."""

    def give(**flags: Any) -> Any:
        given = {"include_prefill": False, "include_decode": True, "last_prefill_token": False}
        llm._default_capture = DefaultCapture.parse(
            [0, -1], **{**given, "last_decode_token": False, **flags}
        )
        return llm

    yield give
    llm.remove_hooks()


def assert_rows(reference: Oracle, output: Any, completion: Any, first: int, *edits: Any) -> None:
    """The completion has the rows of its generated tokens, from its `first` on to the last."""
    every = [*output.prompt_token_ids, *completion.token_ids]
    _, theirs = reference.run(every, edits)
    assert set(completion.hidden_states) == {0, 2}
    for layer, rows in completion.hidden_states.items():
        expected = theirs["resid_post", layer][len(output.prompt_token_ids) + first :]
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)


def test_there_are_as_many_rows_as_tokens_with_the_last_tokens_row(default, reference):
    llm = default(last_token_row=True, include_prefill=True)
    prompts = [tokens(PROMPT), tokens(range(3, 90)), tokens([7])]
    params = [greedy(5, detokenize=False), greedy(9, detokenize=False), greedy(1, detokenize=False)]
    for output in llm.generate(prompts, params, use_tqdm=False):
        assert_rows(reference, output, output.outputs[0], 0)
        assert output.hidden is output.hidden_states is output.outputs[0].hidden
        assert output.prefill_hidden[0].shape == (len(output.prompt_token_ids), 64)
    plain = default().generate(prompts, params, use_tqdm=False)
    assert [len(one.outputs[0].token_ids) for one in plain] == [5, 9, 1]


def test_the_last_tokens_row_alone_is_the_last_row(default, reference):
    llm = default(last_token_row=True, last_decode_token=True)
    [output] = ask_all(llm, [PROMPT], 5)
    assert_rows(reference, output, output.outputs[0], 4)


def test_a_completion_that_stops_early_has_the_row_of_the_token_that_stopped_it(default, reference):
    llm = default(last_token_row=True)
    [free] = ask_all(llm, [PROMPT], 6)
    stop = free.outputs[0].token_ids[3]
    params = greedy(20, detokenize=False, stop_token_ids=[stop], logprobs=2)
    [output] = ask_all(llm, [PROMPT], params)
    completion = output.outputs[0]
    assert completion.finish_reason == "stop"
    assert completion.stop_reason == stop
    assert len(completion.logprobs) == len(completion.token_ids) <= 4
    assert_rows(reference, output, completion, 0)


def test_each_completion_of_a_prompt_has_the_row_of_its_own_last_token(default, reference):
    llm = default(last_token_row=True)
    params = SamplingParams(
        n=2, temperature=1.0, seed=11, max_tokens=4, ignore_eos=True, detokenize=False
    )
    [output] = ask_all(llm, [PROMPT], params)
    for completion in output.outputs:
        assert_rows(reference, output, completion, 0)


def test_edits_of_all_positions_reach_the_last_tokens_row(default, reference):
    llm = default(last_token_row=True)
    llm.steering.set(base=Steer(VECTOR, 0, 0.5))
    [output] = ask_all(llm, [PROMPT], 5, steer=Steer(VECTOR, 1, 2.0))
    edits = (HookEdit("resid_post", n, VECTOR, f, lambda _: True) for n, f in ((0, 0.5), (1, 2.0)))
    assert_rows(reference, output, output.outputs[0], 0, *edits)


def test_what_cannot_be_asked_again_is_rejected_with_the_last_tokens_row(default):
    llm = default(last_token_row=True)
    early = Steer(VECTOR, 0, phase="prompt")
    with pytest.raises(SpecError, match=r"^steer\.positions: with last_token_row"):
        ask_all(llm, [PROMPT], 5, steer=early)
    llm.vectors.register("early", VECTOR)
    with pytest.raises(SpecError, match=r"^steer: with last_token_row, vectors must be given by"):
        llm.generate(tokens(PROMPT), greedy(5, detokenize=False), steer=Steer("early", 0))
    reads = {"steer": Steer(VECTOR, 0), "probes": Probe(VECTOR, 0, name="p")}
    asked = {**reads, "controller": Threshold("p", above=1.0)}
    with pytest.raises(SpecError, match="^controller: with last_token_row, no controller may"):
        ask_all(llm, [PROMPT], 5, **asked)
    llm.steering.set(generated=Steer(VECTOR, 0))
    with pytest.raises(UnsupportedError, match="a server-wide edit selects positions or phases"):
        ask_all(llm, [PROMPT], 5)
    llm.steering.clear()
    llm.captures.set("every", Capture(0))
    with pytest.raises(UnsupportedError, match="use captures by request"):
        ask_all(llm, [PROMPT], 5)
    llm.captures.clear("every")
    embeddings = {"prompt_embeds": torch.zeros(3, 64)}
    with pytest.raises(SpecError, match=r"^prompts\[1\]: .*'prompt_embeds'"):
        llm.generate([tokens(PROMPT), embeddings], greedy(5, detokenize=False), use_tqdm=False)


def test_a_request_of_its_own_captures_as_before(default, reference):
    llm = default(last_token_row=True)
    [output] = ask_all(llm, [PROMPT], 5, capture=Capture(1))
    assert output.activations["resid_post", 1].shape == (len(PROMPT) + 4, 64)
    assert_rows(reference, output, output.outputs[0], 0)


def test_remove_hooks_ends_the_default_capture(default):
    llm = default()
    llm.remove_hooks()
    [output] = ask_all(llm, [PROMPT], 5)
    assert not hasattr(output, "hidden_states")
    assert not hasattr(output, "activations")
