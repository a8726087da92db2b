"""Requests that left rows on the device: their room, their users, and when they are freed."""

import gc
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import rounds
from support.refusals import refused
from support.stored import worker_info

from midstream.errors import BusyError, SpecError
from midstream.ops.layout import Op
from midstream.plan import (
    Instruction,
    ResolvedCapture,
    ResolvedEdit,
    ResolvedPlan,
    ResolvedProbe,
    Steps,
    Vector,
    Where,
)
from midstream.plan.resolved import Pattern
from midstream.plan.vectors.device_row import DeviceRow
from midstream.runtime.frontend.device_rows import DeviceSources
from midstream.runtime.frontend.engine_info import FrontEnds, describe
from midstream.runtime.frontend.request.budget import Need, with_device_rows

ROOM = 10
PLAN = ResolvedPlan(1, (), ())


def need(rows=0, sources=()):
    return Need({}, device_rows=rows, sources=tuple(sources))


@given(st.data())
@settings(max_examples=rounds(suite=100, nightly=1000), deadline=None)
def test_rows_are_freed_once_after_their_results_and_their_last_user(data):
    every, alive, users, sizes, freed = DeviceSources(ROOM, 4), {}, {}, {}, Counter()
    gone = set()
    for nth in range(data.draw(st.integers(1, 25))):
        uid = f"r{nth}"
        match data.draw(st.sampled_from(["leave", "use", "end", "drop", "tell"])):
            case "leave":
                rows = data.draw(st.integers(1, 6))
                held = {name for mine in users.values() for name in mine} | set(alive)
                if sum(sizes[name] for name in held) + rows > ROOM:
                    with pytest.raises(BusyError, match=f"{rows} rows are to stay"):
                        every.begin(uid, need(rows), PLAN)
                else:
                    alive[uid], sizes[uid] = every.begin(uid, need(rows), PLAN), rows
                    assert alive[uid].id == uid
            case "use" if sizes:
                mine = data.draw(st.lists(st.sampled_from(sorted(sizes)), max_size=2, unique=True))
                if set(mine) <= set(alive):
                    assert every.begin(uid, need(0, mine), PLAN) is None
                    users[uid] = mine
                else:
                    with pytest.raises(SpecError, match="not on the device any more"):
                        every.begin(uid, need(0, mine), PLAN)
            case "end" if users:
                name = data.draw(st.sampled_from(sorted(users)))
                del users[name]
                every.end(name)
                every.end(name)
            case "drop" if alive:
                source = alive.pop(data.draw(st.sampled_from(sorted(alive))))
                if data.draw(st.booleans()):
                    source.free()
                    source.free()
                del source
            case "tell":
                told = every.take_freed()
                if data.draw(st.booleans()):
                    every.lose(told)
                else:
                    freed.update(told)
                    gone |= set(told)
        held = {name for mine in users.values() for name in mine} | set(alive)
        assert len(every) == len(held)
        assert not gone & held
    alive.clear()
    users_left = list(users)
    for name in users_left:
        every.end(name)
    freed.update(every.take_freed())
    assert freed == Counter(dict.fromkeys(sizes, 1))


def test_a_request_that_does_not_fit_or_is_too_late_takes_nothing():
    every = DeviceSources(ROOM, 4)
    first = every.begin("a", need(6), PLAN)
    with pytest.raises(BusyError, match=r"5 rows .* 6 of 10 are there") as caught:
        every.begin("b", need(5, ["a"]), PLAN)
    assert caught.value.retry_after == 1
    with pytest.raises(SpecError, match=r"capture: 11 rows .* there is room for 10; choose fewer"):
        every.begin("b", need(11), PLAN)
    with pytest.raises(SpecError, match=r"there is room for 0; .* setting device_rows"):
        DeviceSources(0, 4).begin("b", need(1), PLAN)
    first.free()
    del first
    gc.collect()
    assert len(every) == 0
    with pytest.raises(SpecError, match="rows of request a are not on the device any more"):
        every.begin("b", need(5, ["a"]), PLAN)
    assert (every.take_freed(), every.take_freed()) == (("a",), ())


