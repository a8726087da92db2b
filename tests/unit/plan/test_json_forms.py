"""Every value that a request is made of is its dict, its text and, resolved, its bytes."""

import copy
import json
import pickle
import re

import pytest
from support.hostile import POISON
from support.readings import finished_plan

from midstream import (
    Ablate,
    Affine,
    Attention,
    Bias,
    Capture,
    Clamp,
    Feature,
    Features,
    Gate,
    Lens,
    Logits,
    LoReFT,
    Norms,
    Probe,
    Reconstruct,
    Replace,
    Route,
    Scale,
    Steer,
    Text,
    TokenIds,
)
from midstream.errors import SpecError
from midstream.plan import (
    AttentionPool,
    CapturedRows,
    Classes,
    Entropy,
    Flag,
    Hidden,
    Mass,
    ModelShape,
    Plan,
    Positions,
    Reading,
    Stop,
    TopKeys,
)
from midstream.plan.operations import parse_edit
from midstream.plan.readouts import parse_readout
from midstream.plan.readouts.capture import REDUCTIONS
from midstream.plan.resolve.wire import from_bytes, to_bytes

V, W = [1.0, 2.0, 3.0, 0.0], [0.0, 1.0, 0.0, 0.5]
STORED = {"sink": "npz", "tag": "a", "request_id": "r_1", "metadata": {"b": [1, None, "ü"]}}
TAPS = [(site, layer) for layer in range(3) for site in ("resid_pre", "resid_post", "rot_q", "z")]
HEADS = {tap: 2 for tap in TAPS if tap[0] in ("rot_q", "z")}
SHAPE = ModelShape(3, 4, [*TAPS, ("final_norm", 2)], heads=HEADS)

READOUTS = [
    Capture([0, -1], ["resid_post", "z"], ["all", 3], phase="prompt"),
    Capture(0, positions="prompt", exclude=[0, -1], max_rows=5),
    Capture(0, **STORED, layout="packed"),
    Capture(0, stream=True),
    Capture(0, return_="sharded"),
    Capture([1], "z", heads=[1, 0]),
    *(Capture([0, -1], "resid_pre", "prompt", reduce=kind) for kind in REDUCTIONS),
    Attention(1, reduce=TopKeys(3)),
    Attention([0, -2], [1, 0], [3, "last_prompt"], reduce="full", name="some"),
    Attention("all", "all", "generated", reduce=Entropy(), stream=True),
    Attention(1, 0, slice(1, 3), reduce=Mass([0, slice(4, 7)], exclude=5)),
    Attention(0, queries=2, reduce="scores"),
    Attention(layer=0, queries="prompt", exclude=0, reduce=Mass(Positions("prompt"))),
    Attention(1, 0, reduce=TopKeys(2), **STORED, layout="packed"),
    Norms("all"),
    Norms([0, -1], ["resid_post", "z"], "last_prompt", stream=True),
    Norms(sites="final_norm"),
    Norms(1, **STORED, layout="packed"),
    Lens(),
    Logits(3),
    Logits(tokens=[7, 8, 9, 1]),
    Logits(tokens="all", positions="last_prompt"),
    Logits(1, positions=[0, 2], phase="prompt", exclude="last_prompt"),
]
# With names, or sites, that the model does not have.
NAMED = [
    Lens([0, -1], 3, [9, 2, " Paris"], "last_prompt"),
    Lens(2, 0, 7, [0, 2], "prompt", "last_prompt", site="resid_mid", name="a", stream=True),
    Logits(tokens=[" b", 7, "all", " a"], phase="prompt"),
    Features("a"),
    Features("a", 0, features=[3, 1], stream=True),
    Features("a", 5, [3, 5], "prompt", layer=-1, site="mlp_in", name="b"),
]
EDITS = [
    Steer(token=" Paris", layer=[3, 4], scale=2),
    Steer({1: V, 3: W}, scale=2.0, phase="prompt"),
    Steer(rows=[V, W], layer=1, positions=[0, 4], norm="keep"),
    Ablate({1: V, 3: W}),
    Ablate([V, W], "all", subspace=True),
    Ablate(V, 1, site="z", head=[2, 0], norm="keep"),
    Clamp(V, 1, low=-0.5, head=1, site="z"),
    Affine(matrix=[[1, 2], [3, 4]], layer=0, bias=[1, 2]),
    Affine([V], [W], 0, bias=[0.5], site="z", head=1),
    LoReFT([[1, 0]], [[2, 3]], 0.5, 0, site="z", head=[1, 2]),
    Feature(sae="a", index={33: 0.0, 7: 8.0}),
    Feature(V, W, 0, value=2.0, head=1, site="z"),
    Reconstruct("a", {33: 0.0, 7: 8.0}, error=True, positions=[1]),
    Reconstruct("a", layer=3, site="mlp_out", norm="keep"),
    Replace({"captured": "Yt3-2Wc0mUAF", "positions": [3, 0]}, layer=1),
    Replace(CapturedRows("Yt3-2Wc0mUAF"), layer="all"),
    Steer(rows=CapturedRows("Yt3-2Wc0mUAF", [3, 1], 12, "resid_mid"), layer=1, norm="match"),
    Replace(V, 0, dims=(1, 3)),
    Scale(2, 0, dims=[4, 1]),
    Scale(V, 0, shift=W, head=[2, 0], site="z"),
    Bias({7: 2, 3: -1}),
    Bias({7: 2.0}, TokenIds([4])),
    Route([7], [5, 1], {7: 2.0, 3: -1}, layers=3, positions="prompt"),
    Gate(Bias({7: 2}), Reading(V, site="final_norm")),
    Gate(Steer(V, 1), V, 1.0, hold=16, release=0.5),
    Gate(Steer(V, 1), V, sharpness=2.0, smooth=0.25),
    Gate(Scale(0, 1, site="z", head=1), Reading(V, layer=0, site="z", head=2)),
]
CLASSES = Classes([V, W, V], [1, 2, 3], ["a", "b", "c d"])
PROBES = [
    Probe([V, W], [1, 3], bias=0.5, name="a"),
    Probe(V, 1, site="z", head=2),
    Probe(V, 1, link="sigmoid", pool="ema:0.9", act=Flag(above=0.5)),
    Probe(classes=CLASSES, layer=1, link="softmax", pool="mean:8"),
    Probe(classes=CLASSES, layer=1, act=Stop(above=0.9, output="b")),
    Probe(classes=Classes([V, W], [1, 2]), layer=1, act=Flag(above=0.9, output=1)),
    Probe(attention_pool=AttentionPool(query=[V, W], value=[W, V]), layer=-1, bias=0.5),
    Probe(attention_pool=AttentionPool(query=V, value=W, window=10), layer=0, pool="max"),
    Probe(
        hidden=Hidden([V, W, V, W], V, "gelu"),
        layer=0,
        attention_pool=AttentionPool(query=V, value=W),
    ),
    Probe(attention_pool=AttentionPool(value=[V, W], kind="max"), layer=0, link="sigmoid"),
    *(
        Probe(attention=reduce, layer=-1, head=head, name="m", phase="generated")
        for reduce in (Mass(1), Mass(Text("x"), exclude=0), Entropy())
        for head in (None, 3, [0, 3])
    ),
]


