from support.refusals import refused

from midstream.ops.layout import Flags, Op
from midstream.plan import Gate, Mass, Named, Probe, Reading, Steer

STEER = Steer([1, 2], [3, 4], site="resid_mid", positions=[0, 1], phase="prompt")
FULL = {
    "op": "gate",
    "edit": STEER.to_dict(),
    "probe": {"direction": {"f32": "AACAPwAAAEA="}, "bias": 0.5, "layer": 1, "site": "resid_pre"},
    "threshold": 2.0,
    "sharpness": 3.0,
}


def test_a_gate_is_where_its_edit_is():
    gate = Gate(STEER, [1, 2])
    assert (gate.layers, gate.sites, gate.positions) == (STEER.layers, STEER.sites, STEER.positions)
    assert (gate.probe.tap, gate.threshold, gate.sharpness) == (None, 0.0, None)


def test_a_dict_is_the_arguments_and_what_is_emitted_has_every_field():
    gate = Gate.parse(FULL)
    assert gate.to_dict() == FULL
    assert gate.probe.tap == ("resid_pre", 1)
    own = Gate.parse({"edit": FULL["edit"], "probe": [1, 2]}).to_dict()
    assert own["probe"] == {"direction": {"f32": "AACAPwAAAEA="}, "bias": 0.0}
    assert (own["threshold"], own["sharpness"]) == (0.0, None)


def test_a_probe_can_be_given_in_any_form():
    reading = Reading([1, 2])
    for form in (reading, [1, 2], {"f32": "AACAPwAAAEA="}, {"direction": [1, 2]}):
        assert Gate(STEER, form).probe == reading
    for form in ("cruel", Named("cruel"), {"name": "cruel"}, {"direction": "cruel"}):
        assert Gate(STEER, form).probe.direction == Named("cruel")
    probe = Probe([1, 2], 3, bias=4, site="mlp_out", name="harm")
    assert Gate(STEER, probe).probe == Reading([1, 2], 4, 3, "mlp_out")
    assert Gate(STEER, Probe("harm")).probe == Reading("harm")


def test_a_gate_is_lowered_to_a_gate_and_its_edit():
    gate, step = Gate(STEER, Reading([3, 4], bias=0.5), 2, sharpness=3).instructions(2)
    assert (gate.op, gate.a, gate.b, gate.c, gate.slot) == (Op.GATE, 0.5, 2.0, 3.0, None)
    assert gate.flags == Flags.FRESH
    assert gate.read == Reading([3, 4]).direction
    (plain,) = STEER.instructions(2)
    assert step == plain.with_flags(Flags.GATED)
    (gate, *_) = Gate(STEER, [3, 4]).instructions(2)
    assert gate.flags == Flags.FRESH | Flags.STEP


def test_a_malformed_field_is_refused_by_its_path():
    refused(
        lambda change: Gate.parse({**FULL, **change}),
        ({"op": "steer"}, "op", "expected one of `gate`, got 'steer'"),
        ({"edit": FULL}, "edit", "a `gate` cannot contain another `gate`"),
        ({"edit": {"vector": [1], "layer": 0}}, "edit", "missing field `op`; known: `steer`"),
        ({"probe": None}, "probe.direction", "got `None`"),
        ({"probe": {}}, "probe", "missing field `direction`"),
        ({"probe": {"directions": [1]}}, "probe", "did you mean `direction`"),
        ({"probe": {"direction": [1], "layer": "all"}}, "probe.layer", "expected one or several"),
        ({"probe": {"direction": [1], "site": "resid_pre"}}, "probe.layer", "missing: `site`"),
        ({"probe": Named("a", 2.0)}, "probe.direction.scale", "expected 1, because only the dir"),
        (
            {"probe": Probe([1], 0, positions="last_row")},
            "probe.positions",
            "uses the edit's positions",
        ),
        ({"probe": Probe(attention=Mass(1), layer=0)}, "probe.attention", "cannot read attention"),
        ({"sharpness": 0}, "sharpness", "must not be 0"),
        ({"positions": "all"}, "", "unknown field 'positions'"),
    )
