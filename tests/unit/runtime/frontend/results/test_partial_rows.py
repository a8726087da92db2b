"""Rows that come while a request runs: put together they are those of the end alone."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from support.answers import WIDTH, answer, output, rows, vector
from support.plans import plan_of

from midstream.results.receipt import CaptureResult
from midstream.runtime.frontend.admitted import AdmittedRequest
from midstream.runtime.frontend.request.sink_routes import Route
from midstream.runtime.frontend.results import partial_rows as module
from midstream.runtime.frontend.results.assembly import assemble
from midstream.runtime.frontend.results.partial_rows import PartialRows
from midstream.runtime.frontend.results.progress import RequestProgress, lengths_of, running_of
from midstream.sinks.sink_set import Pace
from midstream.spec import Capture, Plan
from midstream.spec.positions.position_set import Match, Where
from midstream.spec.sink_target import NO_METADATA

PRE, POST = ("resid_pre", 0), ("resid_post", 1)
EVERYWHERE = ((0, None),)
VECTORS = (WIDTH, torch.float32)
PROMPT = (100, 101, 102)
ROW_BYTES = 4 * WIDTH
WHERES = [
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
    return Route(sink, "t", f"name-{sink}", NO_METADATA, captures, len(captures) == count)


def resolved(*wheres):
    captures = [([PRE, POST] if nth % 2 else [POST], ((0, 1),)) for nth in range(len(wheres))]
    plan = plan_of(captures=captures, prompt_len=3)
    pairs = zip(plan.captures, wheres, strict=True)
    return replace(plan, captures=tuple(replace(one, where=where) for one, where in pairs))


OWN = Plan((Capture(1), Capture([0, 1])))


def pieces_of(plan, routes, own=OWN, sinks=None, completions=1):
    found = PartialRows(
        AdmittedRequest("u", plan, own, routes), "x", completions, sinks or Sinks(), VECTORS
    )
    found.ids += ["x"] if completions == 1 else [f"{n}_x" for n in range(completions)]
    return found


def known(generated, prompt=PROMPT):
    return RequestProgress("abc", prompt, tuple(200 + n for n in range(generated)))


def handed(positions, version=0, taps=(PRE, POST), name="x"):
    """A worker's answer: the rows of these positions, all in one step."""
    found = [rows(list(taps), positions, version)] if len(positions) else []
    return [answer((name, [], found), taps=taps)]


