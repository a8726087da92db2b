"""The queue in front of the engine, against a simple model of one."""

from __future__ import annotations

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
    """An admission of `ROWS` rows, and what went through it, in order."""

    def __init__(self):
        self.budget = CapacityBudget(Room(ROWS, 100, 100, 100, 1))
        self.admission = Admission([self.budget])
        self.sent = []

    def submit(self, uid, wanted, child=0):
        self.admission.submit(uid, wanted, lambda: self.sent.append((uid, child)))


def test_what_fits_goes_at_once():
    door = Door()
    door.submit("a", need(a=4))
    door.submit("b", need(b=6))
    assert door.sent == [("a", 0), ("b", 0)]
    assert door.admission.waiting == 0


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
    assert not any(door.budget.used.values())


def test_what_does_not_fit_waits_until_somebody_ends():
    door = Door()
    door.submit("a", need(a=6))
    door.submit("b", need(b=6))
    assert door.sent == [("a", 0)]
    assert door.admission.waiting == 1
    door.admission.finish(["a"])
    assert door.sent == [("a", 0), ("b", 0)]
    assert door.admission.waiting == 0


def test_nobody_overtakes_even_one_who_would_fit():
    door = Door()
    door.submit("a", need(a=6))
    door.submit("large", need(l=9))
    door.submit("small", need(s=1))
    assert [uid for uid, _ in door.sent] == ["a"]
    door.admission.finish(["a"])
    assert [uid for uid, _ in door.sent] == ["a", "large", "small"]


def test_what_shares_its_vectors_with_those_inside_needs_no_more_room():
    door = Door()
    door.submit("a", need(v=10))
    door.submit("b", need(v=10))
    assert [uid for uid, _ in door.sent] == ["a", "b"]
    door.admission.finish(["a"])
    door.submit("c", need(c=1))
    assert door.admission.waiting == 1
    door.admission.finish(["b"])
    assert door.sent[-1] == ("c", 0)


def test_the_children_of_one_prompt_go_together():
    door = Door()
    door.submit("a", need(a=6))
    for child in range(3):
        door.submit("b", need(b=6), child)
    door.submit("c", need(c=4))
    assert door.admission.waiting == 2
    door.admission.finish(["a"])
    assert door.sent == [("a", 0), ("b", 0), ("b", 1), ("b", 2), ("c", 0)]
    # A child that comes late belongs to those inside, though others wait.
    door.submit("d", need(d=1))
    door.submit("b", need(b=6), 3)
    assert door.sent[-1] == ("b", 3)
    assert door.admission.waiting == 1


def test_giving_up_one_that_waits_lets_those_behind_it_through():
    door = Door()
    door.submit("a", need(a=6))
    door.submit("large", need(l=9))
    door.submit("small", need(s=1))
    door.admission.finish(["large"])
    assert [uid for uid, _ in door.sent] == ["a", "small"]
    assert door.budget.used["bank_rows"] == 7


def test_several_that_end_together_make_room_together():
    door = Door()
    for uid in "ab":
        door.submit(uid, need(**{uid: 5}))
    door.submit("all", need(x=10))
    door.admission.finish(["a", "b", "a", "never heard of"])
    assert door.sent[-1] == ("all", 0)
    assert door.budget.used["bank_rows"] == 10


def test_one_that_ended_may_come_again():
    door = Door()
    door.submit("a", need(a=6))
    door.admission.finish(["a"])
    door.submit("a", need(a=6), 1)
    assert door.sent == [("a", 0), ("a", 1)]
    door.admission.finish(["a"])
    assert door.budget.used["bank_rows"] == 0


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
            door.submit(uid, need(**rows), nth)
        assert door.sent == expected
        assert door.admission.waiting == len(queue)
        assert door.budget.used["bank_rows"] == used() <= ROWS
    door.admission.finish([*inside, *(uid for uid, *_ in queue)])
    assert door.sent == expected
    assert door.admission.waiting == 0
    assert set(door.budget.used.values()) == {0}
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
    assert not any(door.budget.used.values())


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
