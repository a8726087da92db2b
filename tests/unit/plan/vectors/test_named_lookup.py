"""Names of registered vectors, and what they stand for."""

import pytest
from hypothesis import given
from support.refusals import refused
from unit.plan.strategies import named_edits

from midstream.errors import SpecError
from midstream.plan import (
    Ablate,
    Clamp,
    Gate,
    Layers,
    Named,
    Plan,
    Probe,
    Reading,
    Replace,
    Scale,
    Sites,
    Steer,
    Vector,
)

V3, V5, V7, M5, ANY = (Vector.parse([1.0, float(nth)]) for nth in range(5))
REGISTERED = {
    "happy": {("resid_post", 5): V5, ("resid_post", 3): V3, ("resid_mid", 5): M5},
    "sad": {("resid_post", 7): V7},
    "low": {("resid_post", 3): V3, ("resid_post", 5): V5},
    "any": {None: ANY},
    "zero": {("resid_post", 7): Vector.parse([0.0, 0.0])},
}


def lookup(name):
    if name not in REGISTERED:
        raise SpecError("", f"no vector is registered as `{name}`")
    return REGISTERED[name]


def places(edits):
    return [(*edit.layers.indices, *edit.sites.names) for edit in edits]


def test_a_name_has_three_forms():
    for form in ("happy", Named("happy"), {"name": "happy"}, {"name": "happy", "scale": 1}):
        assert Steer(form).vector == Named("happy")
    assert Steer({"name": "happy", "scale": 2}).vector == Named("happy", 2.0)
    assert Named.parse(Named("a", 2).emit()) == Named("a", 2)
    names = ("", "a b", ".a", "/a", "é", "a" * 129, "a\n", 3, None)
    refused(Named, *((name, "^name: expected ") for name in names))


def test_a_steer_without_a_layer_is_one_for_each_tap_of_the_name():
    bound = Steer("happy", scale=2, positions=[1], norm="keep").bind(lookup)
    assert places(bound) == [(3, "resid_post"), (5, "resid_mid"), (5, "resid_post")]
    assert [edit.vector for edit in bound] == [V3, M5, V5]
    assert {(edit.scale, edit.norm, edit.positions.include) for edit in bound} == {
        (2.0, "keep", (1,))
    }
    assert all(edit.names() == () and edit.left == () for edit in bound)


def test_what_is_given_of_the_place_is_kept_to():
    for place, expected in (
        ({"layer": 5}, [(5, "resid_mid"), (5, "resid_post")]),
        ({"layer": [5, 3], "site": "resid_post"}, [(3, "resid_post"), (5, "resid_post")]),
        ({"site": "resid_mid"}, [(5, "resid_mid")]),
        (
            {"site": ["resid_mid", "resid_post"]},
            [(3, "resid_post"), (5, "resid_mid")] + [(5, "resid_post")],
        ),
        ({"layer": -3}, [(5, "resid_mid"), (5, "resid_post")]),
    ):
        assert places(Steer("happy", **place).bind(lookup, num_layers=8)) == expected, place


def test_a_vector_without_a_tap_is_used_where_the_edit_is_and_scales_multiply():
    for edit, wanted in (
        (Steer("any", [1, 2], site="resid_pre"), Steer(ANY, [1, 2], site="resid_pre")),
        (Steer("any", "all"), Steer(ANY, "all")),
        (Steer(Named("sad", 3), scale=-2), Steer(V7, 7, scale=-6)),
        *((edit, edit) for edit in (Steer([1], 0), Scale(2, "all"), Gate(Steer([1], 0), [1]))),
    ):
        assert edit.bind(lookup) == (wanted,)


def test_a_replaced_row_can_be_a_name():
    bound = Replace("happy", alpha=0.5, positions="prompt", norm="keep").bind(lookup)
    assert places(bound) == [(3, "resid_post"), (5, "resid_mid"), (5, "resid_post")]
    assert [edit.rows for edit in bound] == [(V3,), (M5,), (V5,)]
    assert {(edit.alpha, edit.norm, edit.positions.include) for edit in bound} == {
        (0.5, "keep", ("prompt",))
    }
    rows = Replace([[9, 9], "any", "low"], 5, positions=range(3)).bind(lookup)[0].rows
    assert rows == (Vector.parse([9, 9]), ANY, V5)
    (gated,) = Gate(Replace("sad", dims=1), "any").bind(lookup)
    assert gated.edit == Replace(V7, 7, site="resid_post", dims=1)


def test_directions_can_be_names_beside_vectors():
    bound = Ablate(["low", [1.0, 9.0]], strength=0.5).bind(lookup)
    assert bound == (Ablate([V3, [1.0, 9.0]], 3, 0.5), Ablate([V5, [1.0, 9.0]], 5, 0.5))
    assert Clamp("sad", low=1).bind(lookup) == (Clamp(V7, 7, low=1),)
    assert Ablate(["any", "sad"]).bind(lookup) == (Ablate([ANY, V7], 7),)
    assert Ablate(["any", "sad"]).names() == ("any", "sad")


