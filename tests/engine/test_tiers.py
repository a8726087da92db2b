"""Server-wide edits and named vectors: the same thing said in another way gives the same bits."""

from typing import Any

import pytest
import torch
from support import tiny
from support.engines import ALL_SITES, finish, generated, greedy, tokens
from torch import Tensor

from midstream import Ablate, Capture, Clamp, Replace, SamplingParams, Scale, Steer
from midstream.errors import SpecError

PROMPT = [9, 41, 7, 150, 66, 12]
EVERYTHING = Capture("all", ALL_SITES)
COUNT = 5
_DRAW = torch.Generator().manual_seed(77)
U, V, W = (torch.randn(tiny.HIDDEN, generator=_DRAW) * size for size in (3.0, 2.0, 4.0))


def ask(llm: Any, params: Any = None, **asked: Any) -> Any:
    """One request alone, with all rows captured."""
    params = params or greedy(COUNT, detokenize=False)
    carried = params.extra_args is not None
    capture = None if carried else EVERYTHING
    return llm.generate(tokens(PROMPT), params, capture=capture, use_tqdm=False, **asked)[0]


def said(**asked: Any) -> Any:
    """midstream's SamplingParams that say it, and capture all rows."""
    return SamplingParams(
        temperature=0,
        max_tokens=COUNT,
        ignore_eos=True,
        detokenize=False,
        capture=EVERYTHING,
        **asked,
    )


def rows(output: Any) -> dict[Any, Tensor]:
    return dict(output.activations.items())


def assert_same(found: Any, expected: Any) -> None:
    assert generated(found) == generated(expected)
    assert set(found.activations) == set(expected.activations)
    for tap, value in expected.activations.items():
        assert torch.equal(found.activations[tap], value), tap


def differ(one: Any, other: Any) -> bool:
    return any(not torch.equal(one.activations[tap], other.activations[tap]) for tap in rows(one))


def test_each_tier_is_for_its_own_tokens_and_they_add_up(llm: Any) -> None:
    base, prompt, later = Steer(U, 0), Steer(V, 1, site="resid_mid"), Steer(W, 0, scale=0.5)
    plain = ask(llm)
    alone = {
        "base": [base],
        "prompt": [prompt.replace(phase="prompt")],
        "generated": [later.replace(phase="generated")],
    }
    for tier, value in (("base", base), ("prompt", prompt), ("generated", later)):
        llm.steering.set(**{tier: value})
        assert_same(ask(llm), ask_without(llm, alone[tier]))
        llm.steering.clear()
    llm.steering.set(base=base, prompt=prompt, generated=later)
    together = ask(llm)
    assert_same(together, ask_without(llm, [edit for tier in alone.values() for edit in tier]))
    assert differ(together, plain)
    assert together.receipt.edited.applied == together.receipt.edited.expected
    shown = str(llm.steering.show())
    assert all(tier in shown for tier in ("base", "prompt", "generated"))
    llm.steering.clear()
    assert "no server-wide steering" in str(llm.steering.show())
    assert_same(ask(llm), plain)
    assert ask(llm).receipt.edited is None


def ask_without(llm: Any, edits: list[Any]) -> Any:
    """The edits as a request's own, while no tier is in force."""
    state = llm.steering.show()
    llm.steering.clear()
    try:
        return ask(llm, edits=edits)
    finally:
        tiers = {"base": state.base, "prompt": state.prompt, "generated": state.generated}
        given = {tier: list(edits) for tier, edits in tiers.items() if edits}
        if given:
            llm.steering.set(**given)


def test_named_vectors_are_their_values(llm: Any) -> None:
    llm.vectors.register("up", {("resid_mid", 1): U, ("resid_post", 2): V})
    llm.vectors.register("any", W)
    value = [Steer(U, 1, site="resid_mid", scale=0.5), Steer(V, 2, scale=0.5)]
    assert_same(ask(llm, edits=[Steer("up", scale=0.5)]), ask(llm, edits=value))
    assert_same(ask(llm, edits=[Steer("any", 1)]), ask(llm, edits=[Steer(W, 1)]))
    assert_same(ask(llm, edits=[Ablate("any", 0)]), ask(llm, edits=[Ablate(W, 0)]))
    assert_same(ask(llm, edits=[Steer("up"), Steer(W, 2)]), ask(llm, edits=[
        Steer(U, 1, site="resid_mid"), Steer(V, 2), Steer(W, 2)
    ]))  # fmt: skip
    some: dict[str, Any] = {"alpha": 0.5, "positions": slice(2, 5)}
    value = [Replace(U, 1, site="resid_mid", **some), Replace(V, 2, **some)]
    assert_same(ask(llm, edits=[Replace("up", **some)]), ask(llm, edits=value))
    rows = torch.stack([W, U])
    assert_same(
        ask(llm, edits=[Replace(["any", U], 1, positions=[1, 3])]),
        ask(llm, edits=[Replace(rows, 1, positions=[1, 3])]),
    )
    llm.vectors.remove("up")
    with pytest.raises(SpecError, match=r"edits.*up"):
        ask(llm, edits=[Steer("up")])
    llm.steering.set(base=Steer("any", 0))
    llm.vectors.remove("any")
    assert_same(ask(llm), ask_without(llm, [Steer(W, 0)]))


