"""Rows that come while a request runs: put together they are those of the end alone."""

from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from support.answers import WIDTH, answer, assemble_on, output, rows, shape_of, vector
from support.plans import plan_of

from midstream.plan import Capture, ModelShape, Plan
from midstream.plan.positions.automaton import Automaton, Marks, automaton_of
from midstream.plan.positions.position_set import Match, Where
from midstream.plan.sink_target import NO_METADATA
from midstream.runtime.frontend.admitted import AdmittedRequest
from midstream.runtime.frontend.request.sink_routes import SinkRoute
from midstream.runtime.frontend.results import partial_rows as module
from midstream.runtime.frontend.results.partial_rows import (
    PartialRows,
    RequestProgress,
    lengths_of,
    running_of,
)
from midstream.sinks.sink_set import Pace

PRE, POST = ("resid_pre", 0), ("resid_post", 1)
EVERYWHERE = ((0, None),)
PROMPT = (100, 101, 102)
ROW_BYTES = 4 * WIDTH
MARKS = Marks((201,), (203,))
MARKED = Where(
    ((0, 1),), (Match(((3, None),), automaton=automaton_of(3, [(MARKS, MARKS.first)], [])),)
)
WHERES = [
    MARKED,
    Where(EVERYWHERE),
    Where(((0, 2), (5, 7))),
    Where(((3, None),)),
    Where((), (Match(((3, None),), (201, 203)),)),
    Where((), last_from=3),
    Where(((0, 1),), (Match(((3, None),), (200,), others=True),), last_from=2),
]


class Sinks:
    """Those called `rows…` want rows as they come."""

    def __init__(self, seconds=0.0, nbytes=1 << 20):
        self._pace = Pace(seconds, nbytes)

    def pace(self, name):
        return self._pace if name.startswith("rows") else None


def route(sink, captures, count=2):
    return SinkRoute(sink, "t", f"name-{sink}", NO_METADATA, captures, len(captures) == count)


def resolved(*wheres):
    captures = [([PRE, POST] if nth % 2 else [POST], ((0, 1),)) for nth in range(len(wheres))]
    plan = plan_of(captures=captures, prompt_len=3)
    pairs = zip(plan.captures, wheres, strict=True)
    return replace(plan, captures=tuple(replace(one, where=where) for one, where in pairs))


OWN = Plan((Capture(1), Capture([0, 1])))


def partial_rows_of(plan, routes, own=OWN, sinks=None, completions=1):
    found = PartialRows(
        AdmittedRequest("u", plan, own, routes), "x", completions, sinks or Sinks(), shape_of()
    )
    found.ids += ["x"] if completions == 1 else [f"{n}_x" for n in range(completions)]
    return found


def put(partial):
    """What sinks get now; they have not told what became of it."""
    puts, found = partial.pieces(), []
    one = next(puts, None)
    while one is not None:
        found.append(one)
        try:
            one = puts.send(Future())
        except StopIteration:
            one = None
    return found


def known(generated, prompt=PROMPT):
    return RequestProgress("abc", prompt, tuple(200 + n for n in range(generated)))


def handed(positions, name="x"):
    """A worker's answer: the rows of these positions, all in one step."""
    found = [rows([PRE, POST], positions, 0)] if len(positions) else []
    return [answer((name, [], found), taps=(PRE, POST))]


def told(activations):
    """{(tap, position): (the vector, the token)}"""
    return {
        (tap, int(position)): (value.tolist(), int(token))
        for tap, values in activations.items()
        for value, position, token in zip(
            values, activations.positions_of(*tap), activations.token_ids_of(*tap), strict=True
        )
    }


