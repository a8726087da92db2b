"""The edits of a tier, in every form."""

from __future__ import annotations

import pytest

from midstream.errors import SpecError
from midstream.plan import Reading, Steer
from midstream.plan.operations import Ablate, Gate
from midstream.plan.shape import ModelShape
from midstream.plan.vectors.named_vector import Named
from midstream.steering.edit_forms import (
    Part,
    bind_part,
    changed,
    read_hooks,
    read_reference,
    read_tier,
)

V, W = [1.0, 2.0], [3.0, -4.0]
GATE = Gate(Steer(V, 1), W, threshold=0.5)


def edits(value, phase=None):
    return [part.edit for part in read_tier(value, phase)]


FORMS = {
    "an edit": (Steer(V, 1), [Steer(V, 1)]),
    "its dict": (Steer(V, 1).to_dict(), [Steer(V, 1)]),
    "a dict that need not say that it steers": ({"vector": V, "layer": 1}, [Steer(V, 1)]),
    "one with a row per position": (
        {"rows": [V, W], "layer": 1},
        [Steer(rows=[V, W], layer=1)],
    ),
    "another edit": (Ablate(V, 1), [Ablate(V, 1)]),
    "a gate": (GATE, [GATE]),
    "a name": ("happy", [Steer("happy")]),
    "a Named": (Named("happy", 2.0), [Steer(Named("happy", 2.0))]),
    "a name and a scale": (("happy", 2), [Steer(Named("happy", 2.0))]),
    "the same in JSON": (["happy", 2], [Steer(Named("happy", 2.0))]),
    "a dict with a name": ({"name": "happy", "scale": 2}, [Steer(Named("happy", 2.0))]),
    "hook points": (
        {"post_block": {15: {"vector": V, "scale": 2.0}}},
        [Steer(V, 15, 2.0, "resid_post")],
    ),
    "layers": ({15: V, 3: W}, [Steer(V, 15, site="resid_post"), Steer(W, 3, site="resid_post")]),
    "nothing": ([], []),
    "a list": (
        ["happy", ("sad", -1), Steer(V, 1), {15: V}],
        [
            Steer("happy"),
            Steer(Named("sad", -1.0)),
            Steer(V, 1),
            Steer(V, 15, site="resid_post"),
        ],
    ),
    "a tuple": ((Steer(V, 1), "happy"), [Steer(V, 1), Steer("happy")]),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_read(name):
    value, wanted = FORMS[name]
    assert edits(value) == wanted


@pytest.mark.parametrize("phase", ["prompt", "generated"])
@pytest.mark.parametrize("name", FORMS)
def test_a_tier_narrows_every_form_to_its_tokens_and_changes_nothing_else(name, phase):
    value, wanted = FORMS[name]
    found = edits(value, phase)
    assert [edit.positions.phase for edit in found] == [phase] * len(wanted)
    assert [changed(edit, positions="all") for edit in found] == [
        changed(edit, positions="all") for edit in wanted
    ]


def test_positions_stay_within_the_phase():
    (edit,) = edits(Steer(V, 1, positions=slice(1, None), exclude="last_prompt"), "prompt")
    assert edit == Steer(V, 1, positions=slice(1, None), exclude="last_prompt", phase="prompt")


def test_a_phase_of_its_own_may_be_the_tiers():
    edit = Steer(V, 1, phase="prompt")
    assert edits(edit, "prompt") == [edit]


WRONG = {
    "another phase": (Steer(V, 1, phase="generated"), "prompt", "phase", '"generated" contradicts'),
    "a phase in base": (Steer(V, 1, phase="prompt"), None, "phase", "every token; use `prompt`"),
    "a gate's phase": (
        Gate(Steer(V, 1, phase="prompt"), W),
        "generated",
        "phase",
        'contradicts the tier, which is for "generated" tokens',
    ),
    "positions of the other phase": (
        Steer(V, 1, positions="last_prompt"),
        "generated",
        "positions[0]",
        "cannot select a token of phase",
    ),
    "in a list": (["a", Steer(V, 1, phase="generated")], "prompt", "[1].phase", "contradicts"),
    "a number": (3, None, "", "expected an edit or a Probe, a registered name"),
    "a list of numbers": (V, None, "[0]", "expected an edit or a Probe, a registered name"),
    "a vector without a layer": ({"vector": V}, None, "layer", "missing"),
    "an unknown op": ({"op": "stear"}, None, "op", "did you mean `steer`"),
    "a name that cannot be": ("a b", None, "", "A-Z a-z 0-9"),
    "a hook point": ({"post_blok": {1: V}}, None, '["post_blok"]', "did you mean `post_block`"),
    "a vector deep in a list": ([{"pre_attn": {1: [None]}}], None, '[0]["pre_attn"][1][0]', "numb"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named_with_its_path(name):
    value, phase, path, problem = WRONG[name]
    with pytest.raises(SpecError, match=problem) as caught:
        read_tier(value, phase)
    assert caught.value.path == path


def test_each_edit_knows_where_it_stood():
    found = read_tier(["a", {"post_block": {3: V, 4: V}}, {5: V}], None)
    assert [part.path for part in found] == [
        "[0]",
        '[1]["post_block"][3]',
        '[1]["post_block"][4]',
        "[2][5]",
    ]
    assert [part.path for part in read_hooks({5: V}, "prompt")] == ["[5]"]


@pytest.mark.parametrize("value", ["a", Named("a"), ("a", 1), {"name": "a"}, ["a", 1.0]])
def test_a_reference_is_read_in_every_form(value):
    assert read_reference(value) == Named("a")


@pytest.mark.parametrize("value", [3, ("a", 1, 2), ("a", "b"), None, [], {"nam": "a"}, ("a", True)])
def test_what_is_no_reference_is_refused(value):
    with pytest.raises(SpecError):
        read_reference(value)


def test_rows_that_no_request_can_have_are_refused_when_a_tier_is_set():
    for edit, path in (
        (Steer(rows=[[1e36, 0.0], V], layer=1, positions=slice(0, 2)), "scale"),
        (
            Gate(Steer(rows=[V, W], layer=1, positions=slice(0, 2)), Reading(V, layer=3)),
            "probe.layer",
        ),
        (Steer(rows=[V, W], layer=7, positions=slice(0, 2)), "layer"),
    ):
        shape = ModelShape(4, 2, [("resid_post", layer) for layer in range(4)])
        with pytest.raises(SpecError) as caught:
            list(bind_part(Part("", edit), lambda name: None, shape))
        assert caught.value.path == path, edit


def test_rows_that_fit_some_requests_are_set():
    shape = ModelShape(4, 2, [("resid_post", layer) for layer in range(4)])
    edit = Steer(rows=[V, W], layer=1, positions=slice(0, 2), norm="keep")
    assert list(bind_part(Part("", edit), lambda name: None, shape)) == [edit]
