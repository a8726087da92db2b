"""Server-wide steering: three tiers that add up."""

from __future__ import annotations

import threading

import pytest

from midstream.errors import SpecError
from midstream.spec import ModelShape, Plan, Steer, Vector, resolve
from midstream.spec.operations import Ablate, Gate, Replace
from midstream.spec.prompt import Prompt
from midstream.steering import Steering
from midstream.vectors import VectorRegistry

SHAPE = ModelShape(4, 3, [("resid_post", layer) for layer in range(4)] + [("resid_pre", 2)])
V, W = Vector.parse([1.0, 2.0, 2.0]), Vector.parse([0.0, -1.0, 0.0])


@pytest.fixture
def registry() -> VectorRegistry:
    registry = VectorRegistry(SHAPE)
    registry.register("happy", {1: V, 2: W})
    registry.register("plain", V)
    return registry


@pytest.fixture
def steering(registry) -> Steering:
    return Steering(registry)


def test_nothing_is_steered_at_first(steering):
    assert steering.plan_edits() == ()
    assert not steering
    assert steering.epoch == 0
    assert str(steering.show()) == "no server-wide steering"
    assert "no server-wide steering" in steering._repr_html_()


def test_tiers_come_in_order_by_value_and_with_their_phase(steering):
    steering.set(
        generated={"pre_attn": {2: V}}, base=("happy", 2), prompt=[{-1: {"vector": W, "scale": 3}}]
    )
    assert steering.plan_edits() == (
        Steer(V, 1, 2.0, "resid_post"),
        Steer(W, 2, 2.0, "resid_post"),
        Steer(W, -1, 3.0, "resid_post", phase="prompt"),
        Steer(V, 2, 1.0, "resid_pre", phase="generated"),
    )
    assert steering


def test_each_token_gets_the_edits_of_base_and_of_its_own_phase(steering):
    steering.set(base={0: V}, prompt={1: V}, generated={2: V})
    resolved = resolve(Plan(edits=steering.plan_edits()), SHAPE, Prompt(5), 4)
    ranges = {edit.layer: edit.where.ranges for edit in resolved.edits}
    assert ranges == {0: ((0, None),), 1: ((0, 5),), 2: ((5, None),)}


def test_set_replaces_the_tiers_that_are_named_and_leaves_the_others(steering):
    steering.set(base={0: V}, prompt={1: V})
    state = steering.set(prompt=[{2: W}], generated="happy")
    assert state == steering.show()
    assert [edit.layers.indices for edit in state.base] == [(0,)]
    assert [edit.layers.indices for edit in state.prompt] == [(2,)]
    assert [edit.layers.indices for edit in state.generated] == [(1,), (2,)]
    steering.set(generated=[])
    assert steering.plan_edits() == (*state.base, *state.prompt)
    steering.clear()
    assert steering.plan_edits() == ()


def test_epochs_count_changes_and_digests_are_of_the_content(steering):
    empty = steering.digest
    steering.set(base={0: V})
    one, epoch = steering.digest, steering.epoch
    steering.set(base={0: V})
    assert (steering.digest, steering.epoch) == (one, epoch + 1)
    steering.set(base=[], prompt={0: V})
    assert steering.digest not in (empty, one)
    steering.clear()
    assert (steering.digest, steering.epoch) == (empty, epoch + 3)


def test_a_name_means_what_was_registered_when_it_was_set(steering, registry):
    steering.set(base="happy")
    before = steering.plan_edits()
    registry.register("happy", {3: V})
    assert steering.plan_edits() == before
    steering.set(base="happy")
    assert steering.plan_edits() == (Steer(V, 3, site="resid_post"),)
    registry.remove("happy")
    assert steering.plan_edits() == (Steer(V, 3, site="resid_post"),)


