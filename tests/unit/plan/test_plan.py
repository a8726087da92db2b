import copy
import json
import pickle
import re

from hypothesis import given, settings
from hypothesis import strategies as st
from support.refusals import refused, refused_calls
from unit.plan.strategies import json_values, plans, reads_or_refuses, spoilt

from midstream.plan import Bias, Capture, Flag, Gate, Plan, Probe, Scale, Steer, Stop, Switch
from midstream.plan.operations import KINDS_BY_OP
from midstream.plan.plan import beams_problem
from midstream.plan.positions.items import TokenIds

CAPTURE = {"layers": [0, 1]}
STEER = {"op": "steer", "vector": [1.0, 2.0], "layer": 1}
PROBE = {"direction": [1.0, 2.0], "layer": 1}
V = [1.0, 2.0]
NOTHING = r"the plan is empty: give `capture`, `edits` or `probes`, or `edits=\[\]` to update"
OPS = ", ".join(f"`{op}`" for op in KINDS_BY_OP)


@given(plans)
def test_a_plan_is_its_dict_its_text_and_its_pickle(plan):
    assert Plan.parse(plan.to_dict()) == Plan.parse(plan.to_json().encode()) == plan
    again = Plan.parse(plan.to_json())
    assert (again, again.to_json(), hash(again)) == (plan, plan.to_json(), hash(plan))
    assert copy.deepcopy(plan) == pickle.loads(pickle.dumps(plan)) == Plan.parse(plan) == plan


def test_the_text_of_a_plan_is_what_it_was():
    plan = Plan.make(
        Capture(-1, positions=[slice(4), "last_row"]),
        Steer([1, 2], 1, phase="generated"),
        Probe([1, 2], 1),
    )
    assert plan is not None
    assert plan.to_json() == (
        '{"capture":[{"layers":[-1],"sites":["resid_post"],'
        '"positions":[{"slice":[0,4,1]},"last_row"],"phase":"all"}],'
        '"edits":[{"op":"steer","vector":{"f32":"AACAPwAAAEA="},"scale":1.0,"norm":null,'
        '"layer":1,"site":"resid_post","positions":["all"],"phase":"generated"}],'
        '"probes":[{"direction":{"f32":"AACAPwAAAEA="},"bias":0.0,"name":"probe","layer":1,'
        '"site":"resid_post","positions":["all"],"phase":"all"}]}'
    )


def test_values_and_dicts_are_listed_or_not_and_keep_their_order():
    for part, form in (("capture", CAPTURE), ("edits", STEER), ("probes", PROBE)):
        plan = Plan.parse({part: form})
        assert plan == Plan.parse({part: [form]})
        assert not plan.needs_prompt
        assert Plan.parse({part: {**form, "positions": TokenIds([3])}}).needs_prompt
    edits = (Scale(2, 0), STEER, Gate(Scale(3, 0), [1]), STEER, Scale(2, 0))
    made = Plan.make([CAPTURE, Capture(5)], edits)
    steer = Steer([1, 2], 1)
    assert made.captures == (Capture([0, 1]), Capture(5))
    assert made.edits == (edits[0], steer, edits[2], steer, edits[4])


def test_captures_may_overlap_and_are_not_equal_and_probes_have_names_of_their_own():
    assert len(Plan.parse({"capture": [CAPTURE, {"layers": [0]}]}).captures) == 2
    assert len(Plan.make(probes=[Probe([1], 0), Probe([1], 0, name="b")]).probes) == 2
    taken = "`probe` is already the name of probes.0.; use another"
    refused_calls(
        (
            lambda: Plan.make([Capture(0), Capture(1), {"layers": [0], "sites": "post_block"}]),
            "capture[2]",
            r"duplicate of capture\[0\]$",
        ),
        (
            lambda: Plan.make(probes=[Probe([1], 0), Probe([1], 0, name="b"), Probe([2], 1)]),
            "probes[2].name",
            taken,
        ),
        (lambda: Plan([Capture(0)]), "expected a tuple of `Capture`; see Plan.make"),
        (lambda: Plan((), (STEER,)), "expected a tuple of edits; see Plan.make"),
    )


