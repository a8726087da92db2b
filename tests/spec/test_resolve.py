from __future__ import annotations

import pytest

from midstream.errors import SpecError
from midstream.spec import Capture, ModelShape, Plan, Steer, resolve

SITES = ("resid_pre", "resid_mid", "resid_post")
SHAPE = ModelShape(30, 4, [(site, layer) for site in SITES for layer in range(30)])
V = [1.0, 0.0, 0.0, 0.0]


def _resolve(capture=None, edits=None, *, shape=SHAPE, prompt_len=10, max_tokens=5):
    plan = Plan.make(capture, edits)
    assert plan is not None
    return resolve(plan, shape, prompt_len, max_tokens)


def test_taps_are_in_the_order_of_the_forward_pass():
    plan = _resolve(Capture([-1, 3], ["resid_post", "resid_pre"]))
    assert plan.captures[0].taps == (
        ("resid_pre", 3),
        ("resid_post", 3),
        ("resid_pre", 29),
        ("resid_post", 29),
    )


def test_negative_layers_count_from_the_last():
    plan = _resolve(Capture([-30, 29]), Steer(V, -2))
    assert plan.captures[0].taps == (("resid_post", 0), ("resid_post", 29))
    assert plan.edits[0].layer == 28


def test_all_layers_are_all_that_are_tapped_of_each_site():
    shape = ModelShape(30, 4, [("resid_post", 4), ("resid_post", 2), ("resid_mid", 3)])
    plan = _resolve(Capture("all", ["resid_mid", "resid_post"]), shape=shape)
    assert plan.captures[0].taps == (("resid_post", 2), ("resid_mid", 3), ("resid_post", 4))


def test_an_edit_keeps_its_vector_scale_and_place():
    steer = Steer(V, 3, scale=-2.5, site="resid_mid", positions=[-1, slice(2, 4)])
    edit = _resolve(edits=steer).edits[0]
    assert (edit.site, edit.layer, edit.scale, edit.vector) == ("resid_mid", 3, -2.5, steer.vector)
    assert edit.ranges == ((2, 4), (9, 10))


def test_edits_keep_their_order():
    layers = [5, 2, 5]
    plan = _resolve(edits=[Steer(V, layer, scale=n) for n, layer in enumerate(layers)])
    assert [edit.layer for edit in plan.edits] == layers
    assert [edit.scale for edit in plan.edits] == [0, 1, 2]


def test_a_shape_is_hashable_whatever_its_reasons_came_in():
    reasons = {("resid_mid", 1): "no norm there", ("resid_mid", 0): "no norm"}
    one = ModelShape(2, 4, {("resid_post", 0)}, reasons)
    other = ModelShape(2, 4, [("resid_post", 0)], tuple(reasons.items()))
    assert one == other
    assert hash(one) == hash(other)
    assert one.reason(("resid_mid", 1)) == "no norm there"
    assert one.reason(("resid_post", 1)) is None


TAPPED = ModelShape(
    30,
    4,
    [("resid_post", layer) for layer in range(0, 30, 2)],
    {("resid_mid", layer): "this model has no MLP norm" for layer in range(30)},
)
HINT = r"`sites`/`layers` of midstream \(additional_config=\{\"midstream\": \{\"sites\""


@pytest.mark.parametrize(
    ("plan", "path", "problem"),
    [
        (
            {"capture": Capture([0, 40])},
            "capture[0].layers[1]",
            r"layer 40 is out of range: the model has 30 layers, 0 to 29 \(or −30 to −1\)",
        ),
        ({"capture": [Capture(0), Capture(-31)]}, "capture[1].layers", "layer -31 is out of range"),
        ({"edits": Steer(V, 30)}, "edits[0].layer", "layer 30 is out of range"),
        (
            {"capture": Capture([0, 28, -2])},
            "capture[0].layers[2]",
            "layer -2 is layer 28 again, of 30",
        ),
        (
            {"edits": [Steer(V, 0), Steer([1.0] * 5, 0)]},
            "edits[1].vector",
            "expected 4 numbers, the model's hidden size, got 5",
        ),
        (
            {"capture": Capture([0, 3])},
            "capture[0].layers[1]",
            "resid_post at layer 3 is not tapped; add it to the settings " + HINT,
        ),
        (
            {"edits": Steer(V, 3)},
            "edits[0].layer",
            "resid_post at layer 3 is not tapped; .*" + HINT,
        ),
        (
            {"capture": Capture(0, ["resid_post", "resid_pre"])},
            "capture[0].sites[1]",
            "resid_pre at layer 0 is not tapped; .*" + HINT,
        ),
        (
            {"edits": Steer(V, 0, site="resid_pre")},
            "edits[0].site",
            "resid_pre at layer 0 is not tapped; .*" + HINT,
        ),
        (
            {"edits": Steer(V, 3, site="resid_mid")},
            "edits[0].layer",
            "resid_mid at layer 3 cannot be tapped: this model has no MLP norm",
        ),
        (
            {"capture": Capture("all", ["resid_post", "resid_pre"])},
            "capture[0].sites[1]",
            "resid_pre at any layer is not tapped; .*" + HINT,
        ),
        (
            {"capture": Capture("all", "resid_mid")},
            "capture[0].sites",
            "resid_mid cannot be tapped at any layer: this model has no MLP norm",
        ),
        ({"capture": [Capture(0), Capture(2, positions=[0, 99])]}, "capture[1].positions[1]", "99"),
        ({"edits": Steer(V, 0, positions=slice(50, 60))}, "edits[0].positions", "50:60 selects"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_its_path(plan, path, problem):
    with pytest.raises(SpecError, match=problem) as caught:
        _resolve(**plan, shape=TAPPED)
    assert caught.value.path == path


@pytest.mark.parametrize(
    ("lengths", "path"),
    [((0, 5), "prompt_len"), ((-1, None), "prompt_len"), ((10, 0), "max_tokens")],
)
def test_lengths_below_one_are_refused(lengths, path):
    with pytest.raises(SpecError, match="expected at least 1") as caught:
        _resolve(Capture(0), prompt_len=lengths[0], max_tokens=lengths[1])
    assert caught.value.path == path


def test_a_plan_of_very_many_separate_positions_is_refused():
    edits = [Steer(V, 0, positions=slice(None, None, 2), scale=n) for n in range(3)]
    assert _resolve(edits=edits[:2], prompt_len=60_000)
    with pytest.raises(SpecError, match="more than 65536 separate ranges") as caught:
        _resolve(edits=edits, prompt_len=60_000)
    assert caught.value.path == "edits[2].positions"
