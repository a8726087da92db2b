"""Which rows the states of gates with memory are armed for, and what is sent to the device."""

import numpy as np
import pytest
from support.fake_steps import ROOM, TAPS, make_buffers
from support.plans import SMALL

from midstream.ops import layout
from midstream.ops.layout import Flags, Op
from midstream.plan import Instruction, ResolvedProbe, Steps, Where
from midstream.runtime.protocol.segments import Room, TapProgramStep
from midstream.runtime.worker import gate_states
from midstream.runtime.worker.gate_states import GateStates
from midstream.runtime.worker.request_state import Segment
from midstream.runtime.worker.step.step_plan import TokenRuns
from midstream.runtime.worker.tables.device_buffers import code

TAP = ("resid_post", 1)
SCAN = (Instruction(Op.SCAN, read=SMALL[0], d=1.0, flags=Flags.COUNTED | Flags.STEP, slot=2),)
SEGMENT = Segment(
    0, 9, (TapProgramStep(TAPS[TAP], SCAN, Steps(SCAN).digest),), (), program=2, group=0, kind=0
)
PROBE = ResolvedProbe("", *TAP, Steps(SCAN), Where(((0, None),)))


@pytest.fixture
def sent(monkeypatch):
    """What is sent to the device, each time."""
    found = []
    real = gate_states.upload

    def note(target, values):
        found.append(values.tolist())
        real(target, values)

    monkeypatch.setattr(gate_states, "upload", note)
    return found


def states_of(slots, only_armed=True):
    """States, of which each slot's request has one; and the device's buffers."""
    buffers = make_buffers(room=Room(**ROOM, gate_states=3))
    states = GateStates(buffers, only_armed)
    for slot in slots:
        states.acquire(slot, [SEGMENT], [PROBE])
    return states, buffers


def runs_of(*runs):
    """Runs of a step, each of (slot, first row, number of rows)."""
    slot, row, length = np.array(runs, np.int64).T
    none = np.zeros(len(runs), np.int64)
    return TokenRuns(
        row=row, length=length, position=none, slot=slot, program=none, group=none, vectors=none,
        units=none, kind=none, scored=none, codec=none, record=none, exact=True,
    )  # fmt: skip


def rows_of(buffers):
    """First row and number of rows of each state on the device."""
    return buffers.scans[:, : layout.SCAN_SLOT].tolist()


def test_a_state_has_the_rows_of_its_request_and_the_code_of_its_tap():
    states, buffers = states_of([7, 4])
    states.arm(runs_of((4, 3, 1), (9, 0, 3), (7, 4, 2), (7, 6, 5)))
    assert buffers.scans.tolist() == [
        [4, 7, 3, code(TAP)],
        [3, 1, 3, code(TAP)],
        [0] * layout.SCAN_COLUMNS,
    ]
    states.check_integrity()


def test_a_step_with_the_same_rows_sends_nothing(sent):
    states, buffers = states_of([0, 1])
    runs = runs_of((0, 0, 1), (1, 1, 1))
    states.arm(runs)
    for nth in range(3):
        states.disarm()
        states.arm(runs._replace(position=runs.position + nth))
        states.arm(runs_of((0, 0, 1), (1, 1, 1)))
    assert len(sent) == 1
    assert rows_of(buffers) == [[0, 1], [1, 1], [0, 0]]
    states.arm(runs_of((1, 0, 1)))
    assert rows_of(buffers) == [[0, 0], [0, 1], [0, 0]]


def test_a_request_with_the_slot_of_an_ended_one_is_armed_though_the_step_has_the_same_rows():
    states, buffers = states_of([0])
    runs = runs_of((0, 0, 1), (1, 1, 1))
    states.arm(runs)
    states.acquire(1, [SEGMENT], [PROBE])
    states.arm(runs)
    assert rows_of(buffers) == [[0, 1], [1, 1], [0, 0]]
    states.release(0)
    states.arm(runs)
    assert rows_of(buffers) == [[0, 0], [1, 1], [0, 0]]


def test_nothing_stays_armed_where_a_forward_pass_may_not_be_armed(sent):
    states, buffers = states_of([0], only_armed=False)
    runs = runs_of((0, 2, 1))
    for _ in range(2):
        states.arm(runs)
        assert rows_of(buffers)[0] == [2, 1]
        states.disarm()
        assert not bool(buffers.scans.any())
        states.check_integrity()
    assert len(sent) == 2


def test_what_the_device_has_is_checked():
    states, buffers = states_of([0])
    states.arm(runs_of((0, 0, 1)))
    buffers.scans[0, layout.SCAN_COUNT] = 2
    with pytest.raises(AssertionError):
        states.check_integrity()
