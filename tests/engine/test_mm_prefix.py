"""The front end tells the engine core of models whose image tokens attend both ways."""

from types import SimpleNamespace

import pytest
from support import tiny
from vllm import SamplingParams
from vllm.config import ModelConfig

from midstream import Steer
from midstream.plan import Plan
from midstream.runtime.frontend.base import BaseFrontEnd
from midstream.runtime.install import front_end
from midstream.runtime.protocol.request_payload import payload_of


@pytest.mark.parametrize("is_mm_prefix", [False, True])
def test_a_payload_says_whether_image_tokens_attend_both_ways(llm, monkeypatch, is_mm_prefix):
    monkeypatch.setattr(ModelConfig, "is_mm_prefix_lm", property(lambda self: is_mm_prefix))
    front = BaseFrontEnd(front_end(llm.llm_engine).info, llm.llm_engine, deltas=False)
    request = SimpleNamespace(
        request_id="r",
        sampling_params=SamplingParams(max_tokens=2),
        prompt_token_ids=[1, 2, 3],
        prompt_embeds=None,
    )
    front.admit(request, Plan.make(None, Steer([1.0] * tiny.HIDDEN, layer=1)))
    payload = payload_of(request.sampling_params)
    assert payload is not None
    assert payload.mm_prefix is is_mm_prefix