def test_rows_stay_with_one_engine_for_one_front_end_alone():
    taps = (("resid_post", 0), ("resid_post", 1))
    pattern = Pattern("device", 1, (), (), taps, (1, 1))
    names = tuple((f"device.{site}", layer) for site, layer in taps)
    plan = ResolvedPlan(9, (), (ResolvedCapture(names, Where(((2, 5), (7, 8))), 0, pattern),))

    def need_on(replicas, front_ends):
        info = describe([[worker_info(taps=taps)]] * replicas, FrontEnds(front_ends))
        return with_device_rows(Need({}), plan, info)

    assert (need_on(1, 1).device_rows, need_on(1, 1).sources) == (8, ())
    for counts, problem in (((2, 1), "2 replicas"), ((1, 3), "3 API servers")):
        with pytest.raises(SpecError, match=f"engine has {problem}; capture the rows") as caught:
            need_on(*counts)
        assert caught.value.path == "capture[0].reduce"


def test_dropped_rows_stay_for_the_requests_that_have_them_and_are_for_no_others():
    every = DeviceSources(ROOM, 4)
    source = every.begin("a", need(6), PLAN)
    every.begin("user", need(0, ["a"]), PLAN)
    source.free()
    assert (len(every), every.take_freed()) == (1, ())
    with pytest.raises(SpecError, match="rows of request a are not on the device any more"):
        every.begin("later", need(0, ["a"]), PLAN)
    every.end("user")
    assert (len(every), every.take_freed()) == (0, ("a",))


def test_a_client_of_a_server_has_a_part_of_the_room():
    every = DeviceSources(ROOM, 4)
    mine = [every.begin(uid, need(2), PLAN, "me") for uid in "ab"]
    with pytest.raises(BusyError, match=r"2 rows .* 4 of the 5 of this client are there: delete"):
        every.begin("c", need(2), PLAN, "me")
    with pytest.raises(SpecError, match=r"6 rows .* there is room for 5 of each client"):
        every.begin("c", need(6), PLAN, "me")
    assert every.begin("asking", need(0, ["a"]), PLAN, "me") is None
    others = every.begin("d", need(5), PLAN, "other")
    mine.pop()
    gc.collect()
    every.begin("e", need(3), PLAN, "me")
    assert len(every) == 2
    del mine, others


def test_rows_are_refused_where_they_would_be_read_or_divided_over_the_ranks():
    row, host = DeviceRow("a", ("resid_post", 0), 1, 4), Vector.parse([1.0, 2.0, 3.0, 4.0])

    def check(step, part=ResolvedEdit, parts=()):
        place = (("z", 0), Steps((step,)), Where(((2, 3),)))
        edits = probes = ()
        if part is ResolvedEdit:
            edits = (ResolvedEdit(*place[0], *place[1:], 0),)
        else:
            probes = (ResolvedProbe(part, *place[0], *place[1:]),)
        worker = worker_info(taps=(("z", 0), ("resid_post", 0)))
        if parts:
            worker = msgspec.structs.replace(worker, parts=parts)
        info = describe([[worker]], FrontEnds(1))
        return with_device_rows(Need({}), ResolvedPlan(9, edits, (), probes), info)

    added = Instruction(Op.ADD, write=(row,), a=1.0)
    assert check(added).sources == ("a",)
    alone = "on the device alone, and can be used only as a row of a Steer or a Replace"
    refused(
        lambda given: check(*given),
        ((Instruction(Op.LINEAR, read=row, write=(host,)),), "edits[0]", alone),
        ((Instruction(Op.SCALE, mask=row),), "edits[0]", alone),
        ((Instruction(Op.PROBE, read=row, slot=0), "score"), "probes[0]", alone),
        ((Instruction(Op.PROBE, read=row, slot=0), ""), "edits", alone),
        ((Instruction(Op.UNIT, write=(row,)), "score"), "probes[0]", alone),
        ((added, ResolvedEdit, (2, 1)), "edits[0].rows", "z is split over the ranks"),
    )
