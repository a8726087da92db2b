"""Plans made concrete: taps, instructions and positions for one model and one prompt."""

from contextlib import nullcontext

import numpy as np
import pytest
from support.refusals import refused, refused_calls

from midstream.errors import SpecError
from midstream.ops.layout import Flags, Op
from midstream.plan import (
    Affine,
    Capture,
    Clamp,
    Gate,
    ModelShape,
    Plan,
    Probe,
    Prompt,
    Replace,
    Scale,
    Steer,
    Text,
    Where,
)
from midstream.plan.positions.text_map import TextMap
from midstream.plan.resolve.resolve import resolve

SITES = ("resid_pre", "resid_mid", "resid_post")
SHAPE = ModelShape(30, 4, [(site, layer) for site in SITES for layer in range(30)])
V = [1.0, 0.0, 0.0, 0.0]


def _resolve(
    capture=None,
    edits=None,
    probes=None,
    *,
    shape=SHAPE,
    prompt=10,
    max_tokens=5,
    before=(),
    also=(),
):
    prompt = Prompt(prompt) if isinstance(prompt, int) else prompt
    return resolve(Plan.make(capture, edits, probes), shape, prompt, max_tokens, before, also)


def test_taps_are_in_the_order_of_the_forward_pass():
    plan = _resolve(Capture([-1, 3], ["resid_post", "resid_pre"]))
    taps = [(site, layer) for layer in (3, 29) for site in ("resid_pre", "resid_post")]
    assert plan.captures[0].taps == tuple(taps)


def test_captures_of_every_request_come_after_its_own_and_count_from_their_end():
    plan = _resolve([Capture(1), Capture(2)], also=(Capture(3, sink="log"), Capture(4)))
    assert [(one.taps[0][1], one.source) for one in plan.captures] == [
        (1, 0), (2, 1), (3, -2), (4, -1),
    ]  # fmt: skip
    alone = _resolve(also=(Capture(3),))
    assert [one.source for one in alone.captures] == [-1]


def test_a_capture_of_every_request_that_selects_nothing_here_is_left_out():
    generated = Capture(3, positions="generated")
    plan = _resolve(Capture(1), also=(generated, Capture(4)), max_tokens=1)
    assert [one.source for one in plan.captures] == [0, -1]
    assert _resolve(also=(generated,), max_tokens=1).captures == ()


def test_an_edit_keeps_its_vector_scale_and_place():
    steer = Steer(V, 3, scale=-2.5, site="resid_mid", positions=[-1, slice(2, 4)])
    (edit,) = _resolve(edits=steer).edits
    (step,) = edit.steps.instructions
    assert (edit.site, edit.layer, edit.source) == ("resid_mid", 3, 0)
    assert (step.op, step.a, step.flags) == (Op.ADD, -2.5, Flags.COUNTED)
    assert step.write == (steer.vector,)
    assert edit.where == Where(((2, 4), (9, 10)))


def test_edits_keep_their_order_and_tell_which_of_the_plan_they_are():
    plan = _resolve(edits=[Steer(V, layer, scale=nth) for nth, layer in enumerate([5, 2, -2])])
    found = [(edit.layer, edit.steps.instructions[0].a, edit.source) for edit in plan.edits]
    assert found == [(5, 0, 0), (2, 1, 1), (28, 2, 2)]


def test_an_edit_of_several_layers_and_sites_is_one_at_each_tap_with_shared_instructions():
    plan = _resolve(edits=[Scale(2.0, 1), Steer(V, [7, 3], site=["resid_post", "resid_pre"])])
    taps = [(edit.site, edit.layer) for edit in plan.edits[1:]]
    assert taps == [("resid_pre", 3), ("resid_post", 3), ("resid_pre", 7), ("resid_post", 7)]
    assert {edit.source for edit in plan.edits[1:]} == {1}
    assert len({id(edit.steps) for edit in plan.edits[1:]}) == 1


