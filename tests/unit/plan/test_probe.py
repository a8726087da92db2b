import dataclasses

import numpy as np
from hypothesis import given
from support.formulas import read_score, run
from support.refusals import refused
from unit.plan.strategies import numbers, probes

from midstream.ops.layout import Flags, Op
from midstream.plan import Entropy, Mass, Named, Probe, Text

FULL = {
    "direction": {"f32": "AACAPwAAAEA="},
    "bias": 0.5,
    "name": "harm:a.b-1_",
    "layer": -1,
    "site": "mlp_out",
    "positions": ["last_row"],
    "phase": "all",
}


def test_a_dict_is_the_arguments_and_what_is_emitted_has_every_field():
    assert Probe.parse(FULL).to_dict() == FULL
    probe = Probe([1, 2], 3)
    assert (probe.bias, probe.name, probe.layers.indices) == (0.0, "probe", (3,))
    assert probe == Probe([1, 2], [3], 0, ["resid_post"], "probe")
    assert Probe.parse(probe) is probe
    assert type(Probe([1.0, 0.0], 0, name=np.str_("refusal")).name) is str


@given(probes(), numbers(3))
def test_its_instruction_computes_its_score_and_leaves_the_vector(probe, h):
    (step,) = probe.instructions(3)
    assert (step.op, step.flags, step.slot) == (Op.PROBE, Flags.FRESH | Flags.COUNTED, None)
    scores = {}
    h = np.array([h])
    assert (run([dataclasses.replace(step, slot=4)], h, scores) == h).all()
    assert np.allclose(scores[4], read_score(probe, h), rtol=1e-6, atol=1e-4)


def test_a_malformed_field_is_refused_by_its_path():
    refused(
        lambda change: Probe.parse({**FULL, **change}),
        ({"direction": Named("a", 2)}, "direction.scale", "expected 1, because only the direction"),
        ({"layer": "all"}, "layer", 'expected layers, got "all"'),
        ({"layer": [1, 2]}, "direction", "expected one row per layer, .2, width., got one"),
        ({"layer": None}, "layer", "missing; it can be omitted only where"),
        ({"site": ["resid_pre", "resid_mid"]}, "site", "a probe reads one site, got 2"),
        ({"name": ""}, "name", "expected 1 to 64 of the characters"),
        ({"name": "a" * 65}, "name", "expected 1 to 64 of the characters"),
        ({"name": "a\n"}, "name", "expected 1 to 64 of the characters"),
        ({"threshold": 3}, "", "unknown field 'threshold'; known: `direction`, `layer`"),
    )


READ = {
    "attention": {"mass": {"positions": [1], "phase": "all"}},
    "name": "m",
    "layer": 2,
    "head": [0, 3],
}


def test_a_probe_of_attention_selects_what_it_reads():
    for reduce in (Mass(1), Mass(Text("x"), exclude=0), Entropy()):
        one = Probe(attention=reduce, layer=-1, head=[0, 3], name="m", phase="generated")
        assert one.bind(lambda name: {}) == (one,)
        assert one.is_bound
        keys = () if reduce == Entropy() else (reduce.positions,)
        assert one.selections == (one.positions, *keys)


def test_forms_of_a_probe_of_attention():
    one = Probe.parse(READ)
    assert one.to_dict() == {**READ, "positions": ["all"], "phase": "all"}
    assert one == Probe(attention=Mass(1), layer=2, heads=[3, 0], name="m")
    assert Probe(attention={"mass": [1]}, layer=2, heads="all").heads == ()
    assert Probe(attention="entropy", layer=2) == Probe(attention=Entropy(), layer=[2])


def test_a_malformed_probe_of_attention_is_refused_by_its_path():
    refused(
        lambda change: Probe.parse({**READ, **change}),
        ({"attention": None}, "direction", "missing: give one of `direction`, `mlp`"),
        ({"direction": [1.0]}, "attention", "one probe for each"),
        ({"attention": "full"}, "attention", "one number for each head: Mass"),
        ({"attention": {"top_keys": 3}}, "attention", "Attention\\(…\\), given as `capture`"),
        ({"attention": {"mass": "promt"}}, "attention.mass.positions", "prompt"),
        ({"layer": [1, 2]}, "layer", "a probe of attention reads one layer, got 2"),
        ({"layer": None}, "layer", "missing"),
        ({"site": "rot_q"}, "site", "reads a layer, not a site"),
        ({"bias": 1}, "bias", "omit `bias`"),
        ({"heads": 1}, "heads", "`head` is given too"),
    )