@settings(max_examples=120)
@given(
    wheres=st.lists(st.sampled_from(WHERES), min_size=2, max_size=2),
    steps=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    also_memory=st.booleans(),
)
def test_pieces_and_the_rest_are_what_the_end_alone_would_have_shown(wheres, steps, also_memory):
    plan = resolved(*wheres)
    routes = (route("rows", (0, 1)), *([route("memory", (0,))] if also_memory else []))
    partial, given_out, generated, reached = partial_rows_of(plan, routes), {}, 0, 0
    for step in steps:
        generated += step
        stop = partial.request({"x": known(generated)})["x"]
        assert stop <= 3 + generated - 1
        come = range(reached, max(reached, stop))
        reached = max(reached, stop)
        partial.receive(handed(come))
        for one in put(partial):
            delivery = one.delivery
            assert (one.sink, delivery.completion, delivery.is_last) == ("rows", 0, False)
            now = told(delivery.activations)
            assert one.size == len(now) * ROW_BYTES > 0
            assert not set(now) & set(given_out)
            given_out |= now
            sums = {one.site: one.actual for one in delivery.receipt.captured}
            assert sum(sums.values()) == len(given_out)
            assert all(one.actual == one.expected for one in delivery.receipt.captured)
    generated += 1
    last = handed(range(reached, 3 + generated - 1))
    whole = output(generated=generated)
    results = assemble_on(whole, plan, last, "float32", partial.received())
    tokens = [*PROMPT, *range(200, 200 + generated)][:-1]
    found, size = partial.last_rows(routes[0], 0, results[0].blocks, tokens)
    rest = told(found)
    assert size == len(rest) * ROW_BYTES
    assert not set(rest) & set(given_out)
    alone = output(generated=generated)
    assemble_on(alone, plan, handed(range(3 + generated - 1)), "float32")
    assert {**given_out, **rest} == told(alone.activations)
    assert whole.receipt == alone.receipt
    assert whole.receipt.problems == ()
    if also_memory:
        assert told(whole.activations) == told(alone.activations)


@settings(max_examples=80)
@given(
    wheres=st.lists(st.sampled_from(WHERES), min_size=2, max_size=2),
    steps=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=6),
    is_delta=st.booleans(),
)
def test_outputs_show_what_is_there_for_the_tokens_that_they_show(wheres, steps, is_delta):
    plan = resolved(*wheres)
    own = Plan((Capture(1, stream=True), Capture([0, 1])))
    partial = partial_rows_of(plan, (route("memory", (0, 1)),), own)
    assert partial.is_streamed
    generated, reached, before = 0, 0, {}
    for step, ahead in steps:
        generated += step
        # Others may have asked for more than this output shows.
        stop = max(reached, partial.stop(3 + generated + ahead))
        partial.receive(handed(range(reached, stop)))
        reached = stop
        tokens = np.array([*PROMPT, *range(200, 200 + generated)])
        shown = told(partial.shown(tokens, is_delta))
        assert not is_delta or not set(shown) & set(before)
        before = {**before, **shown} if is_delta else shown
        certain = replace(wheres[0], last_from=None)
        stop = partial.stop(3 + generated)
        wanted = [p for a, b in certain.final(stop, tokens[:stop].tolist()) for p in range(a, b)]
        assert before == {(POST, p): (vector(POST, p), int(tokens[p])) for p in wanted}


def test_tokens_between_marks_are_read_once_by_rows_that_come_in_pieces(monkeypatch):
    read, selected = [], Automaton.selected

    def counted(self, token, *args):
        def told(position):
            read.append(position)
            return token(position)

        return selected(self, told, *args)

    monkeypatch.setattr(Automaton, "selected", counted)
    partial = partial_rows_of(resolved(MARKED, MARKED), (route("rows", (0, 1)),))
    for generated in range(1, 60):
        stop = partial.request({"x": known(generated)})["x"]
        partial.receive(handed([stop - 1]))
        put(partial)
    # By each of two groups of captures: those of one tap, and those of the other.
    assert max(Counter(read).values()) <= 3


def test_outputs_show_heads_and_sinks_get_whole_vectors():
    plan = plan_of(captures=[([POST], EVERYWHERE)] * 2, prompt_len=3)
    own = Plan((Capture(1, heads=1, stream=True), Capture(1, sink="rows")))
    asked = AdmittedRequest("u", plan, own, (route("memory", (0,)), route("rows", (1,))))
    partial = PartialRows(asked, "x", 1, Sinks(), ModelShape(2, WIDTH, (), heads={POST: 2}))
    partial.ids.append("x")
    partial.request({"x": known(2)})
    partial.receive(handed(range(4)))
    tokens = np.array([*PROMPT, 200, 201])
    values = np.array([vector(POST, p) for p in range(4)])
    shown = partial.shown(tokens, is_delta=True)
    assert shown[POST].tolist() == values.reshape(4, 2, 2)[:, [1]].tolist()
    (given,) = put(partial)
    assert given.delivery.activations[POST].tolist() == values.tolist()


