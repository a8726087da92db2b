"""Several threads on one `LLM`: each call has its own outputs, or an error that says what to do."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from vllm import SamplingParams

from midstream import BusyError, Capture

FOREVER = 120.0
PARAMS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
CAPTURE = Capture([1], positions="prompt")
THREADS, CALLS = 4, 6


def prompt_of(*ids):
    return {"prompt_token_ids": list(ids)}


def prompts_of(thread):
    return [prompt_of(*range(1 + thread, 5 + 2 * thread + nth)) for nth in range(3)]


def test_calls_of_several_threads_have_their_own_outputs_or_are_refused(llm):
    alone = [
        llm.generate(prompts_of(n), PARAMS, capture=CAPTURE, use_tqdm=False) for n in range(THREADS)
    ]
    begin = threading.Barrier(THREADS)

    def calls(thread):
        served, refused = [], []
        begin.wait(FOREVER)
        for _ in range(CALLS):
            try:
                served.append(
                    llm.generate(prompts_of(thread), PARAMS, capture=CAPTURE, use_tqdm=False)
                )
            except BusyError as error:
                refused.append(str(error))
        return served, refused

    with ThreadPoolExecutor(THREADS) as pool:
        running = [pool.submit(calls, thread) for thread in range(THREADS)]
        found = [one.result(FOREVER) for one in running]
    assert sum(len(served) for served, _ in found) > 0
    for thread, (served, refused) in enumerate(found):
        assert len(served) + len(refused) == CALLS
        for outputs in served:
            for output, expected in zip(outputs, alone[thread], strict=True):
                assert output.prompt_token_ids == expected.prompt_token_ids
                assert output.outputs[0].token_ids == expected.outputs[0].token_ids
                rows, wanted = (one.activations["resid_post", 1] for one in (output, expected))
                assert torch.equal(rows, wanted)
        assert all("in use by the thread" in problem for problem in refused)
    assert not llm.llm_engine.has_unfinished_requests()


def test_while_a_call_runs_every_other_way_to_the_engine_is_refused_in_another_thread(llm):
    """A refused call neither adds, nor aborts, nor takes anything of the running one."""
    expected = llm.generate([prompt_of(1, 2, 3)], PARAMS, capture=CAPTURE, use_tqdm=False)
    engine, refused = llm.llm_engine, []
    ways = [
        lambda: llm.generate([prompt_of(4)], PARAMS, use_tqdm=False),
        lambda: llm.generate([prompt_of(4)], PARAMS, capture=CAPTURE, use_tqdm=False),
        lambda: llm.score([[1, 2]]),
        lambda: llm.sweep([1, 2], 0, {"logprob": 1}, layers=[1], use_tqdm=False),
        lambda: llm.enqueue([prompt_of(4)], PARAMS, use_tqdm=False),
        lambda: llm.wait_for_completion(use_tqdm=False),
        lambda: llm.beam_search([prompt_of(4)], None),
        lambda: llm.parameter("lm_head.weight"),
        lambda: llm.update("0", scale=0.0),
        lambda: engine.add_request("mine", prompt_of(4), PARAMS),
        lambda: engine.step(),
        lambda: llm.collective_rpc("get_model"),
        lambda: llm.reset_prefix_cache(),
        lambda: llm.sleep(),
        lambda: engine.abort_request(["0"]),
    ]
    step = engine.step

    def interrupted():
        """A step of the running call, before which another thread tries every way."""
        if not refused:
            thread = threading.Thread(target=intrude, name="intruder")
            thread.start()
            thread.join(FOREVER)
        return step()

    def intrude():
        for way in ways:
            try:
                way()
                refused.append("it was served")
            except Exception as error:  # noqa: BLE001 - the test looks at it
                refused.append(error)

    engine.step = interrupted
    try:
        (output,) = llm.generate([prompt_of(1, 2, 3)], PARAMS, capture=CAPTURE, use_tqdm=False)
    finally:
        del engine.step
    assert len(refused) == len(ways)
    for nth, error in enumerate(refused):
        assert isinstance(error, BusyError), (nth, error)
    assert output.outputs[0].token_ids == expected[0].outputs[0].token_ids
    assert torch.equal(
        output.activations["resid_post", 1], expected[0].activations["resid_post", 1]
    )


def test_a_call_does_not_return_outputs_of_requests_that_were_queued_before(llm):
    llm.enqueue([prompt_of(1, 2)], PARAMS, use_tqdm=False)
    with pytest.raises(BusyError, match="wait_for_completion"):
        llm.generate([prompt_of(4)], PARAMS, use_tqdm=False)
    (queued,) = llm.wait_for_completion(use_tqdm=False)
    assert queued.prompt_token_ids == [1, 2]
    (output,) = llm.generate([prompt_of(4)], PARAMS, use_tqdm=False)
    assert output.prompt_token_ids == [4]
