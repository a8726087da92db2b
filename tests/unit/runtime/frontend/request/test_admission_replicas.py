"""The queue in front of several engines: each has room of its own."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import rounds

from midstream.runtime.frontend.request.admission import Admission
from midstream.runtime.frontend.request.budget import CapacityBudget, Need
from midstream.runtime.protocol.segments import Room

ROWS = 10


def need(**rows) -> Need:
    """Vectors by name, and how many rows each takes."""
    empty = {kind: {} for kind in ("programs", "groups", "max_edits", "token_ids")}
    return Need({**empty, "bank_rows": dict(rows)})


class Door:
    """An admission of several engines of `ROWS` rows each, and where each request went."""

    def __init__(self, count=2, busy=None):
        self.budgets = [CapacityBudget(Room(ROWS, 100, 100, 100, 1)) for _ in range(count)]
        self.busy = busy
        self.admission = Admission(self.budgets, None if busy is None else lambda: self.busy)
        self.sent = []

    def submit(self, uid, wanted, only=None):
        def send():
            self.sent.append((uid, self.admission.replica_of(uid)))

        self.admission.submit(uid, wanted, send, only)

    @property
    def used(self):
        return [budget.used["bank_rows"] for budget in self.budgets]


def test_each_engine_has_room_of_its_own():
    door = Door()
    for uid in "abc":
        door.submit(uid, need(**{uid: 6}))
    assert door.sent == [("a", 0), ("b", 1)]
    assert door.used == [6, 6]
    door.admission.finish(["b"])
    assert door.sent[-1] == ("c", 1)


def test_what_is_alike_counts_once_only_where_it_is():
    door = Door()
    door.submit("a", need(x=6))
    door.submit("b", need(x=6))
    door.submit("c", need(x=6))
    assert door.sent == [("a", 0), ("b", 1), ("c", 0)]
    assert door.used == [6, 6]


def test_all_requests_of_one_call_go_to_one_engine_also_after_it_has_ended():
    door = Door()
    for _ in range(3):
        door.submit("a", need(a=4))
    door.admission.end(["a"])
    door.submit("a", need(a=4))
    assert door.sent == [("a", 0)] * 4
    door.submit("b", need(b=9))
    door.submit("c", need(c=9))
    for _ in range(2):
        door.submit("d", need(d=9))
    door.admission.end(["c"])
    where = dict(door.sent)["c"]
    assert door.sent[-2:] == [("d", where)] * 2


def test_the_least_busy_engine_with_room_is_taken():
    door = Door(3, busy=[5, 2, 9])
    door.submit("a", need(a=6))
    assert door.sent == [("a", 1)]
    door.submit("b", need(b=6))
    assert door.sent[-1] == ("b", 0), "the least busy one has no room"
    door.busy = [5, 0, 0]
    door.submit("c", need(c=1))
    assert door.sent[-1] == ("c", 2), "what was sent a moment ago is not told yet"


def test_while_nothing_is_told_those_sent_meanwhile_are_shared_out():
    door = Door(3, busy=[0, 0, 0])
    for nth in range(9):
        door.submit(f"u{nth}", need())
    assert [where for _, where in door.sent] == [0, 1, 2] * 3
    # One engine was busy with other things before, and what is sent is not among them.
    door = Door(2, busy=[7, 3])
    for nth in range(10):
        door.submit(f"u{nth}", need())
    assert [where for _, where in door.sent].count(0) == 3


def test_who_is_to_go_to_one_engine_waits_for_that_and_lets_others_pass_to_the_others():
    door = Door()
    door.submit("a", need(a=8), 0)
    door.submit("b", need(b=8), 0)
    door.submit("small", need(s=1), 0)
    assert door.sent == [("a", 0)]
    door.submit("c", need(c=8))
    assert door.sent[-1] == ("c", 1)
    # It may go to either, and comes after those who wait for the first.
    door.submit("any", need(y=1))
    assert door.sent[-1] == ("any", 1)
    door.submit("large", need(l=9))
    door.submit("later", need(z=1))
    assert door.admission.waiting == 4
    door.admission.finish(["a"])
    assert door.sent[-2:] == [("b", 0), ("small", 0)]
    door.admission.finish(["c", "any"])
    assert door.sent[-2:] == [("large", 1), ("later", 1)], "where fewer are"


def test_a_request_that_cannot_be_sent_gives_its_room_to_those_behind_it():
    door = Door()
    door.submit("a", need(a=8))
    door.submit("b", need(b=8))

    def refuse():
        raise RuntimeError("the engine refuses it")

    door.admission.submit("c", need(c=8), refuse)
    door.submit("d", need(d=8))
    with pytest.raises(RuntimeError, match="refuses"):
        door.admission.finish(["b"])
    assert door.sent[-1] == ("d", 1)
    assert door.used == [8, 8]


@settings(max_examples=rounds(suite=100, nightly=800))
@given(st.integers(0, 2**32))
def test_nobody_is_let_in_without_room_and_nobody_waits_for_room_that_is_there(seed):
    draw = random.Random(seed)
    count = draw.randint(1, 4)
    door = Door(count, busy=[0] * count)
    needs, only, under_way = {}, {}, []
    for nth in range(60):
        door.busy = [draw.randint(0, 3) for _ in range(count)]
        if draw.random() < 0.4 and under_way:
            gone = draw.sample(under_way, draw.randint(1, min(3, len(under_way))))
            under_way = [uid for uid in under_way if uid not in gone]
            door.admission.finish(gone)
        else:
            uid = f"u{nth}"
            names = draw.sample("vwxyz", draw.randint(1, 2))
            needs[uid] = {name: 2 + "vwxyz".index(name) for name in names}
            only[uid] = draw.choice([None, *range(count)])
            under_way.append(uid)
            door.submit(uid, need(**needs[uid]), only[uid])
        where = dict(door.sent)
        inside = [uid for uid in under_way if uid in where]
        waiting = [uid for uid in under_way if uid not in where]
        assert all(only[uid] in (None, where[uid]) for uid in inside)
        held = [{} for _ in range(count)]
        for uid in inside:
            held[where[uid]] |= needs[uid]
        assert door.used == [sum(one.values()) for one in held]
        assert max(door.used) <= ROWS
        assert door.admission.waiting == len(waiting)
        waited_for = set()
        for uid in waiting:
            mine = set(range(count)) if only[uid] is None else {only[uid]}
            for number in mine - waited_for:
                assert sum((held[number] | needs[uid]).values()) > ROWS, f"{uid} could go"
            waited_for |= mine
    assert len(door.sent) == len(set(door.sent)), "somebody was sent twice"
    door.admission.finish(under_way)
    assert door.used == [0] * count
    assert door.admission.waiting == 0