def test_edits_of_every_kind_are_taken(steering):
    gate = Gate(Ablate("plain", 1), "plain", threshold=0.5)
    steering.set(prompt=[gate, Replace([[1, 2, 3], [4, 5, 6]], 0, positions=slice(0, 2))])
    first, second = steering.plan_edits()
    assert first == Gate(Ablate(V, 1, phase="prompt"), V, threshold=0.5)
    assert second.positions.phase == "prompt"


def test_a_request_with_one_token_to_generate_has_none_to_edit(steering):
    steering.set(base=[Steer(V, 0, positions="generated"), Steer(V, 3)], generated={1: V})
    assert [edit.layers.indices for edit in steering.plan_edits(max_tokens=1)] == [(3,)]
    for max_tokens in (None, 2):
        assert len(steering.plan_edits(max_tokens)) == 3
    resolve(Plan(edits=steering.plan_edits(max_tokens=1)), SHAPE, Prompt(1), 1)


WRONG = {
    "nothing": ({}, "", "no tier is given"),
    "a layer": ({"base": {"resid_post": {9: V}}}, 'base["resid_post"][9].layer', "out of range"),
    "a site": ({"base": {"resid_mid": {1: V}}}, 'base["resid_mid"][1].site', "is not tapped"),
    "a layer of a site": (
        {"prompt": {"resid_pre": {1: V}}},
        'prompt["resid_pre"][1].layer',
        "not tapped",
    ),
    "the width": ({"generated": {1: [1.0]}}, "generated[1].vector", "expected 3 numbers"),
    "a name": ({"base": ["happy", "hapy"]}, "base[1]", "did you mean `happy`"),
    "a name alone": ({"base": "hapy"}, "base", "no vectors are registered as 'hapy'"),
    "a name without a layer": ({"base": "plain"}, "base.layer", "registered without layers"),
    "a phase": ({"prompt": [Steer(V, 1, phase="generated")]}, "prompt[0].phase", "contradicts"),
    "a gate that reads too late": (
        {"base": Gate(Steer(V, 1), {"direction": V, "layer": 3})},
        "base.probe.layer",
        "computed after",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_changes_nothing(steering, name):
    steering.set(base={0: V}, prompt={0: W})
    before = steering.show()
    given, path, problem = WRONG[name]
    # A good tier beside the bad one is not set either.
    beside = {"base": {2: W}, "generated": {2: W}} if given else {}
    with pytest.raises(SpecError, match=problem) as caught:
        steering.set(**{**beside, **given})
    assert caught.value.path == path
    assert steering.show() is before


def test_readers_see_tiers_that_were_set_together(steering):
    seen, stop = set(), threading.Event()

    def read() -> None:
        while not stop.is_set():
            seen.add(tuple(edit.scale for edit in steering.plan_edits()))

    reader = threading.Thread(target=read)
    reader.start()

    def write(scale: float) -> None:
        for _ in range(100):
            steering.set(**dict.fromkeys(("base", "prompt", "generated"), Steer(V, 1, scale)))

    writers = [threading.Thread(target=write, args=(scale,)) for scale in (1.0, 2.0)]
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    assert seen <= {(), (1.0,) * 3, (2.0,) * 3}
    assert steering.epoch == 200


def test_what_is_in_force_prints_as_a_table(steering):
    steering.set(
        base=Gate(Steer(V, 1), W),
        prompt=Steer(V, "all", 2.5, positions=slice(1, None), exclude="last_prompt"),
    )
    head, gate, steer = str(steering).splitlines()
    assert head.split() == ["tier", "op", "taps", "scale", "norm", "positions"]
    assert gate.split() == ["base", "gate:", "steer", "resid_post.1", "1", "3", "all"]
    assert steer == (
        "prompt  steer        resid_post.all  2.5    3     prompt: 1:, but last_prompt"
    )
    assert steering.show()._repr_html_() == steering._repr_html_()
    assert steering._repr_html_().count("<tr>") == 3
    assert steering.show().to_dict()["prompt"][0]["scale"] == 2.5