def test_a_request_whose_rows_nobody_wants_before_its_end_has_none():
    plan = resolved(Where(EVERYWHERE), Where(EVERYWHERE))
    asked = AdmittedRequest("u", plan, OWN, (route("memory", (0,)), route("store", (1,))))
    assert PartialRows.of(asked, "x", 1, Sinks(), shape_of()) is None
    other = replace(asked, routes=(route("rows", (0, 1)),))
    assert PartialRows.of(other, "x", 1, Sinks(), shape_of())


def test_rows_are_due_after_a_time_or_when_there_are_many(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    plan = plan_of(captures=[([PRE, POST], EVERYWHERE)], prompt_len=3)
    two = 2 * ROW_BYTES
    partial = partial_rows_of(plan, (route("rows", (0,), 1),), sinks=Sinks(1.0, 10 * two))
    assert not partial.is_due({}), "it has not been sent"
    assert not partial.is_due({"x": 0})
    assert not partial.is_due({"x": 7}), "nine rows are fewer than ten"
    assert partial.is_due({"x": 8})
    clock[0] = 1.0
    assert partial.is_due({"x": 0}), "of a prompt nobody knows how far it is"
    partial.request({"x": known(1)})
    assert not partial.is_due({"x": 2})
    clock[0] = 2.0
    assert not partial.is_due({"x": 1}), "there is nothing new"
    assert partial.is_due({"x": 2})


def test_who_has_the_rows_on_the_output_keeps_them_and_nobody_else():
    plan = plan_of(captures=[([POST], EVERYWHERE), ([PRE], EVERYWHERE)], prompt_len=3)
    for routes, is_kept in (
        ((route("rows", (0, 1)),), False),
        ((route("rows", (0,)), route("rows2", (1,))), False),
        ((route("rows", (0,)), route("memory", (1,))), True),
    ):
        partial = partial_rows_of(plan, routes)
        partial.request({"x": known(1)})
        assert partial.receive(handed(range(3))) == 2 * 3 * ROW_BYTES
        (block,) = partial.received()[0]
        assert block.is_bare != is_kept
        assert len(put(partial)) == sum(one.sink.startswith("rows") for one in routes)
        assert put(partial) == []


def test_a_request_without_an_end_ends_for_those_who_had_some_of_it():
    plan = plan_of(captures=[([POST], EVERYWHERE)], prompt_len=3)
    one = route("rows", (0,), 1)
    partial = partial_rows_of(plan, (one,), completions=3)
    assert partial.endings() == []
    for nth in (0, 2):
        partial.request({f"{nth}_x": known(2)})
        partial.receive(handed(range(4), name=f"{nth}_x"))
        for given_out in put(partial):
            delivery = given_out.delivery
            assert (delivery.completion, delivery.completions) == (nth, 3)
    partial.end(one, 0)
    ((found, ending),) = partial.endings()
    assert found == one
    assert (ending.completion, ending.piece, ending.is_last) == (2, 1, True)
    assert (ending.finish_reason, ending.receipt.status) == ("abort", "error")
    assert ending.receipt.captured[0].actual == 4
    assert ending.activations.keys() == (POST,)
    assert len(ending.activations.positions) == 0


@pytest.mark.parametrize("prompt", [None, [5, 6]])
def test_what_vllm_knows_of_those_that_run_is_a_copy(prompt):
    made = SimpleNamespace(output_token_ids=[1, 2])
    states = {"a": SimpleNamespace(prompt="p", prompt_token_ids=prompt, detokenizer=made)}
    assert lengths_of(states, ["a", "gone"]) == {"a": 2}
    found = running_of(states, ["a", "gone"])
    made.output_token_ids.append(3)
    assert found == {"a": RequestProgress("p", None if prompt is None else (5, 6), (1, 2))}