def test_a_gates_direction_is_read_where_it_is_registered():
    edit = Steer(V3, [4, 6])
    (one,) = Gate(edit, "sad", 2).bind(lookup)
    assert one == Gate(edit, Reading(V7, 0, 7, "resid_post"), 2)
    (given,) = Gate(edit, Reading("low", 1, 3)).bind(lookup)
    assert given == Gate(edit, Reading(V3, 1, 3))
    (plain,) = Gate(edit, "any").bind(lookup)
    assert plain == Gate(edit, ANY)
    # Registered for several taps: with each edit, its own.
    each = Gate(Steer(ANY, [3, -3]), "low").bind(lookup, 8)
    assert each == (Gate(Steer(ANY, 3), V3), Gate(Steer(ANY, 5), V5))
    both = Gate(Steer("low"), "low", sharpness=2).bind(lookup)
    assert both == (Gate(Steer(V3, 3), V3, sharpness=2), Gate(Steer(V5, 5), V5, sharpness=2))


def test_a_probe_by_name_is_at_the_one_tap_of_the_name():
    assert Probe("sad", name="s").bind(lookup) == (Probe(V7, 7, name="s"),)
    assert Probe("happy", 5, site="resid_mid").bind(lookup) == (Probe(M5, 5, site="resid_mid"),)
    assert Probe("happy", 3).bind(lookup) == (Probe(V3, 3),)


def test_what_a_name_does_not_have_is_refused_by_name():
    refused(
        lambda edit: edit.bind(lookup),
        (Replace("nobody"), "", "no vector is registered as `nobody`"),
        (Steer("any"), "layer", "missing: `any` is registered without layers"),
        (Steer("happy", 4), "layer", "`happy` has no vector for layer 4; it has resid_post at lay"),
        (Steer("happy", [3, 5], site="resid_mid"), "layer", "no vector for resid_mid at layer 3"),
        (Steer("happy", site="mlp_out"), "site", "`happy` has no vector for the site mlp_out"),
        (Steer("happy", -3), "layer", "no vector for layer -3"),
        (Ablate(["low", "sad"]), "layer", "`low` has no vector for .* at layer 7, where `sad`"),
        (Clamp("zero", value=1), "direction", "the vector is zero"),
        (Ablate("zero"), "directions[0]", "the row is zero"),
        (Steer(Named("sad", 1e30), scale=1e30), "scale", "overflows float32"),
        (Gate(Steer("happy", 4), "sad"), "edit.layer", "`happy` has no vector for layer 4"),
        (Gate(Steer(V3, 4), "low"), "probe.layer", "`low` has no vector for resid_post at layer 4"),
        (Gate(Steer(V3, "all"), "low"), "probe.layer", "missing: `low` is registered for several"),
        (Gate(Steer(V3, 4), Reading("sad", layer=3)), "probe.layer", "for resid_post at layer 3"),
        (Gate(Steer(V3, 4), "nobody"), "probe.direction", "no vector is registered"),
        (Probe("happy"), "layer", "`happy` is registered for 3 taps, of which"),
    )


def test_a_long_list_of_taps_is_cut_short():
    taps = {("resid_post", layer): V3 for layer in range(40)}
    with pytest.raises(SpecError, match="resid_post at layer 7 and 32 more") as caught:
        Steer("many", 50).bind(lambda _: taps)
    assert len(str(caught.value)) < 500


@given(named_edits())
def test_what_is_still_a_name_cannot_be_lowered(edit):
    assert edit.names()
    with pytest.raises(SpecError, match="the vector `.*` is not registered"):
        edit.instructions(3)


def test_a_plan_is_bound_as_a_whole():
    plan = Plan.make(
        None,
        [Steer("low", scale=2), Scale(2, 0), Gate(Steer("sad"), "any")],
        [Probe("sad", name="a"), Probe([1, 2], 0)],
    )
    assert plan.names() == ("low", "sad", "any")
    bound = plan.bind(lookup)
    assert bound.edits == (Steer(V3, 3, 2), Steer(V5, 5, 2), Scale(2, 0), Gate(Steer(V7, 7), ANY))
    assert bound.probes == (Probe(V7, 7, name="a"), Probe([1, 2], 0))
    assert bound.origins == (0, 0, 1, 2)
    assert bound.names() == ()
    assert bound.bind(lookup) is bound
    plain = Plan.make(edits=Scale(2, 0))
    assert plain.bind(lookup) is plain


def test_a_plans_errors_lead_to_the_edit_as_it_was_written():
    refused(
        lambda plan: plan.bind(lookup),
        (Plan.make(None, [Steer("low"), Steer("happy", 4)], Probe("happy")), "edits[1].layer", ""),
        (Plan.make(None, Steer("low"), Probe("happy")), "probes[0].layer", ""),
    )


def test_what_was_left_out_is_left_out_of_the_json_form():
    assert set(Steer("happy", 3).to_dict()) >= {"layer"}
    assert "site" not in Steer("happy", 3).to_dict()
    assert "layer" not in Steer("happy", site="resid_post").to_dict()
    assert Steer("happy").layers == Layers("all")
    assert Steer("happy", site="resid_post") != Steer("happy")
    assert Steer("happy", 3, site="resid_pre").sites == Sites("resid_pre")
