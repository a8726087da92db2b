"""Probes with classes and attention probes: their forms, refusals and instructions."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import rounds
from support.refusals import refused
from support.score_rules import scores_by_definition
from unit.plan.strategies import numbers

from midstream import Probe
from midstream.errors import SpecError
from midstream.plan import (
    AttentionPool,
    Classes,
    Flag,
    Hidden,
    ModelShape,
    Plan,
    Prompt,
    Stop,
    Switch,
)
from midstream.plan.classifiers.mlp import MLP
from midstream.plan.resolve.resolve import resolve
from midstream.plan.scores.rule import NO_TOKENS
from midstream.runtime.protocol.acting_probes import ActingProbe, acting_probes
from midstream.runtime.protocol.codec import decode, encode

WIDTH = 3
V, W = [1.0, 2.0, 0.0], [0.0, 1.0, 0.5]
POOLS = st.sampled_from(["none", "max", "mean:8", "ema:0.25"])
BIASES = st.floats(-4, 4, width=32)


def matrices(least: int, most: int) -> st.SearchStrategy[list[list[float]]]:
    return st.lists(numbers(WIDTH), min_size=least, max_size=most)


@st.composite
def families(draw: st.DrawFn) -> Probe:
    kind = draw(st.sampled_from(["direction", "mlp", "classes", "softmax", "max"]))
    links, output = ["none", "sigmoid"], None
    fields = {}
    if kind == "classes":
        weights = draw(matrices(2, 5))
        named = draw(st.booleans())
        names = [f"c{index}" for index in range(len(weights))] if named else None
        fields["classes"] = Classes(weights, draw(numbers(len(weights))), names)
        output = draw(st.sampled_from([0, "c1"] if named else [0, 1]))
        links.append("softmax")
    elif kind == "direction":
        fields = {"direction": draw(numbers(WIDTH)), "bias": draw(BIASES)}
    elif kind == "mlp":
        fields = {"mlp": MLP([V, W], [0, 1], [1, 2]), "bias": draw(BIASES)}
    else:
        value = draw(matrices(1, 3))
        more = {}
        if kind == "softmax":
            more = {"query": value[::-1], "window": draw(st.sampled_from([None, 2, 64]))}
        fields = {"attention_pool": AttentionPool(value=value, kind=kind, **more)}
        fields["bias"] = draw(BIASES)
    if kind in ("classes", "softmax", "max") and draw(st.booleans()):
        activation = draw(st.sampled_from(["relu", "gelu", "tanh", "silu"]))
        rows = draw(matrices(WIDTH, WIDTH))  # as many units as h has numbers
        fields["hidden"] = Hidden(rows, draw(st.sampled_from([None, V])), activation)
    act = draw(st.sampled_from([None, Stop, Flag]))
    if act is not None:
        fields["act"] = act(above=0.5, output=output, pool=draw(POOLS))
    link, layer = draw(st.sampled_from(links)), draw(st.integers(-2, 3))
    return Probe(layer=layer, name="p", link=link, pool=draw(POOLS), **fields)


@given(families())
@settings(max_examples=rounds(suite=150, nightly=3000), deadline=None)
def test_a_probe_is_read_back_from_its_json_form_and_its_folder(probe):
    form = json.loads(json.dumps(probe.to_dict(), allow_nan=False))
    assert Probe.parse(form) == probe
    assert Plan.parse(Plan.make(probes=probe).to_json()).probes == (probe,)
    assert probe.replace(layer=0).replace(layer=probe.layers) == probe
    with tempfile.TemporaryDirectory() as folder:
        probe.to_folder(Path(folder))
        assert Probe.from_folder(Path(folder)) == probe
    assert probe.card().facts["Reads"] in ("direction", "mlp", "classes", "attention pool")


SHAPE = ModelShape(4, WIDTH, [("resid_post", layer) for layer in range(4)])


@given(families(), st.lists(numbers(WIDTH), min_size=1, max_size=6))
@settings(max_examples=rounds(suite=150, nightly=3000), deadline=None)
def test_its_columns_are_the_products_that_its_rule_is_of(probe, rows):
    other = Probe(V, 0, name="before")
    plan = resolve(Plan.make(probes=[other, probe]), SHAPE, Prompt(4), 4)
    resolved = plan.probes[1]
    assert (resolved.slots.start, resolved.slots.stop) == (1, plan.slots)
    h = np.array(rows)
    if probe.mlp is None:
        columns = [h @ step.read.numpy().astype("f8") + step.a
                   for step in resolved.steps.instructions]  # fmt: skip
        table = np.stack(columns, 1).astype(np.float32)
        _, scores = resolved.rule.follow(NO_TOKENS, table)
        expected = scores_by_definition(resolved.rule, table)
        np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5)
        if probe.classes is not None and probe.link == probe.pool == "none" and not probe.hidden:
            weights = np.stack([row.numpy() for row in probe.classes.weights]).astype("f8")
            np.testing.assert_allclose(
                scores, h @ weights.T + probe.classes.bias.numpy(), rtol=1e-5, atol=1e-4
            )
    for sent in acting_probes(plan):
        assert decode(ActingProbe, encode(sent), "probe") == sent
        assert sent.rule.outputs == 0
        assert range(sent.slot, sent.slot + sent.rule.columns) == resolved.slots


def test_a_malformed_field_is_refused_by_its_path():
    pool = {"query": [V, W], "value": [W, V]}
    classes = {"weights": [V, W], "bias": [1, 2], "names": ["a", "b"]}
    shared = {"layer": 1, "name": "p"}
    refused(
        lambda fields: Probe.parse({**shared, **fields}),
        ({}, "direction", "missing: give one of `direction`, `mlp`, `classes`"),
        ({"direction": V, "classes": classes}, "classes", "one probe for each"),
        ({"classes": [V, W]}, "classes", r"expected Classes\(…\), or its dict, got `list`"),
        ({"classes": {"weights": V}}, "classes.weights", "2 or more rows, got 1"),
        ({"classes": {"weights": [V] * 257}}, "classes.weights", "at most 256 rows, got 257"),
        ({"classes": {"weights": [V, [1.0]]}}, r"classes.weights[1]", "expected 3 numbers"),
        ({"classes": {**classes, "bias": [1]}}, "classes.bias", "2 numbers, one for each row"),
        ({"classes": {**classes, "names": ["a"]}}, "classes.names", "2 names, one for each"),
        ({"classes": {**classes, "names": ["a", "a"]}}, "classes.names[1]", "listed twice"),
        ({"classes": {**classes, "names": "ab"}}, "classes.names", "a list of names, got `str`"),
        ({"classes": {**classes, "names": ["a", "\ud800"]}}, "classes.names[1]", "printable"),
        ({"classes": {**classes, "names": ["a", "b" * 65]}}, "classes.names[1]", "1 to 64"),
        ({"classes": {**classes, "labels": []}}, "classes", "unknown field 'labels'"),
        ({"classes": classes, "bias": 1}, "bias", "each class has its own"),
        ({"classes": classes, "layer": [1, 2]}, "layer", "a probe with classes reads one layer"),
        ({"attention_pool": pool, "layer": "all"}, "layer", "an attention probe reads one layer"),
        ({"attention_pool": {"value": [V]}}, "attention_pool.query", 'missing; .*kind="max"'),
        ({"attention_pool": {**pool, "query": [V]}}, "attention_pool.query", r"expected \[2, 3\]"),
        ({"attention_pool": {**pool, "kind": "max"}}, "attention_pool.query", "omit `query`"),
        ({"attention_pool": {"value": [V], "kind": "max", "window": 3}}, "attention_pool.window",
         "omit `window`"),
        ({"attention_pool": {**pool, "kind": "mean"}}, "attention_pool.kind", "`softmax`, `max`"),
        ({"attention_pool": {**pool, "window": 1}}, "attention_pool.window", "2 to 64 tokens"),
        ({"attention_pool": {**pool, "window": 65}}, "attention_pool.window", "got 65"),
        ({"attention_pool": {"value": [V] * 129, "kind": "max"}}, "attention_pool.value",
         "at most 128 rows"),
        ({"direction": V, "hidden": {"weights": [V]}}, "hidden", "beside `classes` or"),
        ({"classes": classes, "hidden": {"weights": [V, W]}}, "classes.weights",
         "expected 2 numbers a row, one for each unit"),
        ({"attention_pool": pool, "hidden": {"weights": [V]}}, "attention_pool.value", "1 numbers"),
        ({"classes": classes, "hidden": {"weights": [V], "bias": V}}, "hidden.bias", "1 numbers"),
        ({"classes": classes, "hidden": {"weights": [V], "activation": "elu"}},
         "hidden.activation", "expected one of `relu`"),
        ({"classes": classes, "hidden": [V]}, "hidden", r"expected Hidden\(…\), or its dict"),
        ({"classes": classes, "hidden": {"weights": [V] * 257}}, "hidden.weights", "at most 256"),
        ({"direction": V, "link": "softmax"}, "link", "is of several outputs"),
        ({"direction": V, "link": "logit"}, "link", "expected one of `none`, `sigmoid`"),
        ({"direction": V, "pool": "min"}, "pool", 'expected "none", "max"'),
        ({"direction": V, "act": {"stop": {"above": 1, "output": 0}}}, "act.stop.output",
         "one output; omit"),
        ({"classes": classes, "act": {"flag": {"above": 1}}}, "act.flag.output", "missing"),
        ({"classes": classes, "act": {"stop": {"above": 1, "output": "c"}}}, "act.stop.output",
         "no class 'c'; there are `a`, `b`"),
        ({"classes": classes, "act": {"stop": {"above": 1, "output": 2}}}, "act.stop.output",
         "expected 0 to 1, got 2"),
        ({"classes": classes, "act": {"stop": {"above": 1, "output": True}}}, "act.stop.output",
         "the name or the index of a class, got `bool`"),
    )  # fmt: skip


def test_many_names_make_no_long_message():
    classes = Classes(np.eye(256), names=[f"{index:064}" for index in range(256)])
    with pytest.raises(SpecError, match="there are .*, …$") as caught:
        classes.index_of("x")
    assert len(str(caught.value)) < 1000


def test_a_switch_names_its_class_by_name_or_index():
    classes = Classes([V, W], names=["a", "b"])
    for output in ("b", 1, np.int64(1)):
        probe = Probe(classes=classes, layer=1, act=Switch([], above=0.5, output=output))
        plan = resolve(Plan.make(probes=probe), SHAPE, Prompt(4), 4)
        assert plan.probes[0].act_rule.output == 1
        assert plan.probes[0].outputs == ("a", "b")
