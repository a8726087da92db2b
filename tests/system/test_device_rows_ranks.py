"""Rows that stay on the devices of several ranks, against transformers with hooks."""

import gc

import pytest
import torch
from support import asking_model
from support.asking_model import Hooked, placing
from support.engines import ALL_SITES, engine
from support.ranks import GPUS, PIPELINE, ranks

from midstream import Capture
from midstream.errors import SpecError

LENGTH, QUESTION = 5, "What is it thinking of?"
OWN = {"midstream": {"sites": [*ALL_SITES, "z"], "check_ranks": True, "device_rows": 64}}

pytestmark = pytest.mark.skipif(GPUS == 1, reason="needs two GPUs, or none")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return asking_model.make(tmp_path_factory.mktemp("asking"))


def params(length):
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=length, logprobs=0, ignore_eos=True)


def captured(llm, layers, **more):
    taken = Capture(layers, positions="prompt", **more)
    return llm.generate("the parrot sleeps", params(1), capture=taken, use_tqdm=False)[0]


def ask(llm, source, layer, into):
    asked = {"sampling_params": params(LENGTH), "use_tqdm": False, "into": into}
    return llm.ask(source, QUESTION, layer, **asked)[0]


def assert_hooked(output, model, rows, layer, into):
    hooked = Hooked(model)
    ids = hooked.prompt(f"Layer: {layer}\n{' ?' * len(rows)} \n{QUESTION}")
    assert output.prompt_token_ids == ids
    where = ids.index(hooked.tokenizer.convert_tokens_to_ids(" ?"))
    tokens, scores = hooked.answer(ids, into, placing(rows, where), LENGTH)
    (completion,) = output.outputs
    assert list(completion.token_ids) == tokens
    found = [step[token].logprob for step, token in zip(completion.logprobs, tokens, strict=True)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(scores), rtol=2e-3, atol=2e-3)
    assert output.receipt.status == "ok"


def test_each_rank_of_a_tensor_parallel_group_has_the_rows(model):
    with ranks(model, tensor_parallel_size=2, **OWN) as llm:
        for _ in range(5):  # there is room for four: that of freed ones is used again
            source = captured(llm, [3], reduce="device")
            rows = Hooked(model).rows(source.prompt_token_ids, 3)
            assert_hooked(ask(llm, source, 3, 1), model, rows, 3, 1)
        with pytest.raises(SpecError, match=r"z is split over the ranks|as wide as the residual"):
            captured(llm, [3], sites="z", reduce="device")


def test_rows_of_another_stage_of_a_pipeline_are_refused_by_name(model):
    with ranks(model, **PIPELINE, **OWN) as llm:
        source = captured(llm, [1, 3], reduce="device")
        rows = Hooked(model).rows(source.prompt_token_ids, 1)
        assert_hooked(ask(llm, source, 1, 0), model, rows, 1, 0)
        rows = Hooked(model).rows(source.prompt_token_ids, 3)
        assert_hooked(ask(llm, source, 3, 2), model, rows, 3, 2)
        with pytest.raises(SpecError, match="resid_post at layer 3 are on another pipeline stage"):
            ask(llm, source, 3, 1)
        by_value = captured(llm, [3])
        assert_hooked(ask(llm, by_value, 3, 1), model, rows, 3, 1)


def test_without_room_for_them_rows_do_not_stay(model):
    with engine(model, midstream={"device_rows": 0}) as llm:
        with pytest.raises(SpecError, match=r"there is room for 0; .* setting device_rows"):
            captured(llm, [3], reduce="device")
        gc.collect()
        assert len(llm._front_end.device_sources) == 0
