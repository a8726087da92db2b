"""Several threads on one `LLM`: each call has its own outputs, or an error that says what to do."""

import threading

import torch
from vllm import SamplingParams

from midstream import Capture
from midstream.errors import BusyError

FOREVER = 120.0
PARAMS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
CAPTURE = Capture([1], positions="prompt")


def prompt_of(*ids):
    return {"prompt_token_ids": list(ids)}


def test_while_a_call_runs_every_other_way_to_the_engine_is_refused_in_another_thread(llm):
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