def test_probes_have_a_slot_each_in_their_order():
    probes = [Probe(V, layer, bias=layer, name=f"p{layer}") for layer in (5, 3)]
    plan = _resolve(probes=probes)
    assert [(probe.name, probe.layer, probe.slot) for probe in plan.probes] == [
        ("p5", 5, 0),
        ("p3", 3, 1),
    ]
    (step,) = plan.probes[1].steps.instructions
    assert (step.op, step.a, step.read) == (Op.PROBE, 3.0, probes[1].direction)
    assert plan.slots == 2
    assert plan.edits == plan.captures == ()


def test_edits_of_every_request_come_first_and_are_counted_from_their_end():
    plan = _resolve(edits=Steer(V, 1), before=(Scale(2.0, 4), Steer(V, [5, 6])))
    assert [(edit.source, edit.layer) for edit in plan.edits] == [(-2, 4), (-1, 5), (-1, 6), (0, 1)]


def test_a_request_that_asks_for_nothing_has_the_edits_of_every_request():
    plan = resolve(None, SHAPE, Prompt(3), None, (Steer(V, 1),))
    assert [edit.source for edit in plan.edits] == [-1]
    assert plan.captures == plan.probes == ()
    empty = resolve(None, SHAPE, Prompt(3), None)
    assert empty.edits == empty.captures == empty.probes == ()


def test_an_edit_of_every_request_that_selects_nothing_of_this_one_is_left_out():
    text = Prompt(2, (1, 2), lambda: TextMap("a b", (0, 2), (1, 3)))
    for positions in (slice(50, 60), [40], Text("zebra")):
        plan = resolve(None, SHAPE, text, 5, (Steer(V, 1, positions=positions), Steer(V, 2)))
        assert [(edit.layer, edit.source) for edit in plan.edits] == [(2, -1)]
        with pytest.raises(SpecError):  # of its own it is refused
            _resolve(edits=Steer(V, 1, positions=positions), prompt=text)


def test_what_cannot_be_for_every_request_is_refused_by_its_place():
    refused_calls(
        (
            lambda: resolve(None, SHAPE, Prompt(3), 5, (Steer(V, 1), Steer(V, 77))),
            "steering[1].layer",
            "layer 77 is out of range",
        ),
        (lambda: _resolve(also=(Capture(30), Capture(3))), "sinks[-2].layers", "out of range"),
        (lambda: _resolve(Capture(0), max_tokens=0), "max_tokens", "expected at least 1, got 0"),
    )


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
HINT = r"LLM\(…, midstream=\{\"layers\": \[0, 2, 3, 4"


def test_what_the_engine_cannot_do_is_refused_by_its_path():
    size = "expected 4 numbers, the model's hidden size, got 5"
    refused(
        lambda capture: _resolve(capture, shape=TAPPED),
        (Capture([0, 40]), "capture[0].layers[1]", r"the model has 30 layers, expected 0 to 29"),
        ([Capture(0), Capture(-31)], "capture[1].layers", "layer -31 is out of range"),
        (Capture([0, 28, -2]), "capture[0].layers[2]", "layer -2 is the same as layer 28"),
        (Capture([0, 3]), "capture[0].layers[1]", "layer 3 is not tapped; .*" + HINT),
        (Capture(0, ["resid_post", "resid_pre"]), "capture[0].sites[1]", "at layer 0 is not"),
        (Capture("all", ["resid_post", "resid_pre"]), "capture[0].sites[1]", "at any layer is not"),
        (Capture("all", "resid_mid"), "capture[0].sites", "at any layer: this model has no MLP"),
        ([Capture(0), Capture(2, positions=[0, 99])], "capture[1].positions[1]", "99"),
    )
    refused(
        lambda edits: _resolve(edits=edits, shape=TAPPED),
        (Steer(V, 30), "edits[0].layer", "layer 30 is out of range"),
        ([Steer(V, 0), Steer([1.0] * 5, 0)], "edits[1].vector", size),
        (Steer(V, [0, 3]), "edits[0].layer[1]", "resid_post at layer 3 is not tapped"),
        (Steer(V, 3), "edits[0].layer", "resid_post at layer 3 is not tapped; .*" + HINT),
        (Steer(V, 0, site="resid_pre"), "edits[0].site", "resid_pre at layer 0 is not tapped"),
        (Steer(V, 3, site="resid_mid"), "edits[0].layer", "cannot be tapped: this model has no"),
        (Steer(V, 0, positions=slice(50, 60)), "edits[0].positions", "50:60 selects"),
    )
    refused(
        lambda probes: _resolve(probes=probes, shape=TAPPED),
        ([Probe(V, 0), Probe([1.0] * 5, 0, name="b")], "probes[1].direction", size),
        (Probe(V, 3), "probes[0].layer", "resid_post at layer 3 is not tapped"),
        (Probe(V, 0, positions=[0, 99]), "probes[0].positions[1]", "99"),
    )


