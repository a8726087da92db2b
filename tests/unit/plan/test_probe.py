from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from support.formulas import read_score, run
from support.refusals import refused
from unit.plan.strategies import numbers, probes

from midstream.errors import SpecError
from midstream.ops.layout import Flags, Op
from midstream.plan import Entropy, Mass, Named, Probe, Text

FULL = {
    "direction": {"f32": "AACAPwAAAEA="},
    "bias": 0.5,
    "name": "harm:a.b-1_",
    "layer": -1,
    "site": "mlp_out",
    "positions": ["last"],
    "phase": "all",
}


def test_a_dict_is_the_arguments_and_what_is_emitted_has_every_field():
    assert Probe.parse(FULL).to_dict() == FULL
    probe = Probe([1, 2], 3)
    assert (probe.bias, probe.name, probe.layers.indices) == (0.0, "probe", (3,))
    assert probe == Probe([1, 2], [3], 0, ["resid_post"], "probe")
    assert Probe.parse(probe) is probe


@given(probes())
def test_a_probe_survives_json(probe):
    assert Probe.parse(json.loads(json.dumps(probe.to_dict()))) == probe


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
        ({"op": "probe"}, "", "unknown field 'op'"),
        ({"direction": [None]}, "direction[0]", "got `None`"),
        ({"direction": Named("a", 2)}, "direction.scale", "expected 1, because only the direction"),
        ({"bias": True}, "bias", "got `bool`"),
        ({"layer": "all"}, "layer", 'expected layers, got "all"'),
        ({"layer": [1, 2]}, "direction", "expected one row per layer, .2, width., got one"),
        ({"layer": None}, "layer", "missing; it can be omitted only where"),
        ({"site": ["resid_pre", "resid_mid"]}, "site", "a probe reads one site, got 2"),
        ({"positions": "end"}, "positions", "got 'end'"),
        ({"name": ""}, "name", "expected 1 to 64 of the characters"),
        ({"name": "a" * 65}, "name", "expected 1 to 64 of the characters"),
        ({"name": "a b"}, "name", "expected 1 to 64 of the characters.*got 'a b'"),
        ({"name": "a\n"}, "name", "expected 1 to 64 of the characters"),
        ({"name": 3}, "name", "expected a name, `str`, got `int`"),
        ({"threshold": 3}, "", "unknown field 'threshold'; known: `direction`, `layer`"),
    )


READ = {
    "attention": {"mass": {"positions": [1], "phase": "all"}},
    "name": "m",
    "layer": 2,
    "head": [0, 3],
}


@pytest.mark.parametrize("reduce", [Mass(1), Mass(Text("x"), exclude=0), Entropy()])
@pytest.mark.parametrize("head", [None, 3, [0, 3]])
def test_a_probe_of_attention_survives_json_and_changes(reduce, head):
    one = Probe(attention=reduce, layer=-1, head=head, name="m", phase="generated")
    assert Probe.parse(json.loads(json.dumps(one.to_dict()))) == one
    assert one.replace(phase=None, positions="prompt").attention == reduce
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
        ({"attention": None}, "direction", "missing: give a direction, `mlp` or `attention`"),
        ({"direction": [1.0]}, "attention", "one probe for each"),
        ({"attention": "full"}, "attention", "one number for each head: Mass"),
        ({"attention": {"top_keys": 3}}, "attention", "Attention\\(…\\), given as `capture`"),
        ({"attention": {"mass": "promt"}}, "attention.mass.positions", "prompt"),
        ({"attention": 3}, "attention", "got `int`"),
        ({"layer": [1, 2]}, "layer", "a probe of attention reads one layer, got 2"),
        ({"layer": None}, "layer", "missing"),
        ({"site": "rot_q"}, "site", "reads a layer, not a site"),
        ({"bias": 1}, "bias", "omit `bias`"),
        ({"heads": 1}, "heads", "`head` is given too"),
        ({"head": "each"}, "head", "got `str`"),
    )


def test_a_direction_of_another_width_is_refused_when_lowered():
    with pytest.raises(SpecError, match="direction: expected 3 numbers, the model's hidden size"):
        Probe([1, 2], 0).instructions(3)


def test_a_name_of_numpy_becomes_a_plain_string():
    probe = Probe([1.0, 0.0], layer=0, name=np.array(["refusal", "x"])[0])
    assert type(probe.name) is str
