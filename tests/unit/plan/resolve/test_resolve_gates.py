"""Gates and rows by position, made concrete: which score is read where, and which row by whom."""

import numpy as np
import pytest
from support import formulas
from support.refusals import refused

from midstream.errors import SpecError
from midstream.ops.layout import Flags, Op
from midstream.plan import (
    Ablate,
    Affine,
    Clamp,
    Gate,
    ModelShape,
    Plan,
    Probe,
    Prompt,
    Reading,
    Replace,
    Scale,
    Steer,
    Where,
)
from midstream.plan.resolve.resolve import resolve

SITES = ("resid_pre", "resid_mid", "resid_post")
SHAPE = ModelShape(6, 2, [(site, layer) for site in SITES for layer in range(6)])
V, W = [1.0, 0.0], [0.0, 2.0]
ROWS = [[float(n), -1.0] for n in range(6)]


def _resolve(edits=None, probes=None):
    return resolve(Plan.make(None, edits, probes), SHAPE, Prompt(10), 5)


def steps_at(plan, layer):
    """The instructions of the only edit at a tap."""
    (edit,) = [one for one in plan.edits if (one.site, one.layer) == ("resid_post", layer)]
    return edit.steps.instructions


def test_a_gate_without_a_place_reads_where_the_edit_is():
    plan = _resolve(Gate(Steer(W, [1, 4]), Reading(V, bias=0.5), threshold=2.0))
    assert plan.probes == ()
    gate, add = steps_at(plan, 4)
    assert (gate.op, gate.slot, gate.a, gate.b) == (Op.GATE, None, 0.5, 2.0)
    assert gate.read is not None
    assert gate.flags == Flags.FRESH | Flags.STEP
    assert (add.op, add.flags) == (Op.ADD, Flags.GATED | Flags.COUNTED)


def test_a_gate_at_an_earlier_site_reads_a_score_that_is_taken_there_for_the_same_tokens():
    gate = Gate(Steer(W, 4, positions=[2, 3]), Reading(V, 0.5, layer=1, site="resid_mid"), 2.0)
    plan = _resolve(gate)
    (probe,) = plan.probes
    assert (probe.name, probe.site, probe.layer, probe.slot) == ("", "resid_mid", 1, 0)
    assert probe.where == plan.edits[0].where == Where(((2, 4),))
    (read,) = probe.steps.instructions
    assert (read.op, read.read, read.a, read.slot) == (Op.PROBE, gate.probe.direction, 0.5, 0)
    assert read.flags == Flags.FRESH | Flags.COUNTED
    seen, add = steps_at(plan, 4)
    assert (seen.op, seen.read, seen.slot, seen.a, seen.b) == (Op.GATE, None, 0, 0.0, 2.0)
    assert seen.flags == Flags.STEP, "it reads a score and no stream"
    assert add.flags == Flags.GATED | Flags.COUNTED


def test_a_gate_at_several_layers_notes_the_score_at_its_own_site_and_reads_it_at_the_others():
    plan = _resolve(Gate(Steer(W, [2, 3, 5]), Reading(V, layer=2)))
    assert plan.probes == ()
    noted, own, _ = steps_at(plan, 2)
    assert (noted.op, noted.slot, noted.counted) == (Op.PROBE, 0, False)
    assert (own.op, own.slot) == (Op.GATE, None)
    for layer in (3, 5):
        gate, _ = steps_at(plan, layer)
        assert (gate.op, gate.slot, gate.read) == (Op.GATE, 0, None)


def test_behind_a_score_the_first_that_reads_the_stream_takes_it_itself():
    for edit in (
        Scale(2.0, 4),
        Clamp(W, 4, value=1.0),
        Ablate([V, W], 4),
        Affine([V, W], [W, V], 4, bias=[0.0, 1.0]),
        Steer(W, 4, norm="keep"),
        Steer(W, 4, norm="match"),
        Replace(W, 4),
    ):
        own = steps_at(_resolve(Gate(edit, Reading(V))), 4)
        fresh = [Flags.FRESH in step.flags for step in own]
        assert fresh == [True] + [False] * (len(own) - 1), edit
        later = steps_at(_resolve(Gate(edit, Reading(V, layer=1))), 4)
        fresh = [Flags.FRESH in step.flags for step in later]
        assert fresh == [False, True] + [False] * (len(later) - 2), edit
        assert all(Flags.GATED in step.flags for step in later[1:])
        assert sum(step.counted for step in later) == 1


