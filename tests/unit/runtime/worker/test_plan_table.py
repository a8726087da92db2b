"""Plans that requests share on a worker."""

import pytest
from support.fake_steps import TAPS, make_buffers
from support.plans import VECTORS, plan_of
from support.programs import assert_program

from midstream.errors import NoRoomError, SpecError
from midstream.plan.resolve.wire import to_bytes
from midstream.runtime.protocol.segments import WHOLE
from midstream.runtime.worker import plan_table
from midstream.runtime.worker.plan_table import PlanTable
from midstream.runtime.worker.row_index import CapturedRowIndex
from midstream.runtime.worker.tables.codec_table import CodecTable
from midstream.runtime.worker.tables.program_table import ProgramTable

EVERYWHERE = ((0, None),)
ONE = to_bytes(plan_of(edits=[(("resid_post", 0), VECTORS[1], 1.0, EVERYWHERE)]))
OTHER = to_bytes(plan_of(edits=[(("resid_post", 0), VECTORS[2], 1.0, EVERYWHERE)]))

CAPTURED = [(("resid_post", 0),), (("resid_post", 0), ("resid_post", 1))]


@pytest.fixture
def plans():
    buffers = make_buffers()
    tables = ProgramTable(buffers)
    return PlanTable(tables, CodecTable(buffers), CapturedRowIndex(), TAPS, WHOLE)


def test_a_plan_stays_on_the_device_until_the_last_request_that_has_it_ends(plans):
    tables = plans._tables
    first, again, other = (plans.acquire(bytes(bytearray(packed))) for packed in (ONE, ONE, OTHER))
    assert first is again
    (segment,) = first.segments
    assert segment.program != other.segments[0].program
    plans.release(other)
    plans.release(first)
    assert tables.in_use == 1
    assert_program(tables._buffers, segment.program, segment.edits)
    plans.release(again)
    assert (tables.in_use, len(plans)) == (0, 0)
    tables.check_integrity()


def test_plans_of_captures_are_kept_and_the_oldest_one_goes_when_they_are_many(plans, monkeypatch):
    monkeypatch.setattr(plan_table, "_CACHED_PLANS", 2)
    taps = [*CAPTURED, (("resid_post", 1),)]
    packed = [to_bytes(plan_of(captures=[(each, EVERYWHERE)])) for each in taps]
    first, second, third = (plans.acquire(each) for each in packed)
    plans.release(second)
    plans.release(first)
    assert len(plans) == 1
    assert plans.acquire(packed[1]) is second
    plans.release(second)
    plans.release(third)
    assert len(plans) == 0
    assert plans.acquire(packed[1]) is second
    assert plans.acquire(packed[2]) is third
    assert plans.acquire(packed[0]) is not first


def test_a_rank_without_the_edited_layer_keeps_no_plan_with_the_vectors_either():
    buffers = make_buffers()
    elsewhere = {tap: index for tap, index in TAPS.items() if tap != ("resid_post", 0)}
    plans = PlanTable(
        ProgramTable(buffers), CodecTable(buffers), CapturedRowIndex(), elsewhere, WHOLE
    )
    edited = plans.acquire(ONE)
    assert not any(segment.edits for segment in edited.segments)
    plans.release(edited)
    assert plans.acquire(ONE) is not edited


def test_a_plan_without_a_user_leaves_its_room_to_others(plans):
    packed = [to_bytes(plan_of(captures=[(taps, EVERYWHERE)])) for taps in CAPTURED]
    tables = plans._tables
    del tables._free_groups[1:]
    plans.release(plans.acquire(packed[0]))
    plans.acquire(packed[1])
    assert len(plans) == 1
    with pytest.raises(NoRoomError):
        plans.acquire(packed[0])


def test_bytes_that_are_no_plan_leave_nothing_behind(plans):
    with pytest.raises(SpecError):
        plans.acquire(ONE[:-3])
    assert len(plans) == 0