def test_a_plan_of_very_many_separate_positions_is_refused():
    edits = [Steer(V, 0, positions=slice(None, None, 2), scale=n) for n in range(3)]
    assert _resolve(edits=edits[:2], prompt=60_000)
    with pytest.raises(SpecError, match="more than 65536 separate ranges") as caught:
        _resolve(edits=edits, prompt=60_000)
    assert caught.value.path == "edits[2].positions"


V = [0.0, 3.0, 0.0, 4.0]
MOST = 2.0**53


def test_an_edit_beyond_the_range_of_the_stream_is_rejected():
    for edit, path in (
        (Steer(V, 3, scale=MOST / 5 * 1.01), "edits[0].scale"),
        (Steer([3e38, 0, 0, 0], 3, scale=1e-22), "edits[0].scale"),
        (Steer(V, 3, scale=1e16, norm="match"), "edits[0].scale"),
        (Gate(Steer(V, 3, scale=-1e16), {"direction": V}), "edits[0]"),
        (Scale(1e16, 3), "edits[0]"),
        (Replace([V, [1e16] * 4], 3, positions=[0, 1]), "edits[0]"),
        (Affine(V, V, 3, bias=1e16), "edits[0]"),
        (Affine(matrix=np.full((4, 4), 1e16), layer=3), "edits[0]"),
        (Affine(matrix=np.eye(4), layer=3, bias=[0, 0, 0, 1e16]), "edits[0]"),
        (Affine(matrix=np.eye(4), layer=3, scale=1e16), "edits[0]"),
        (Clamp(V, 3, strength=1e17, low=0.0), "edits[0]"),
    ):
        with pytest.raises(SpecError, match="the limit for bfloat16 is 9.01e") as caught:
            resolve(Plan(edits=(edit,)), of_dtype(SHAPE, "bfloat16"), Prompt(5), None)
        assert caught.value.path == path, edit


def test_the_range_is_that_of_the_streams_dtype():
    for dtype, scale, fits in (
        ("float32", MOST / 5 * 0.999, True),
        ("float16", 6550.0, True),
        ("float16", 6551.0, False),
        ("bfloat16", 6551.0, True),
    ):
        plan = Plan(edits=(Steer(V, 3, scale=scale),))
        with nullcontext() if fits else pytest.raises(SpecError, match="for float16 is 3.28e"):
            resolve(plan, of_dtype(SHAPE, dtype), Prompt(5), None)


def of_dtype(shape, dtype):
    return ModelShape(shape.num_layers, shape.hidden_size, shape.taps, shape.reasons, dtype)


OF_HEADS = ModelShape(
    2,
    8,
    [(site, layer) for site in ("z", "k", "resid_post") for layer in range(2)],
    widths={("k", 0): 4, ("k", 1): 4},
    heads={("z", 0): 4, ("z", 1): 4, ("k", 0): 2, ("k", 1): 1},
)


def test_heads_that_a_site_lacks_are_refused_by_name():
    whole = _resolve(Capture("all", ["z", "k"]), shape=OF_HEADS)
    assert _resolve(Capture("all", ["z", "k"], heads=0), shape=OF_HEADS) == whole
    none, path = "of resid_post of layer 0 are not of heads", "capture[1].heads"
    refused(
        lambda capture: _resolve([Capture(0), capture], shape=OF_HEADS),
        (Capture("all", ["z", "resid_post"], heads=0), path, none),
        (Capture(0, "z", heads=4), path, "4 is out of range: there are 4 heads .* z of layer 0"),
        (
            Capture("all", "k", heads=1),
            path,
            "1 is out of range: there are 1 heads .* k of layer 1",
        ),
    )