def test_gates_on_one_score_share_its_slot_however_they_decide():
    read = Reading(V, 0.5, layer=1)
    plan = _resolve(
        [
            Gate(Steer(V, 4), read, threshold=1.0),
            Gate(Scale(2.0, 5), read, threshold=-1.0, sharpness=3.0),
            Gate(Steer(W, [2, 3]), read),
        ]
    )
    assert len(plan.probes) == 1
    assert {edit.steps.instructions[0].slot for edit in plan.edits} == {0}


def test_gates_that_read_something_else_have_a_slot_of_their_own():
    for other in (
        Gate(Steer(V, 4), Reading(W, 0.5, layer=1)),
        Gate(Steer(V, 4), Reading(V, 0.25, layer=1)),
        Gate(Steer(V, 4), Reading(V, 0.5, layer=2)),
        Gate(Steer(V, 4), Reading(V, 0.5, layer=1, site="resid_pre")),
        Gate(Steer(V, 4, positions=[3]), Reading(V, 0.5, layer=1)),
    ):
        plan = _resolve([Gate(Steer(V, 4), Reading(V, 0.5, layer=1)), other])
        assert [probe.slot for probe in plan.probes] == [0, 1], other
        assert [edit.steps.instructions[0].slot for edit in plan.edits] == [0, 1]


def test_what_gates_read_comes_after_the_plans_own_probes():
    gate = Gate(Steer(V, 4), Reading(V, layer=1))
    plan = _resolve(gate, [Probe(V, 1, name="a"), Probe(W, 5, name="b")])
    assert [(probe.name, probe.slot) for probe in plan.probes] == [("a", 0), ("b", 1), ("", 2)]
    assert steps_at(plan, 4)[0].slot == 2
    assert plan.slots == 3


def test_a_gate_on_what_is_computed_later_is_refused():
    for layer, site, after in ((4, "resid_post", "resid_post"), (3, "resid_mid", "resid_mid")):
        words = f"resid_post of layer {layer}, which is computed after {after} of layer 3, where"
        refused(
            _resolve,
            (
                Gate(Steer(V, [3, 5], site=site), Reading(V, layer=layer)),
                "edits[0].probe.layer",
                words,
            ),
        )


def test_an_error_in_a_gate_has_the_path_of_its_json_form():
    for gate, path, problem in (
        (Gate(Steer(V, 9), Reading(V)), "edit.layer", "layer 9 is out of range"),
        (Gate(Steer(V, [1, 9]), Reading(V)), "edit.layer[1]", "layer 9 is out of range"),
        (Gate(Steer(V, 1, site="mlp_out"), Reading(V)), "edit.site", "mlp_out at layer 1 is not"),
        (Gate(Steer(V, 1, positions=[40]), Reading(V)), "edit.positions", "40"),
        (Gate(Steer([1.0], 1), Reading(V)), "edit.vector", "expected 2 numbers"),
        (Gate(Steer(V, 1), Reading([1.0])), "probe.direction", "expected 2 numbers"),
        (Gate(Steer(V, 1), Reading(V, layer=9)), "probe.layer", "layer 9 is out of range"),
        (Gate(Steer(V, 1), Reading(V, layer=0, site="mlp_out")), "probe.site", "is not tapped"),
        (Gate(Replace(ROWS, 1, positions=slice(0, 5)), Reading(V)), "edit.rows", "6 rows for 5"),
        (Gate(Replace(ROWS, 1), Reading(V)), "edit.positions", "must be fixed and bounded"),
    ):
        with pytest.raises(SpecError, match=problem) as caught:
            _resolve([Steer(V, 0), gate])
        assert caught.value.path == f"edits[1].{path}", gate
        place = gate.to_dict()
        for name in path.split("[")[0].split("."):
            assert name in place, "there is no such field"
            place = place[name]