def by_hand(llm: Any, name: str, params: Any) -> None:
    llm.llm_engine.add_request(name, tokens(PROMPT), params)


def test_a_name_of_whole_edits_is_its_edits_and_keeps_them_while_a_request_runs(llm: Any) -> None:
    clamp = Clamp(W, 2, high=1.0, phase="generated")
    llm.vectors.register(
        "calm",
        {"base": {0: U}, "prompt": {"post_attn": {1: V}}, "generated": Steer(W, 1), "edits": clamp},
    )
    whole = [
        Steer(U, 0, scale=0.5),
        Steer(V, 1, scale=0.5, site="resid_mid", phase="prompt"),
        Steer(W, 1, scale=0.5, phase="generated"),
        clamp,
    ]
    assert_same(ask(llm, steer=Steer("calm", scale=0.5)), ask(llm, edits=whole))
    assert_same(ask(llm, said(steering_module_ref=("calm", 0.5))), ask(llm, edits=whole))
    by_hand(llm, "old", said(steering_module_ref=("calm", 0.5)))
    llm.llm_engine.step()
    llm.llm_engine.step()
    llm.vectors.register("calm", {"base": {0: V}})
    by_hand(llm, "new", said(steering_module_ref="calm"))
    llm.llm_engine.step()
    llm.vectors.remove("calm")
    found = finish(llm)
    for name, edits in (("old", whole), ("new", [Steer(V, 0)])):
        expected = ask(llm, edits=edits)
        assert generated(found[name]) == generated(expected)
        for tap, value in expected.activations.items():
            torch.testing.assert_close(found[name].activations[tap], value, rtol=1e-4, atol=1e-4)
    with pytest.raises(SpecError, match="'calm'"):
        ask(llm, steer=Steer("calm"))


def test_a_request_keeps_the_tiers_that_were_in_force_when_it_came(llm: Any) -> None:
    llm.steering.set(base=Steer(U, 1))
    by_hand(llm, "first", said())
    llm.llm_engine.step()
    llm.steering.set(base=Steer(V, 1))
    by_hand(llm, "second", said())
    llm.llm_engine.step()
    llm.steering.clear()
    by_hand(llm, "third", said())
    found = finish(llm)
    for name, edits in (("first", [Steer(U, 1)]), ("second", [Steer(V, 1)]), ("third", None)):
        expected = ask(llm, edits=edits)
        for tap, value in expected.activations.items():
            torch.testing.assert_close(found[name].activations[tap], value, rtol=1e-4, atol=1e-4)


def test_sampling_params_say_the_same_as_edits(llm: Any) -> None:
    llm.vectors.register("mood", {"pre_attn": {1: W}})
    for asked, edits in (
        (
            {"steering_vectors": {"post_block": {0: U, 2: {"vector": V.tolist(), "scale": 0.5}}}},
            [Steer(U, 0), Steer(V, 2, scale=0.5)],
        ),
        (
            {"prefill_steering_vectors": {"pre_attn": {1: U}}},
            [Steer(U, 1, site="resid_pre", phase="prompt")],
        ),
        (
            {"decode_steering_vectors": {"post_attn": {1: V}}},
            [Steer(V, 1, site="resid_mid", phase="generated")],
        ),
        ({"steering_module_ref": "mood"}, [Steer(W, 1, site="resid_pre")]),
        ({"steering_module_ref": ("mood", -2.0)}, [Steer(W, 1, site="resid_pre", scale=-2.0)]),
        (
            {
                "steering_module_ref": {"name": "mood", "scale": 0.5},
                "steering_vectors": {"pre_attn": {1: U}},
                "prefill_steering_vectors": {"pre_attn": {1: V}},
                "decode_steering_vectors": {"pre_attn": {1: W}},
            },
            [
                Steer(W, 1, site="resid_pre", scale=0.5),
                Steer(U, 1, site="resid_pre"),
                Steer(V, 1, site="resid_pre", phase="prompt"),
                Steer(W, 1, site="resid_pre", phase="generated"),
            ],
        ),
        (
            {"steering_vectors": {0: U}, "edits": [Scale(0.5, 0)]},
            [Steer(U, 0), Scale(0.5, 0)],
        ),
    ):
        found = ask(llm, said(**asked))
        assert_same(found, ask(llm, edits=edits))
        assert differ(found, ask(llm)), asked


def test_named_and_inline_and_server_wide_vectors_add_up_at_one_site(llm: Any) -> None:
    llm.vectors.register("mood", {1: U})
    plain = rows(ask(llm))["resid_post", 1]
    llm.steering.set(base={1: W}, prompt=Steer(V, 1, scale=3.0))
    output = ask(llm, said(steering_module_ref=("mood", 2.0), steering_vectors={1: V}))
    moved = rows(output)["resid_post", 1][: len(PROMPT)] - plain[: len(PROMPT)]
    expected = (W + 3 * V + 2 * U + V).expand_as(moved)
    torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-4)
    later = rows(output)["resid_post", 1][len(PROMPT) :]
    without = rows(ask_without(llm, [Steer(W + 2 * U + V, 1), Steer(3 * V, 1, phase="prompt")]))
    torch.testing.assert_close(later, without["resid_post", 1][len(PROMPT) :], rtol=1e-4, atol=1e-4)
