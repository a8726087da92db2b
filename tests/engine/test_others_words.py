"""Requests in other tools' words give the rows and tokens of the same requests in ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine.asking import ask, ask_all
from support.engine_view import inspect
from support.engines import generated, greedy
from support.misspelling import ASKED
from support.others_words import direction, encoded, lens_array, packed

from midstream import Ablate, Capture, Clamp, Replace, SpecError, Steer
from midstream.compat.foreign_fields import FOREIGN, OWN

PROMPT = [5, 6, 7, 8]
HIDDEN = 64
SEEN = Capture(layers="all")
_RANDOM = np.random.default_rng(0)
V, W = (_RANDOM.standard_normal(HIDDEN).astype(np.float32) for _ in range(2))
BOTH = {"prompt": "all", "generation": "all"}
POSITIONAL = {"activations": torch.tensor(np.stack([[V, W]])), "layer_indices": [1]}

# (their fields, our edits); all layers are captured in their words and in ours.
SAME: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "vllm-lens": (
        {"apply_steering_vectors": [
            {"activations": lens_array([V, W]), "layer_indices": [0, 2], "scale": 3.0,
             "norm_match": True},
            {**POSITIONAL, "position_indices": [1, 5]},
        ]},
        [
            Steer(V, 0, 3.0, norm="match"), Steer(W, 2, 3.0, norm="match"),
            Steer(V, 1, positions=1), Steer(W, 1, positions=5),
        ],
    ),
    "EasySteer": (
        {"steering": {"conflict": "sequential", "vectors": [
            {"data": direction({0: V, 1: W}), "scale": 4.0, "layers": [1], "normalize": True,
             "apply": {"prompt_positions": [-1], "generation_window": [0, 2]}},
            {"data": direction({2: V}), "algorithm": "erase", "apply": BOTH},
        ]}},
        [
            Steer(W, 1, 4.0, norm="keep", positions=[3, 4, 5]), Ablate(V, 2),
        ],
    ),
    "the fork": (
        {
            "steering_vectors": {"pre_attn": packed([V, W], [0, 2], scales=[2.0, 0.5])},
            "decode_steering_vectors": {"post_block": {1: {"vector": V.tolist(), "scale": 3.0}}},
            "steering_clamps": {"post_attn": {"1": [{"vector": W.tolist(), "max": 0.5}]}},
            "patch": [{"layer": 0, "hook": "post_block", "dest_position": 2, "source_inline": 1,
                       "alpha": 0.5}],
            "patch_vectors": {"dtype": "float32", "shape": [2, HIDDEN], "data": encoded([V, W])},
        },
        [
            Replace(W, 0, 0.5, positions=[2]),
            Steer(V, 0, 2.0, site="resid_pre"), Steer(W, 2, 0.5, site="resid_pre"),
            Steer(V, 1, 3.0, phase="generated"),
            Clamp(W, 1, high=0.5, site="resid_mid"),
        ],
    ),
}  # fmt: skip


def run(llm: Any, extra_args: dict[str, Any] | None = None, **asked: Any) -> Any:
    params = greedy(6, detokenize=False, extra_args=extra_args)
    return ask(llm, PROMPT, params, **asked)


@pytest.mark.parametrize("tool", SAME)
def test_their_words_give_the_rows_and_tokens_of_ours(llm: Any, tool: str) -> None:
    theirs, ours = SAME[tool]
    plain, expected = run(llm), run(llm, edits=ours, capture=SEEN)
    fields = dict(theirs)
    if tool == "the fork":  # which records rows before its edits
        found = run(llm, fields)
    else:
        fields["output_residual_stream"] = True
        found = run(llm, fields)
        assert list(found.activations) == list(expected.activations)
        for tap in expected.activations:
            assert torch.equal(found.activations[tap], expected.activations[tap])
    assert generated(found) == generated(expected) != generated(plain)
    assert found.receipt.edited == expected.receipt.edited
    assert {name for name, _ in found.receipt.coming_from} == set(fields)
    assert found.receipt.to_dict()["coming_from"] == dict(found.receipt.coming_from)
    assert expected.receipt.coming_from == ()


def test_a_capture_by_consumer_in_extra_args_is_returned(llm: Any) -> None:
    theirs = {"capture": {"memory": {"hooks": {"post_block": "all"}, "positions": "all_prompt"}}}
    found = run(llm, theirs)
    expected = run(llm, capture=Capture("all", positions="prompt"))
    for tap in expected.activations:
        assert torch.equal(found.activations[tap], expected.activations[tap])


def test_a_registered_name_is_found(llm: Any) -> None:
    llm.vectors.register("calm", {"post_block": {1: 5 * V}})
    found = run(llm, {"steering_name": "calm"})
    assert generated(found) == generated(run(llm, edits=Steer("calm")))
    with pytest.raises(SpecError, match="no vectors are registered as 'calmer'"):
        run(llm, {"steering_name": "calmer"})


@pytest.mark.parametrize(
    "name", [*FOREIGN, *OWN, "midstreem", "Midstream", "captures", "edit", "probe"]
)
def test_what_is_not_understood_is_rejected_and_the_engine_goes_on(llm: Any, name: str) -> None:
    with pytest.raises(SpecError) as caught:
        run(llm, {name: ASKED.get(name, ASKED["steer"])})
    assert caught.value.path.startswith(f"extra_args[{name!r}]")
    assert not llm.llm_engine.has_unfinished_requests()
    assert run(llm, {"other": 1}, capture=SEEN).receipt.status == "ok"
    inspect(llm).check_integrity()


def test_parameters_are_not_changed_and_serve_several_prompts(llm: Any) -> None:
    theirs = {"output_residual_stream": [1], "other": 1}
    params = greedy(3, detokenize=False, extra_args=theirs)
    for _ in range(2):
        outputs = ask_all(llm, [PROMPT] * 2, params)
        assert [list(each.activations) for each in outputs] == [[("resid_post", 1)]] * 2
    assert params.extra_args is theirs
    assert theirs == {"output_residual_stream": [1], "other": 1}
