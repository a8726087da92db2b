"""Which captures go where, and under which names."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.plans import plan_of

from midstream.plan import Capture, ModelShape, Plan, Prompt
from midstream.plan.resolve.resolve import resolve
from midstream.plan.sink_target import read_name
from midstream.runtime.frontend.request.sink_routes import routes_of, unique_name

SHAPE = ModelShape(4, 4, [("resid_post", layer) for layer in range(4)])
UID = "0123456789abcdef" * 2


def routes(*own: Capture, every: tuple[Capture, ...] = (), max_tokens: int = 5):
    plan = Plan(own) if own else None
    resolved = resolve(plan, SHAPE, Prompt(3), max_tokens, also=every)
    return routes_of(resolved, plan, every, "req-7", UID)


def test_captures_for_one_place_go_together_and_metadata_of_one_is_that_of_all():
    found = routes(
        Capture(0, sink="store", tag="a"),
        Capture(1),
        Capture(2, sink="store", tag="a", metadata={"x": 1}),
        Capture(3, sink="store", tag="b"),
    )
    assert [(r.sink, r.tag, r.captures, r.is_all) for r in found] == [
        ("store", "a", (0, 2), False),
        ("memory", "", (1,), False),
        ("store", "b", (3,), False),
    ]
    assert found[0].metadata == {"x": 1}
    assert found[1].metadata == {}


def test_memory_knows_neither_tags_nor_names():
    (found,) = routes(Capture(0, tag="a", request_id="x"), Capture(1, tag="b"))
    assert (found.sink, found.tag, found.captures, found.is_all) == ("memory", "", (0, 1), True)


def test_a_given_id_is_the_name_and_one_that_is_not_given_is_made_for_each_place():
    found = routes(
        Capture(0, sink="npz", request_id="mine"),
        Capture(1, sink="npz"),
        Capture(2, sink="npz", tag="t"),
        Capture(3, sink="store"),
    )
    assert [r.name for r in found] == [
        "mine", "req-7-0123456789ab", "req-7-0123456789ab-1", "req-7-0123456789ab",
    ]  # fmt: skip


def test_captures_of_every_request_find_their_own_places_also_where_one_was_left_out():
    every = (Capture(1, positions="generated", sink="npz"), Capture(2, sink="log"))
    found = routes(Capture(0), every=every)
    assert [(r.sink, r.captures) for r in found] == [("memory", (0,)), ("npz", (1,)), ("log", (2,))]
    # With one token to generate there is no generated row.
    found = routes(Capture(0), every=every, max_tokens=1)
    assert [(r.sink, r.captures) for r in found] == [("memory", (0,)), ("log", (1,))]
    (alone,) = routes(every=every, max_tokens=1)
    assert (alone.sink, alone.captures, alone.is_all) == ("log", (0,), True)


def test_without_captures_there_are_no_routes():
    assert routes_of(plan_of(edits=[]), None, (), "x", UID) == ()


@given(st.text(max_size=200), st.integers(0, 3))
def test_a_unique_name_is_always_one_that_a_file_can_have(request_id, nth):
    name = unique_name(request_id, UID, nth)
    assert read_name(name) == name
    assert UID[:12] in name


@pytest.mark.parametrize(
    ("request_id", "name"),
    [
        ("cmpl-a/b:c", "cmpl-a_b_c-0123456789ab"),
        ("../../etc/passwd", "_.._etc_passwd-0123456789ab"),
        ("...", "request-0123456789ab"),
        ("", "request-0123456789ab"),
    ],
)
def test_an_id_keeps_what_it_can(request_id, name):
    found = unique_name(request_id, UID, 0)
    assert re.fullmatch(r"[A-Za-z0-9_.-]+", found)
    assert found == name