def test_of_several_rows_each_run_of_positions_gets_its_own():
    edit = Replace(ROWS, [2, 3], positions=[8, 9, 1, 2, 3, 6])
    plan = _resolve(edit)
    by_tap = {}
    for one in plan.edits:
        (step,) = one.steps.instructions
        assert Flags.ROW_BY_POSITION in step.flags
        assert step.counted
        ((start, stop),) = one.where.ranges
        assert (step.first, len(step.write)) == (start, stop - start)
        by_tap.setdefault(one.layer, {}).update(zip(range(start, stop), step.write, strict=True))
    wanted = dict(zip([8, 9, 1, 2, 3, 6], edit.rows, strict=True))
    assert by_tap == {2: wanted, 3: wanted}
    assert {one.source for one in plan.edits} == {0}


def test_rows_that_do_not_match_their_positions_are_refused():
    bounded = "must be fixed and bounded"
    refused(
        lambda where: _resolve(Replace(ROWS, 2, **where)),
        ({"positions": slice(0, 5)}, "edits[0].rows", "6 rows for 5 positions; give one row, or"),
        ({"positions": slice(0, 7)}, "edits[0].rows", "6 rows for 7 positions"),
        ({"positions": "all"}, "edits[0].positions", bounded + "; give a single row"),
        ({"positions": {"tokens": [3]}, "phase": "generated"}, "edits[0].positions", bounded),
    )


def test_rows_of_many_runs_behind_a_gate_read_one_score():
    edit = Replace(ROWS, 4, positions=[0, 2, 4, 6, 8, 9])
    plan = _resolve(Gate(edit, Reading(V, layer=1)))
    (probe,) = plan.probes
    assert probe.where.ranges == ((0, 1), (2, 3), (4, 5), (6, 7), (8, 10))
    assert len(plan.edits) == 5
    for one in plan.edits:
        gate, replaced = one.steps.instructions
        assert gate.slot == probe.slot
        assert replaced.first == one.where.ranges[0][0]
        assert replaced.flags == (Flags.FRESH | Flags.GATED | Flags.COUNTED | Flags.ROW_BY_POSITION)


def test_a_gate_over_its_own_tap_and_later_ones_decides_once_by_what_it_read_before_the_edit():
    plan = _resolve(Gate(Steer([-100.0, 0.0], [0, 1, 2]), Reading(V, layer=0), threshold=0.5))
    assert plan.probes == ()
    assert plan.slots == 1
    for entered, moved in (([1.0, 3.0], -100.0), ([0.2, 3.0], 0.0)):
        scores: dict[int, object] = {}
        for layer in range(3):
            # What the later layers see is the edited stream: it must not decide anew.
            h = np.array([entered if layer == 0 else [-50.0, 1.0]])
            out = formulas.run(steps_at(plan, layer), h, scores)
            assert (out - h).tolist() == [[moved, 0.0]], layer
    counted = [sum(step.counted for step in steps_at(plan, layer)) for layer in range(3)]
    assert counted == [1, 1, 1]


def test_the_score_of_a_gate_with_memory_keeps_its_column_whatever_other_gates_there_are():
    """Versions of a running request's plan have other gates, and its memory goes on."""
    scores = {"plain": Gate(Steer(W, 4), Reading(V, layer=1)), "notes": Gate(Steer(W, [2, 3]), V)}
    kept = Gate(Steer(W, 3), Reading(V, layer=0), hold="rest")
    own = Probe(V, 2, name="p")
    (alone,) = [one for one in _resolve(kept, own).probes if one.is_scan]
    for others in ([scores["plain"]], list(scores.values())):
        for given in ([*others, kept], [kept, *others]):
            plan = _resolve(given, own)
            assert [one for one in plan.probes if one.is_scan] == [alone]
            sources = [edit.source for edit in plan.edits]
            assert sources == sorted(sources), "edits apply in the order in which they are given"
