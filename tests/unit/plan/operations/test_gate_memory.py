"""Arguments of gates with memory, and the SCANs that they become."""

import pytest
from support.refusals import refused

from midstream.errors import SpecError
from midstream.ops.layout import HELD, Flags, Op
from midstream.plan import Gate, ModelShape, Plan, Prompt, Reading, Scale, Steer, TokenIds
from midstream.plan.resolve.resolve import resolve
from midstream.plan.resolve.wire import from_bytes, to_bytes

V, W = [1.0, 0.0], [0.0, 2.0]
SITES = ("resid_pre", "resid_post")
SHAPE = ModelShape(6, 2, [(site, layer) for site in SITES for layer in range(6)])
STEER = Steer(W, 3)


def resolved(*edits):
    return resolve(Plan.make(None, list(edits)), SHAPE, Prompt(10), 5)


def gates_at(plan, layer):
    """The gate of each edit at a layer's resid_post."""
    return [
        edit.steps.instructions[0]
        for edit in plan.edits
        if (edit.site, edit.layer) == ("resid_post", layer)
    ]


def test_what_is_given_is_emitted_and_read_again():
    for given in ({"hold": "rest"}, {"hold": 16}, {"smooth": 0.25, "release": 0.5}, {}):
        gate = Gate(STEER, V, 1.0, **given)
        emitted = gate.to_dict()
        assert {name: emitted[name] for name in given} == given
        assert not {"hold", "smooth", "release"} & (set(emitted) - set(given))
        assert Gate.parse(emitted) == gate
        assert bool(gate.memory) == bool(given)
    assert Gate(STEER, V, sharpness=2.0, smooth=0.5).smooth == 0.5


def test_a_malformed_argument_is_rejected_by_its_name():
    refused(
        lambda given: Gate.parse({"edit": STEER.to_dict(), "probe": V, "threshold": 1.0, **given}),
        ({"hold": "always"}, "hold", 'expected "rest", or a number of tokens from 1, got \'alw'),
        ({"hold": 0}, "hold", "a number of tokens from 1, got 0"),
        ({"hold": 2**30}, "hold", "from 1, got"),
        ({"smooth": 0}, "smooth", "between 0 and 1, the weight of the newest score, got 0"),
        ({"smooth": 1}, "smooth", "omit `smooth`"),
        ({"release": 1.25}, "release", "opens above 1.0 must close at that or below, got 1.25"),
        ({"hold": 2, "sharpness": 1.0}, "hold", "omit `sharpness`, or use `smooth` alone"),
        ({"release": 0, "sharpness": 1.0}, "release", "open to a degree"),
        ({"holds": 2}, "", "did you mean `hold`"),
    )


def test_a_gate_reads_a_scan_at_its_tap_for_the_tokens_of_its_edit():
    where = {"positions": TokenIds([5]), "phase": "generated"}
    reading = Reading(V, 0.5, layer=1, site="resid_pre")
    gate = Gate(Steer(W, [3, 4], **where), reading, 2.0, hold=7, smooth=0.25, release=1.5)
    plan = resolved(gate)
    (probe,) = plan.probes
    assert (probe.name, probe.tap, probe.where) == ("", ("resid_pre", 1), plan.edits[0].where)
    assert probe.is_scan
    (scan,) = probe.steps.instructions
    assert (scan.op, scan.slot, scan.hold) == (Op.SCAN, 0, 7)
    assert (scan.a, scan.b, scan.c, scan.d) == (0.5, 2.0, 1.5, 0.25)
    assert scan.flags == Flags.COUNTED | Flags.STEP
    for layer in (3, 4):
        (read,) = gates_at(plan, layer)
        assert (read.op, read.slot, read.read, read.b, read.flags) == (
            Op.GATE, 0, None, 0.5, Flags.STEP
        )  # fmt: skip


def test_without_a_place_each_site_of_the_edit_has_a_scan_of_its_own():
    plan = resolved(Gate(Scale(2.0, [1, 4]), V, hold="rest"))
    assert [(probe.tap, probe.slot) for probe in plan.probes] == [
        (("resid_post", 1), 0),
        (("resid_post", 4), 1),
    ]
    assert {probe.steps.instructions[0].hold for probe in plan.probes} == {HELD}
    assert [gates_at(plan, layer)[0].slot for layer in (1, 4)] == [0, 1]
    # The scale is the first that reads the stream: the gate reads a score.
    assert Flags.FRESH in plan.edits[0].steps.instructions[1].flags


def test_without_release_a_gate_closes_at_its_threshold_and_with_a_sharpness_reads_the_average():
    plan = resolved(Gate(STEER, V, 2.0, sharpness=3.0, smooth=0.5))
    (scan,) = plan.probes[0].steps.instructions
    assert (scan.b, scan.c, scan.d, scan.hold, scan.flags) == (2.0, 2.0, 0.5, 0, Flags.COUNTED)
    (read,) = gates_at(plan, 3)
    assert (read.b, read.c, read.flags) == (2.0, 3.0, Flags.NONE)


def test_gates_share_a_scan_only_if_all_of_it_is_the_same():
    def gate(edit=STEER, probe=V, threshold=1.0, **memory):
        return Gate(edit, Reading(probe, layer=1), threshold, **memory)

    same = resolved(gate(hold=2), gate(Scale(2.0, 4), hold=2))
    assert len(same.probes) == 1
    apart = resolved(
        gate(hold=2), gate(hold=3), gate(probe=W, hold=2), gate(threshold=2.0, hold=2),
        gate(hold=2, smooth=0.5), gate(hold=2, release=0.5),
        gate(STEER.replace(positions=slice(3, 9)), hold=2), gate(),
    )  # fmt: skip
    assert len(apart.probes) == 8
    assert len({probe.slot for probe in apart.probes}) == 8
    digests = {(probe.steps.digest, probe.where) for probe in apart.probes}
    assert len(digests) == 8


def test_a_scan_after_the_edit_is_rejected_as_any_reading_is():
    gate = Gate(STEER, Reading(V, layer=5), hold=2)
    with pytest.raises(SpecError, match="reads resid_post of layer 5, which is computed after"):
        resolved(gate)


def test_scans_survive_the_plans_bytes():
    plan = resolved(Gate(STEER, V, hold="rest"), Gate(STEER, W, smooth=0.5, sharpness=1.0))
    assert from_bytes(to_bytes(plan)) == plan
