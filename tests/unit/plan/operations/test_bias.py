"""`Bias`: its forms, what is refused, and what it becomes."""

from types import SimpleNamespace
from typing import Any

import pytest
from support.refusals import refused

from midstream.errors import SpecError
from midstream.plan import Bias, Gate, ModelShape, Plan, Prompt, Steer, TokenIds
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


def test_where_a_token_is_sampled_is_where_it_is_unless_that_is_given():
    for one, positions, phase in (
        (Bias({7: 2, 3: -1}), ["last_prompt", "generated"], "all"),
        (Bias({"7": 2.0}, phase="generated"), ["generated"], "generated"),
        (Bias({7: 2.0}, phase="prompt"), ["last_prompt"], "prompt"),
        (Bias({7: 2.0}).replace(phase="generated"), ["generated"], "generated"),
        (Bias({7: 2.0}).replace(phase="prompt"), ["last_prompt"], "prompt"),
        (Bias({7: 2.0}, "generated").replace(phase="generated"), ["generated"], "generated"),
        (Bias({7: 2.0}, TokenIds([4])), [{"tokens": [4]}], "all"),
    ):
        assert (one.to_dict()["positions"], one.to_dict()["phase"]) == (positions, phase)
        assert one.replace(positions="last_prompt").tokens == one.tokens
    assert Bias({7: 2, "3": -1}).to_dict()["tokens"] == {"3": -1.0, "7": 2.0}


def test_what_is_malformed_is_refused():
    refused(
        Bias,
        ([7], "tokens", "expected {token id: number}, got"),
        ({}, "tokens", "expected 1 to 1024 tokens, got 0"),
        (dict.fromkeys(range(1025), 1), "tokens", "expected 1 to 1024 tokens, got 1025"),
        ({-1: 2}, "tokens", "expected token ids from 0, got -1"),
        ({"a": 2}, "tokens", "expected token ids from 0, got 'a'"),
        ({True: 2}, "tokens", "expected token ids from 0, got True"),
        ({"7" * 5000: 2}, "tokens", "expected token ids from 0, got '777"),
        ({7: 2, "7": 3}, "tokens", "token 7 is given twice"),
        ({7: float("-inf")}, "finite|float32"),
    )
    refused(
        lambda more: Bias({7: 2}, **more),
        ({"phase": ["prompt"]}, "phase", "got"),
        ({"phase": "later"}, "phase", "got 'later'"),
        ({"layer": 3}, "layer", "unknown argument of Bias"),
        ({"site": 3}, "site", "unknown argument of Bias"),
        ({"head": 3}, "head", "unknown argument of Bias"),
    )


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


def test_an_engine_that_cannot_refuses():
    for settings, token, problem in (
        (config(sharded=True), 1, "unsupported with enable_batch_sharded_sampling"),
        (config(), 100, "there is no token 100: the model has 100, 0 to 99"),
    ):
        check_biases(resolved(Steer([1, 0, 0], 1)), settings)
        with pytest.raises(SpecError, match=problem):
            check_biases(resolved(Bias({token: 1})), settings)
    check_biases(resolved(Bias({99: 1})), config())
