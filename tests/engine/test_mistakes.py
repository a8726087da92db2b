"""Plausible mistakes whose answer needs an engine; the others are in `tests/unit`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine.asking import ask_all
from support.engines import tokens

from midstream import Capture, Steer, activate
from midstream.errors import ConfigError, SpecError

PROMPT = [5, 6, 7, 8]
HIDDEN = 64
V = np.arange(1.0, HIDDEN + 1)
READ = Capture(layers=[-1])
E = [Steer(V, layer) for layer in (0, 1, 2)]

# (number, arguments of `generate` on two prompts, parts of the message).
REJECTED: list[tuple[int, dict[str, Any], list[str]]] = [
    (1, {"capture": Capture(99)}, ["capture.layers: layer 99 is out of range", "(prompt 0)"]),
    (9, {"edits": Steer(V[1:], 1)}, ["edits.vector: expected 64 numbers", "got 63"]),
    (21, {"edits": E}, ["edits: a flat list of 3 edits for 2 prompts can be read two ways"]),
    (23, {"capture": [2, 99]}, ["capture.layers[1]: layer 99 is out of range", "(prompt 0)"]),
    (24, {"capture": [2, {"layer": 99}]}, ["capture[1].layers: layer 99 is out of range"]),
    (26, {"hooks": []}, ["generate() has no such argument", "capture=… to read them"]),
    (31, {"capture": Capture(1, positions="generated")}, ["nothing is selected", "tokens is 1"]),
    (42, {"steer": Steer("happy")}, ["steer: no vectors are registered as 'happy'"]),
    (56, {"edits": [[E[0]] * 70] * 2}, ["the limit is 64", "setting edits_per_site"]),
]  # fmt: skip


def test_a_mistake_is_rejected_before_any_work(llm: Any) -> None:
    before = llm.llm_engine.has_unfinished_requests()
    for number, given, words in REJECTED:
        with pytest.raises(SpecError) as caught:
            ask_all(llm, [PROMPT] * 2, 1, **given)
        for each in words:
            assert each in str(caught.value), number
    assert llm.llm_engine.has_unfinished_requests() == before is False
    with pytest.raises(SpecError, match="capture: unsupported in beam_search"):
        llm.beam_search([tokens(PROMPT)], None, capture=READ)


def test_layers_that_the_model_lacks_are_refused_before_its_weights_are_read(
    tiny_llama: Path,
) -> None:
    from vllm import EngineArgs

    activate()
    for layers, problem in (([0, 3], "3 is out of range: the model has 3 layers"), ([-3, 2], "")):
        settings = {"midstream": {"layers": layers}}
        args = EngineArgs(
            str(tiny_llama), skip_tokenizer_init=True, max_model_len=256, additional_config=settings
        )
        if problem:
            with pytest.raises(ConfigError, match=problem):
                args.create_engine_config()
        else:
            args.create_engine_config()