def told(activations):
    """{(tap, position): (the vector, the token)}"""
    return {
        (tap, int(position)): (value.tolist(), int(token))
        for tap, values in activations.items()
        for value, position, token in zip(
            values,
            activations.positions_of(*tap),
            activations.token_ids_of(*tap),
            strict=True,
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
    pieces, given_out, generated, reached = pieces_of(plan, routes), {}, 0, 0
    for step in steps:
        generated += step
        stop = pieces.ask({"x": known(generated)})["x"]
        assert stop <= 3 + generated - 1
        come = range(reached, max(reached, stop))
        reached = max(reached, stop)
        pieces.take_in(handed(come))
        for found, index, delivery, size in pieces.deliveries():
            assert (found, index, delivery.is_last) == (routes[0], 0, False)
            now = told(delivery.activations)
            assert size == len(now) * ROW_BYTES > 0
            assert not set(now) & set(given_out)
            given_out |= now
            sums = {one.site: one.actual for one in delivery.receipt.captured}
            assert sum(sums.values()) == len(given_out)
            assert all(one.actual == one.expected for one in delivery.receipt.captured)
            pieces.note(found, index, Future())
    generated += 1
    last = handed(range(reached, 3 + generated - 1))
    whole = output(generated=generated)
    blocks = assemble(whole, plan, last, "float32", pieces.before())
    tokens = [*PROMPT, *range(200, 200 + generated)][:-1]
    rest = told(pieces.rest(routes[0], 0, blocks[0], tokens))
    assert not set(rest) & set(given_out)
    alone = output(generated=generated)
    assemble(alone, plan, handed(range(3 + generated - 1)), "float32")
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
    pieces = pieces_of(plan, (route("memory", (0, 1)),), own)
    assert pieces.is_streamed
    generated, reached, before = 0, 0, {}
    for step, ahead in steps:
        generated += step
        # Others may have asked for more than this output shows.
        stop = max(reached, pieces.stop(3 + generated + ahead))
        pieces.take_in(handed(range(reached, stop)))
        reached = stop
        tokens = np.array([*PROMPT, *range(200, 200 + generated)])
        shown = told(pieces.shown(tokens, is_delta))
        assert not is_delta or not set(shown) & set(before)
        before = {**before, **shown} if is_delta else shown
        certain = replace(wheres[0], last_from=None)
        stop = pieces.stop(3 + generated)
        wanted = [p for a, b in certain.final(stop, tokens[:stop].tolist()) for p in range(a, b)]
        assert before == {(POST, p): (vector(POST, p), int(tokens[p])) for p in wanted}


def test_a_request_whose_rows_nobody_wants_before_its_end_has_none():
    plan = resolved(Where(EVERYWHERE), Where(EVERYWHERE))
    asked = AdmittedRequest("u", plan, OWN, (route("memory", (0,)), route("store", (1,))))
    assert PartialRows.of(asked, "x", 1, Sinks(), VECTORS) is None
    assert PartialRows.of(replace(asked, routes=(route("rows", (0, 1)),)), "x", 1, Sinks(), VECTORS)


def test_rows_are_due_after_a_time_or_when_there_are_many(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    plan = plan_of(captures=[([PRE, POST], EVERYWHERE)], prompt_len=3)
    two = 2 * ROW_BYTES
    pieces = pieces_of(plan, (route("rows", (0,), 1),), sinks=Sinks(1.0, 10 * two))
    assert not pieces.is_due({}), "it has not been sent"
    assert not pieces.is_due({"x": 0})
    assert not pieces.is_due({"x": 7}), "nine rows are fewer than ten"
    assert pieces.is_due({"x": 8})
    clock[0] = 1.0
    assert pieces.is_due({"x": 0}), "of a prompt nobody knows how far it is"
    pieces.ask({"x": known(1)})
    assert not pieces.is_due({"x": 2})
    clock[0] = 2.0
    assert not pieces.is_due({"x": 1}), "there is nothing new"
    assert pieces.is_due({"x": 2})


def test_who_has_the_rows_on_the_output_keeps_them_and_nobody_else():
    plan = plan_of(captures=[([POST], EVERYWHERE), ([PRE], EVERYWHERE)], prompt_len=3)
    for routes, is_kept in (
        ((route("rows", (0, 1)),), False),
        ((route("rows", (0,)), route("rows2", (1,))), False),
        ((route("rows", (0,)), route("memory", (1,))), True),
    ):
        pieces = pieces_of(plan, routes)
        pieces.ask({"x": known(1)})
        assert pieces.take_in(handed(range(3))) == 2 * 3 * ROW_BYTES
        (block,) = pieces.before()[0]
        assert block.is_bare != is_kept
        assert len(pieces.deliveries()) == sum(one.sink.startswith("rows") for one in routes)
        assert pieces.deliveries() == []


def test_a_request_without_an_end_ends_for_those_who_had_some_of_it():
    plan = plan_of(captures=[([POST], EVERYWHERE)], prompt_len=3)
    one = route("rows", (0,), 1)
    pieces = pieces_of(plan, (one,), completions=3)
    assert pieces.endings() == []
    for nth in (0, 2):
        pieces.ask({f"{nth}_x": known(2)})
        pieces.take_in(handed(range(4), name=f"{nth}_x"))
        for found, index, delivery, _ in pieces.deliveries():
            assert (index, delivery.completion, delivery.completions) == (nth, nth, 3)
            done: Future[CaptureResult] = Future()
            pieces.note(found, index, done)
    pieces.end(one, 0)
    ((found, ending),) = pieces.endings()
    assert found == one
    assert (ending.completion, ending.piece, ending.is_last) == (2, 1, True)
    assert (ending.finish_reason, ending.receipt.status) == ("abort", "error")
    assert ending.receipt.captured[0].actual == 4
    assert ending.activations.keys() == (POST,)
    assert len(ending.activations.positions) == 0


def test_a_prompt_of_embeddings_has_no_token_ids():
    plan = plan_of(captures=[([POST], EVERYWHERE)], prompt_len=3)
    pieces = pieces_of(plan, (route("rows", (0,), 1),))
    pieces.ask({"x": known(2, None)})
    pieces.take_in(handed(range(4)))
    ((_, _, delivery, _),) = pieces.deliveries()
    assert delivery.prompt_token_ids is None
    assert delivery.activations.token_ids.tolist() == [0, 0, 0, 200]


@pytest.mark.parametrize("prompt", [None, [5, 6]])
def test_what_vllm_knows_of_those_that_run_is_a_copy(prompt):
    made = SimpleNamespace(output_token_ids=[1, 2])
    states = {"a": SimpleNamespace(prompt="p", prompt_token_ids=prompt, detokenizer=made)}
    assert lengths_of(states, ["a", "gone"]) == {"a": 2}
    found = running_of(states, ["a", "gone"])
    made.output_token_ids.append(3)
    assert found == {"a": RequestProgress("p", None if prompt is None else (5, 6), (1, 2))}
