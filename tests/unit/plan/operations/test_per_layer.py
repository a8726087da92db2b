"""Edits with one vector per layer, and what a matrix means."""

import numpy as np
import torch
from support.refusals import refused_calls

from midstream import Ablate, Gate, Steer
from midstream.plan import Plan
from midstream.plan.positions.prompt import Prompt
from midstream.plan.resolve.resolve import resolve
from midstream.plan.shape import ModelShape

V, W = [1.0, 2.0, 3.0], [0.0, 1.0, 0.0]
SHAPE = ModelShape(4, 3, [("resid_post", layer) for layer in range(4)])


def nothing(name):
    raise AssertionError(f"{name} is not looked up")


def bound(*edits):
    return Plan.make(edits=list(edits)).bind(nothing, 4).edits


def test_steer_with_a_vector_per_layer_is_one_steer_per_layer():
    for steer in (
        Steer({1: V, 3: W}, scale=2.0, phase="prompt"),
        Steer({np.int64(1): np.array(V), 3: torch.tensor(W)}, scale=2.0, phase="prompt"),
        Steer([V, W], layer=[1, 3], scale=2.0, phase="prompt"),
        Steer(np.array([V, W]), layers=(1, 3), scale=2.0, phase="prompt"),
    ):
        wanted = (Steer(V, 1, 2.0, phase="prompt"), Steer(W, 3, 2.0, phase="prompt"))
        assert bound(steer) == wanted, steer
        steps = resolve(Plan(edits=bound(steer)), SHAPE, Prompt(2), 1)
        assert steps == resolve(Plan(edits=wanted), SHAPE, Prompt(2), 1)


def test_each_layers_part_has_every_other_argument_of_the_edit():
    for edit, parts in (
        (
            Ablate({1: V, 3: W}, strength=0.5, norm="keep", site="resid_mid", phase="prompt"),
            [
                Ablate(each, layer, 0.5, norm="keep", site="resid_mid", phase="prompt")
                for each, layer in ((V, 1), (W, 3))
            ],
        ),
        (
            Ablate([V, W], [1, 3], subspace=False, norm="keep", positions=slice(0, 2)),
            [
                Ablate(each, layer, norm="keep", positions=slice(0, 2))
                for each, layer in ((V, 1), (W, 3))
            ],
        ),
        (
            Steer({1: V, 3: W}, scale=2.0, norm="keep", exclude=0),
            [Steer(each, layer, 2.0, norm="keep", exclude=0) for each, layer in ((V, 1), (W, 3))],
        ),
    ):
        assert bound(edit) == tuple(parts), edit


def test_a_plan_counts_the_parts_of_an_edit_as_that_edit():
    plan = Plan.make(edits=[Steer(V, 0), Steer({1: V, 3: W}), Steer(W, 2)]).bind(nothing, 4)
    assert plan.origins == (0, 1, 1, 2)


def test_a_gate_or_an_ablate_per_layer_is_one_of_each_layer():
    gated = Gate(Steer({1: V, 3: W}), V)
    assert bound(gated) == (Gate(Steer(V, 1), V), Gate(Steer(W, 3), V))
    for ablate in (Ablate({1: V, 3: W}), Ablate([V, W], layer=[1, 3], subspace=False)):
        assert bound(ablate) == (Ablate(V, 1), Ablate(W, 3))


def test_a_subspace_is_removed_at_each_layer_where_the_caller_says_so():
    both = Ablate([V, W], layer="all", subspace=True)
    assert bound(both) == (both,)
    assert len(both.instructions(3)) == 2
    # At one layer there is only one reading.
    assert bound(Ablate([V, W], 1)) == (Ablate([V, W], 1),)
    assert "subspace" not in Ablate([V, W], 1).to_dict()
    assert Ablate(V, "all", subspace=True) == Ablate(V, "all")


def test_names_at_several_layers_have_one_reading():
    found = {"a": {None: Steer(V, 0).vector}, "b": {None: Steer(W, 0).vector}}
    plan = Plan.make(edits=Ablate(["a", "b"], layer=[0, 1])).bind(found.__getitem__, 4)
    assert plan.edits == (Ablate([V, W], layer=[0, 1], subspace=True),)


def test_a_matrix_that_can_be_read_two_ways_is_rejected():
    refused_calls(
        (lambda: Ablate([V, W], "all"), "directions", "2 directions at all layers .*subspace=True"),
        (lambda: Ablate([V, W], [1, 2]), "directions", "at 2 layers .*subspace=False to"),
        (lambda: Ablate([V, W], "all", subspace=False), "layer", r"such as layer=range\(2\)"),
        (lambda: Ablate([V, W], [1, 2, 3], subspace=False), "directions", "2 rows for 3 layers"),
        (lambda: Ablate({1: V, 3: W}, subspace=True), "subspace", "one direction per layer"),
        (lambda: Ablate({1: V}, layer=2), "layer", "which has the layers; omit it"),
        (lambda: Ablate(["a", "b"], 1, subspace=False), "subspace", "got a name"),
        (lambda: Ablate(V, 1, subspace="yes"), "subspace", "expected `bool`, got `str`"),
        (lambda: Steer([V, W], "all"), "layer", r"one per layer, .*such as layer=range\(2\)"),
        (lambda: Steer([V, W], 3), "vector", "got 2 rows for 1 layer; .*list 2 layers"),
        (lambda: Steer({1: V, 3: W}, layer=[1, 3]), "layer", "is a dict by layer"),
        (lambda: Steer({1: V, 3: [1.0]}), "vector[3]", "expected 3 numbers, as at the first layer"),
        (lambda: Steer({1: V, 3: "x"}), "vector[3]", "got `str`"),
        (lambda: Steer({1: V, 1.5: W}), "vector", "field names must be `str`"),
    )
