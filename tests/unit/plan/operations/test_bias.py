"""`Bias`: its forms, what is refused, and what it becomes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.refusals import refused

from midstream.errors import SpecError
from midstream.plan import Bias, Gate, ModelShape, Plan, Prompt, Reading, Steer, TokenIds
from midstream.plan.operations import parse_edit
from midstream.plan.resolve.resolve import resolve
from midstream.plan.resolve.wire import from_bytes, to_bytes
from midstream.plan.resolved import ResolvedBias
from midstream.runtime.frontend.request.plan_resolver import check_biases
from midstream.runtime.protocol.cache_keys import cache_keys

SHAPE = ModelShape(
    4, 3, [("logits", 3), ("final_norm", 3), ("resid_post", 1)], widths={("logits", 3): 2}
)


def resolved(*edits: Any) -> Any:
    plan = Plan.make(None, list(edits), None)
    assert plan is not None
    return resolve(plan, SHAPE, Prompt(5), 4)


def config(sharded: bool = False) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(enable_batch_sharded_sampling=sharded),
        model_config=SimpleNamespace(get_vocab_size=lambda: 100),
    )


@pytest.mark.parametrize(
    ("one", "emitted"),
    [
        (Bias({7: 2, 3: -1}), {"tokens": {"3": -1.0, "7": 2.0},
                               "positions": ["last_prompt", "generated"], "phase": "all"}),
        (Bias({"7": 2.0}, phase="generated"), {"tokens": {"7": 2.0},
                                               "positions": ["generated"], "phase": "generated"}),
        (Bias({7: 2.0}, phase="prompt"), {"tokens": {"7": 2.0}, "positions": ["last_prompt"],
                                          "phase": "prompt"}),
        (Bias({7: 2.0}, TokenIds([4])), {"tokens": {"7": 2.0}, "positions": [{"tokens": [4]}],
                                         "phase": "all"}),
    ],
)  # fmt: skip
def test_a_bias_survives_json(one, emitted):
    assert one.to_dict() == {"op": "bias", **emitted}
    assert parse_edit(one.to_dict()) == one == one.replace()
    assert one.replace(positions="last_prompt").tokens == one.tokens
    gate = Gate(one, Reading([1.0, 0.0, 0.0], site="final_norm"))
    assert parse_edit(gate.to_dict()) == gate


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        ([7], "expected {token id: number}, got"),
        ({}, "expected 1 to 1024 tokens, got 0"),
        (dict.fromkeys(range(1025), 1), "expected 1 to 1024 tokens, got 1025"),
        ({-1: 2}, "expected token ids from 0, got -1"),
        ({"a": 2}, "expected token ids from 0, got 'a'"),
        ({True: 2}, "expected token ids from 0, got True"),
        ({"7" * 5000: 2}, "expected token ids from 0, got '777"),
        ({7: 2, "7": 3}, "token 7 is given twice"),
        ({7: float("-inf")}, "finite|float32"),
        ({7: "x"}, "number|float"),
    ],
)
def test_what_is_malformed_is_refused(tokens, problem):
    with pytest.raises(SpecError, match=problem) as caught:
        Bias(tokens)
    assert caught.value.path.startswith("tokens")


@pytest.mark.parametrize("phase", [["prompt"], {}, 3, "later"])
def test_a_phase_that_is_none_is_refused(phase):
    with pytest.raises(SpecError) as caught:
        Bias({7: 2}, phase=phase)
    assert caught.value.path == "phase"


def test_it_takes_neither_layer_nor_site():
    for name in ("layer", "site", "head"):
        with pytest.raises(SpecError, match="unknown argument of Bias"):
            Bias({7: 2}, **{name: 3})


def test_each_bias_of_a_plan_has_a_switch_and_survives_the_wire():
    plan = resolved(Bias({7: 2, 3: -1}), Steer([1, 0, 0], 1), Bias({9: 4}, "last_prompt"))
    assert plan.biases == (ResolvedBias((3, 7), (-1.0, 2.0)), ResolvedBias((9,), (4.0,)))
    first, _, second = plan.edits
    assert (first.site, first.layer, first.where.ranges) == ("logits", 3, ((4, None),))
    assert first.steps.instructions[0].write[0].data != second.steps.instructions[0].write[0].data
    assert second.where.ranges == ((4, 5),)
    assert from_bytes(to_bytes(plan)) == plan
    with pytest.raises(SpecError, match="at most 2 biases") as caught:
        resolved(Bias({1: 1}), Bias({2: 2}), Bias({3: 3}))
    assert caught.value.path == "edits[2]"


def test_it_comes_after_all_kv_and_is_in_no_cache_key():
    assert not any(cache_keys(resolved(Bias({7: 2}))).marks)
    assert any(cache_keys(resolved(Bias({7: 2}), Steer([1, 0, 0], site="final_norm"))).marks)


def test_where_no_token_is_sampled_it_is_refused():
    refused(
        resolved,
        (Bias({7: 2}, 3), "edits[0].positions", "from position 3 of a prompt of 5 tokens"),
        (Bias({7: 2}, "all"), "edits[0].positions", "from position 0 of a prompt"),
        (Gate(Bias({7: 2}), [1, 0, 0]), "edits[0].probe", "missing `layer` and `site`"),
    )


@pytest.mark.parametrize(
    ("settings", "token", "problem"),
    [
        (config(sharded=True), 1, "unsupported with enable_batch_sharded_sampling"),
        (config(), 100, "there is no token 100: the model has 100, 0 to 99"),
    ],
)
def test_an_engine_that_cannot_refuses(settings, token, problem):
    check_biases(resolved(Steer([1, 0, 0], 1)), settings)
    with pytest.raises(SpecError, match=problem):
        check_biases(resolved(Bias({token: 1})), settings)
    check_biases(resolved(Bias({99: 1})), config())