KINDS = (
    ("capture", parse_readout, READOUTS + NAMED),
    ("edits", parse_edit, EDITS),
    ("probes", Probe.parse, PROBES),
)
WRONG = {bool: [1, "yes"], int: [True, "x", [], {}], str: [True, 1.5, [3.5], {}]}
WRONG |= {float: WRONG[int], list: [True, {}, [True]], dict: [True, "no such name!"]}


def test_a_value_is_its_dict_its_text_and_its_pickle():
    for part, parse, values in KINDS:
        for value in values:
            text = json.dumps(value.to_dict(), allow_nan=False)
            again = parse(json.loads(text))
            assert again == value == type(value).parse(value), value
            assert hash(again) == hash(value), value
            assert json.dumps(again.to_dict()) == text, value
            plan = Plan.make(**{part: value})
            assert Plan.parse(plan.to_json()) == plan == pickle.loads(pickle.dumps(plan)), value
            assert copy.deepcopy(plan) == plan, value


def test_a_value_of_another_type_is_refused_at_its_field():
    for _, parse, values in KINDS:
        for form in (value.to_dict() for value in values):
            for name in form.keys() - {"metadata"}:
                for wrong in (*POISON, *WRONG.get(type(form[name]), ())):
                    with pytest.raises(SpecError) as caught:
                        parse({**form, name: wrong})
                    field = re.split(r"[.\[]", caught.value.path)[0]
                    # A reduction that is none tells no capture from attention.
                    assert field in (name, f"{name}s") or name == "reduce", (form, name, wrong)
                    assert len(str(caught.value)) < 1000


def test_a_changed_value_has_all_else_as_it_was():
    for value in EDITS + PROBES:
        if isinstance(value, Gate):
            continue
        changed = value.replace(positions="prompt", exclude=None, phase=None)
        assert changed.to_dict() == {
            **{name: field for name, field in value.to_dict().items() if name != "exclude"},
            "positions": ["prompt"],
            "phase": "all",
        }, value


def test_a_resolved_plan_is_its_bytes():
    for value in READOUTS:
        resolved = finished_plan(Plan.make(value), SHAPE)
        assert from_bytes(to_bytes(resolved)) == resolved, value
    for probe in [probe for probe in PROBES if probe.classes or probe.attention_pool]:
        resolved = finished_plan(Plan.make(probes=probe), SHAPE)
        assert from_bytes(to_bytes(resolved)) == resolved, probe
