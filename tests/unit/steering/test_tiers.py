"""The edits of a tier, in every form."""

import pytest
from support.refusals import refused

from midstream.plan import Probe, ProbeInfo, Reading, Steer
from midstream.plan.operations import Ablate, Bias, Gate
from midstream.plan.shape import ModelShape
from midstream.plan.vectors.named_vector import Named
from midstream.steering.edit_forms import (
    Part,
    bind_part,
    bind_tier,
    changed,
    read_hooks,
    read_reference,
    read_tier,
)

V, W = [1.0, 2.0], [3.0, -4.0]
GATE = Gate(Steer(V, 1), W, threshold=0.5)


def edits(value, phase=None):
    return [part.edit for part in read_tier(value, phase)]


FORMS = [
    (Steer(V, 1), [Steer(V, 1)]),
    (Steer(V, 1).to_dict(), [Steer(V, 1)]),
    ({"vector": V, "layer": 1}, [Steer(V, 1)]),
    ({"rows": [V, W], "layer": 1}, [Steer(rows=[V, W], layer=1)]),
    (Ablate(V, 1), [Ablate(V, 1)]),
    (GATE, [GATE]),
    ("happy", [Steer("happy")]),
    (Named("happy", 2.0), [Steer(Named("happy", 2.0))]),
    (("happy", 2), [Steer(Named("happy", 2.0))]),
    (["happy", 2], [Steer(Named("happy", 2.0))]),
    ({"name": "happy", "scale": 2}, [Steer(Named("happy", 2.0))]),
    ({"post_block": {15: {"vector": V, "scale": 2.0}}}, [Steer(V, 15, 2.0, "resid_post")]),
    ({15: V, 3: W}, [Steer(V, 15, site="resid_post"), Steer(W, 3, site="resid_post")]),
    ([], []),
    (
        ["happy", ("sad", -1), Steer(V, 1), {15: V}],
        [Steer("happy"), Steer(Named("sad", -1.0)), Steer(V, 1), Steer(V, 15, site="resid_post")],
    ),
    ((Steer(V, 1), "happy"), [Steer(V, 1), Steer("happy")]),
]


def test_every_form_is_read_and_a_tier_narrows_it_to_its_tokens_alone():
    for value, wanted in FORMS:
        assert edits(value) == wanted
        for phase in ("prompt", "generated"):
            found = edits(value, phase)
            assert [edit.positions.phase for edit in found] == [phase] * len(wanted), value
            assert [changed(edit, positions="all") for edit in found] == [
                changed(edit, positions="all") for edit in wanted
            ]


def test_positions_stay_within_the_phase():
    where = {"positions": slice(1, None), "exclude": "last_prompt"}
    narrowed = [Steer(V, 1, **where, phase="prompt")]
    assert edits(Steer(V, 1, **where), "prompt") == edits(narrowed[0], "prompt") == narrowed


def test_what_is_wrong_is_named_with_its_path():
    refused(
        lambda tier: read_tier(*tier),
        ((Steer(V, 1, phase="generated"), "prompt"), "phase", '"generated" contradicts'),
        ((Steer(V, 1, phase="prompt"), None), "phase", "every token; use `prompt`"),
        (
            (Gate(Steer(V, 1, phase="prompt"), W), "generated"),
            "phase",
            'contradicts the tier, which is for "generated" tokens',
        ),
        (
            (Steer(V, 1, positions="last_prompt"), "generated"),
            "positions[0]",
            "cannot select a token of phase",
        ),
        ((["a", Steer(V, 1, phase="generated")], "prompt"), "[1].phase", "contradicts"),
        ((3, None), "", "expected an edit, a Direction or a Probe, a registered name"),
        ((V, None), "[0]", "expected an edit, a Direction or a Probe, a registered name"),
        (({"vector": V}, None), "layer", "missing"),
        (({"op": "stear"}, None), "op", "did you mean `steer`"),
        (("a b", None), "", "A-Z a-z 0-9"),
        (({"post_blok": {1: V}}, None), '["post_blok"]', "did you mean `post_block`"),
        (([{"pre_attn": {1: [None]}}], None), '[0]["pre_attn"][1][0]', "numb"),
    )


def test_each_edit_knows_where_it_stood():
    found = read_tier(["a", {"post_block": {3: V, 4: V}}, {5: V}], None)
    assert [part.path for part in found] == [
        "[0]",
        '[1]["post_block"][3]',
        '[1]["post_block"][4]',
        "[2][5]",
    ]
    assert [part.path for part in read_hooks({5: V}, "prompt")] == ["[5]"]


def test_a_reference_is_read_in_every_form_and_nothing_else():
    for value in ("a", Named("a"), ("a", 1), {"name": "a"}, ["a", 1.0]):
        assert read_reference(value) == Named("a")
    others = (3, ("a", 1, 2), ("a", "b"), None, [], {"nam": "a"}, ("a", True))
    refused(read_reference, *((value, "") for value in others))


def test_rows_that_no_request_can_have_are_refused_when_a_tier_is_set():
    shape = ModelShape(4, 2, [("resid_post", layer) for layer in range(4)])

    def bind(edit):
        return list(bind_part(Part("", edit), lambda name: None, shape))

    rows = Steer(rows=[V, W], layer=1, positions=slice(0, 2), norm="keep")
    assert bind(rows) == [rows]
    refused(
        bind,
        (Steer(rows=[[1e36, 0.0], V], layer=1, positions=slice(0, 2)), "scale", ""),
        (Gate(rows, Reading(V, layer=3)), "probe.layer", ""),
        (rows.replace(layer=7), "layer", ""),
    )


def test_a_probe_of_a_model_of_other_dimensions_is_refused_when_a_tier_is_set():
    shape = ModelShape(4, 2, [("resid_post", layer) for layer in range(4)])
    probe = Probe(V, layer=1).with_info(ProbeInfo("org/small", 2, 4))

    def bind(value):
        return list(bind_tier(read_tier([value], "generated"), lambda name: None, shape))

    (bound,) = bind(probe)
    assert bound.info == probe.info
    refused(
        bind,
        (probe.with_info(ProbeInfo("org/small", 2, 9)), "[0]", r"small \(width 2, 9 layers"),
    )


@pytest.mark.parametrize("phase", ["prompt", "generated"])
def test_a_bias_without_positions_is_of_the_tokens_of_its_tier(phase):
    bias, narrow = Bias({5: 2.0}), Bias({5: 2.0}, phase=phase)
    assert edits(bias, phase) == edits(bias.to_dict(), phase) == [narrow]
    read = {"direction": W, "layer": 1}
    assert edits(Gate(bias, read), phase) == [Gate(narrow, read)]