def test_a_malformed_plan_is_refused_by_the_path_of_what_is_wrong():
    gate = {"op": "gate", "edit": {**STEER, "layer": "x"}, "probe": [1]}
    fields = "expected a dict of `capture`, `edits`, `probes`, `controller`"
    cases = (
        ({}, "", NOTHING),
        ({"capture": []}, "capture", "the list is empty"),
        ({"capture": None}, "capture", "expected a dict or a list, got `None`"),
        ({"captures": CAPTURE}, "", "unknown field 'captures' .did you mean `capture`"),
        ({"capture": CAPTURE, "x": 1}, "", "field 'x'; known: `capture`, `edits`, `probes`"),
        ({"capture": "al"}, "capture.sites", "unknown site 'al'"),
        ({"capture": False}, "", NOTHING),
        ({"capture": [CAPTURE, 3.5]}, "capture[1]", "expected a `Capture`, or its dict, got `flo"),
        ({"capture": [{"layers": [0, None]}]}, "capture[0].layers[1]", "got `None`"),
        ({"edits": [{"vector": [1], "layer": 1}]}, "edits[0]", f"missing field `op`; known: {OPS}"),
        ({"edits": {"op": "clam", "lo": 1}}, "edits.op", "one of `steer`.*got 'clam' .*`clamp`"),
        ({"edits": [STEER, 3]}, "edits[1]", "expected an edit, or a dict with `op`, got `int`"),
        ({"edits": gate}, "edits.edit.layer", "got 'x'"),
        ({"probes": [PROBE, {**PROBE, "layer": "x"}]}, "probes[1].layer", "got 'x'"),
        ({"probes": "all"}, "probes", r"expected Probe\(.*\), or its dict, got `str`"),
        ({"edits": [STEER, {**STEER, "positions": [0, "end"]}]}, "edits[1].positions[1]", "'end'"),
        ({"edits": [STEER] * 1025}, "edits", "expected at most 1024, got 1025"),
        ({"capture": [CAPTURE] * 1025}, "capture", "expected at most 1024, got 1025"),
        ({"probes": [PROBE] * 1025}, "probes", "expected at most 1024, got 1025"),
        ([CAPTURE], "", f"{fields}, got `list`"),
        (None, "", f"{fields}, got `None`"),
    )
    refused(
        Plan.parse, *((value, path, f"^{re.escape(path)}.*{words}") for value, path, words in cases)
    )
    refused(lambda value: Plan.parse(json.dumps(value)), *cases)


def test_text_that_is_not_strict_json_is_refused():
    refused(
        Plan.parse,
        ("", "expected JSON"),
        ('{"capture": {"layers": [0]}} x', "expected JSON"),
        (b'\xff\xfe{"capture"', "expected JSON.*utf-8"),
        (
            '{"capture": {"layers": 0}, "capture": {}}',
            "duplicate JSON field 'capture' in one object",
        ),
        ('{"capture": {"layers": 0, "layers": 1}}', "duplicate JSON field 'layers' in one object"),
        ('{"edits": {"op": "steer", "vector": [NaN], "layer": 0}}', "NaN is not a JSON number"),
        ('{"edits": {"op": "steer", "vector": [1e999], "layer": 0}}', "finite number, got inf"),
        ('{"capture": {"layers": ' + "9" * 5000 + "}}", "(expected JSON|within)"),
        ("[" * 100_000, "(nested too deeply|expected JSON)"),
    )


def test_a_plan_without_edits_yet_is_another_than_none():
    assert Plan.make() is None
    for edits in ([], ()):
        assert Plan.make(edits=edits) == Plan() == Plan.parse(Plan().to_json())
    assert Plan().to_dict() == {"edits": []}
    assert Plan.make(probes=PROBE, edits=[]) == Plan.make(probes=PROBE)


def test_a_search_for_beams_has_what_is_of_every_token_alone():
    steer, probe = Steer.parse(STEER), Probe.parse(PROBE)
    every = [steer, Gate(steer, V), Bias({5: 2.0}), Capture(1), probe]
    assert beams_problem([*every, probe.replace(act=Flag(above=1.0))]) is None
    for part in (
        steer.replace(phase="prompt"), Gate(steer.replace(positions=[0]), V),
        Bias({5: 2.0}, "generated"), Capture(1, positions="prompt"),
        probe.replace(positions="generated"), probe.replace(act=Stop(above=1.0)),
        probe.replace(act=Switch([], above=1.0)),
    ):  # fmt: skip
        assert "would apply at other tokens" in (beams_problem([*every, part]) or ""), part


@given(json_values | st.binary() | st.text())
def test_whatever_is_sent_is_read_or_refused(value):
    for read in (Plan.parse, Capture.parse, Probe.parse):
        reads_or_refuses(read, value)
    for kind in KINDS_BY_OP.values():
        reads_or_refuses(kind.parse, value)


@given(st.data())
@settings(max_examples=100)
def test_a_plan_with_something_spoilt_is_read_or_refused(data):
    value = data.draw(spoilt(data.draw(plans).to_dict()))
    plan = reads_or_refuses(Plan.parse, value)
    if plan is not None:
        assert Plan.parse(plan.to_json()) == plan
