"""The queue in front of the engine, against a simple model of one."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import rounds

from midstream.errors import BusyError
from midstream.runtime.frontend.request.admission import Admission
from midstream.runtime.frontend.request.budget import CapacityBudget, Need, RowLimit
from midstream.runtime.protocol.segments import Room

ROWS = 10


def need(**rows) -> Need:
    """Vectors by name, and how many rows each takes."""
    empty = {kind: {} for kind in ("programs", "groups", "max_edits", "token_ids")}
    return Need({**empty, "bank_rows": dict(rows)})


class Door:
    """An admission of engines of `ROWS` rows each, and where each request went, or which child."""

    def __init__(self, count=1, busy=None):
        self.budgets = [CapacityBudget(Room(ROWS, 100, 100, 100, 1)) for _ in range(count)]
        self.busy = busy
        self.admission = Admission(self.budgets, None if busy is None else lambda: self.busy)
        self.sent = []

    def submit(self, uid, wanted, only=None, child=None):
        def send():
            where = self.admission.replica_of(uid) if child is None else child
            self.sent.append((uid, where))

        self.admission.submit(uid, wanted, send, only)

    @property
    def used(self):
        return [budget.used["bank_rows"] for budget in self.budgets]


def test_another_version_of_a_plan_takes_room_until_its_request_ends():
    door = Door()
    door.submit("a", need(a=4))
    door.admission.extend({"a": need(a=4, b=3)})  # `a` is there already
    with pytest.raises(BusyError, match="another version"):
        door.admission.extend({"a": need(c=4)})
    door.submit("d", need(d=4))
    assert door.sent == [("a", 0)]
    assert door.admission.is_running("a")
    assert not door.admission.is_running("d")
    door.admission.end(["a"])
    assert door.sent == [("a", 0), ("d", 0)]
    door.admission.finish(["a", "d"])
    assert not any(door.budgets[0].used.values())


@settings(max_examples=rounds(suite=100, nightly=800))
@given(st.integers(0, 2**32))
def test_any_sequence_is_that_of_a_simple_queue(seed):
    draw = random.Random(seed)
    door = Door()
    inside: dict[str, dict] = {}
    queue: list[tuple[str, dict, list[int]]] = []
    expected = []

    def used(more=()):
        return sum(
            {
                **dict(pair for rows in inside.values() for pair in rows.items()),
                **dict(more),
            }.values()
        )

    def advance():
        while queue and used(queue[0][1]) <= ROWS:
            uid, rows, children = queue.pop(0)
            inside[uid] = rows
            expected.extend((uid, child) for child in children)

    needs = {}
    for nth in range(60):
        if draw.random() < 0.4 and (inside or queue):
            known = [*inside, *(uid for uid, *_ in queue)]
            gone = draw.sample(known, draw.randint(1, min(3, len(known))))
            for uid in gone:
                inside.pop(uid, None)
            queue[:] = [entry for entry in queue if entry[0] not in gone]
            advance()
            door.admission.finish(gone)
        else:
            uid = draw.choice([f"u{nth}", *list(inside), *(uid for uid, *_ in queue)])
            if uid not in needs:
                names = draw.sample("vwxyz", draw.randint(1, 2))
                needs[uid] = {name: 1 + "vwxyz".index(name) for name in names}
            rows = needs[uid]
            place = next((entry for entry in queue if entry[0] == uid), None)
            if uid in inside:
                expected.append((uid, nth))
            elif place is not None:
                place[2].append(nth)
            else:
                queue.append((uid, rows, [nth]))
                if len(queue) == 1:
                    advance()
            door.submit(uid, need(**rows), child=nth)
        assert door.sent == expected
        assert door.admission.waiting == len(queue)
        assert door.used[0] == used() <= ROWS
    door.admission.finish([*inside, *(uid for uid, *_ in queue)])
    assert door.sent == expected
    assert door.admission.waiting == 0
    assert set(door.budgets[0].used.values()) == {0}
    assert not door.admission._admitted


def test_a_send_that_fails_leaves_its_request_inside_until_it_is_given_up():
    door = Door()

    def fail():
        raise OSError("the engine is gone")

    with pytest.raises(OSError, match="gone"):
        door.admission.submit("a", need(a=6), fail)
    door.submit("b", need(b=6))
    assert door.sent == []
    door.admission.finish(["a"])
    assert door.sent == [("b", 0)]


def test_a_request_that_cannot_be_sent_gives_its_room_to_those_behind_it():
    door = Door()
    door.submit("a", need(a=8))

    def refuse():
        raise RuntimeError("the engine refuses it")

    door.admission.submit("b", need(b=8), refuse)
    door.submit("c", need(c=8))
    with pytest.raises(RuntimeError, match="refuses"):
        door.admission.finish(["a"])
    assert door.sent == [("a", 0), ("c", 0)]
    assert door.admission.waiting == 0
    door.admission.finish(["b", "c"])
    assert not any(door.budgets[0].used.values())


def test_rows_that_were_fetched_while_their_request_runs_make_room_for_others():
    budget = CapacityBudget(Room(ROWS, 100, 100, 100, 1), RowLimit({"rows": 100}, lambda: 0))
    admission, sent = Admission([budget]), []

    def submit(uid, nbytes):
        admission.submit(uid, need().with_rows(nbytes), lambda: sent.append(uid))

    submit("a", 70)
    submit("b", 50)
    admission.release_rows("a", 10)
    assert sent == ["a"]
    admission.release_rows("a", 10)
    assert sent == ["a", "b"]
    assert budget.counts["rows"] == 100
    # A row that is computed again is fetched again, and had no room of its own.
    admission.release_rows("a", 90)
    admission.release_rows("never heard of", 90)
    assert budget.counts["rows"] == 50
    admission.end(["a"])
    admission.finish(["a", "b"])
    assert budget.counts["rows"] == 0


def test_all_requests_of_one_call_go_to_one_engine_also_after_it_has_ended():
    door = Door(2)
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
    door = Door(2)
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
