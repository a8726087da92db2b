"""Rows on their way to the sinks: each gets its own, exactly, and outputs say what became of it."""

import asyncio
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.answers import answer, output, rows, shape_of, vector
from support.plans import plan_of
from support.sinking import Keeping

from midstream.plan import Capture, ModelShape, Plan
from midstream.plan.sink_target import NO_METADATA, Metadata
from midstream.results.arrays import Heads
from midstream.results.receipt import CaptureResult
from midstream.runtime.frontend.admitted import AdmittedRequest
from midstream.runtime.frontend.request.sink_routes import SinkRoute
from midstream.runtime.frontend.results.assembly import assemble
from midstream.runtime.frontend.results.delivery import FinishedRequest, deliver, deliver_soon
from midstream.runtime.frontend.results.partial_rows import PartialRows, RequestProgress
from midstream.sinks.delivery import run_puts
from midstream.sinks.queue import SinkQueue
from midstream.sinks.sink_set import Pace

PRE, POST = ("resid_pre", 0), ("resid_post", 1)
EVERYWHERE = ((0, None),)
OWN = Plan((Capture(1, sink="one"),))


class Sinks:
    """As SinkSet, of sinks that are made here."""

    def __init__(self, **sinks):
        self.queues = {name: SinkQueue(name, sink, 1 << 20) for name, sink in sinks.items()}

    def queue(self, name):
        return self.queues[name]

    def drain(self):
        for queue in self.queues.values():
            queue.drain()


@pytest.fixture
def one():
    return Keeping()


@pytest.fixture
def two():
    return Keeping()


@pytest.fixture
def sinks(one, two):
    made = Sinks(one=one, two=two)
    yield made
    for queue in made.queues.values():
        queue.close()


def route(sink, captures, count, metadata=NO_METADATA):
    return SinkRoute(sink, "t", f"name-{sink}", metadata, captures, len(captures) == count)


def finished(plan, answers, **shape):
    """An output whose rows have been fetched."""
    found = output(**shape)
    found.prompt = "abc"
    for completion in found.outputs:
        completion.text = "de"
    found.results = assemble(found, AdmittedRequest("u", plan), answers, shape_of())
    return found


def delivered(sinks, admitted, found, how="deliver", partial=None):
    whole = FinishedRequest(admitted, found, shape_of(), found.results, partial)
    if how == "deliver":
        pending = deliver(sinks, whole)
        sinks.drain()
    else:
        pending = asyncio.run(deliver_soon(sinks, whole))
        assert pending.is_done
    pending.set_results(found)


BOTH = plan_of(captures=[([PRE, POST], EVERYWHERE), ([POST], ((2, 3),))], prompt_len=3)
ROWS = [answer(("x", [2] * 4, [rows([PRE, POST], range(4))]))]


@pytest.mark.parametrize("how", ["deliver", "deliver_soon"])
def test_a_sink_of_all_captures_gets_what_the_output_would_have(sinks, one, how):
    found = finished(BOTH, ROWS)
    expected = found.results[0].activations
    metadata = Metadata({"a": 1})
    delivered(
        sinks, AdmittedRequest("u", BOTH, OWN, (route("one", (0, 1), 2, metadata),)), found, how
    )
    (given,) = one.given
    assert given.activations is expected
    assert (given.name, given.tag, given.metadata) == ("name-one", "t", {"a": 1})
    assert (given.request_id, given.completion, given.completions) == ("x", 0, 1)
    assert (given.prompt, given.prompt_token_ids) == ("abc", (100, 101, 102))
    assert (given.text, given.generated_token_ids) == ("de", (200, 201))
    assert (given.prompt_tokens, given.finish_reason, given.plan) == (3, "length", OWN)
    assert (given.piece, given.is_last, given.receipt.status) == (0, True, "ok")
    assert found.activations is None
    assert found.outputs[0].activations is None


@pytest.mark.parametrize("how", ["deliver", "deliver_soon"])
def test_each_place_gets_the_rows_of_its_own_captures_and_no_others(sinks, one, how):
    found = finished(BOTH, ROWS)
    routes = (route("one", (1,), 2), route("memory", (0,), 2))
    delivered(sinks, AdmittedRequest("u", BOTH, OWN, routes), found, how)
    (given,) = one.given
    assert list(given.activations) == [POST]
    assert given.activations[POST].tolist() == [vector(POST, 2)]
    assert given.activations.positions.tolist() == [2]
    assert given.activations.token_ids.tolist() == [102]
    assert list(found.activations) == [PRE, POST]
    assert found.activations[POST].tolist() == [vector(POST, p) for p in range(4)]
    assert found.activations is found.outputs[0].activations
    assert found.capture_results == {
        "one": CaptureResult(paths=("name-one",)),
        "memory": CaptureResult(),
    }


def test_two_sinks_at_once_each_say_what_became_of_theirs(sinks, one, two):
    two.fails = {"write name-two"}
    found = finished(BOTH, ROWS)
    routes = (route("one", (0, 1), 2), route("two", (0, 1), 2))
    delivered(sinks, AdmittedRequest("u", BOTH, OWN, routes), found)
    assert one.given[0].activations is two.given[0].activations
    assert found.capture_results["one"].status == "ok"
    assert found.capture_results["two"].status == "error"
    assert found.receipt.status == "error"
    assert found.receipt.problems == ("sink two: OSError: no write name-two",)
    assert [sink for sink, _ in found.receipt.kept] == ["one", "two"]
    assert found.receipt is found.outputs[0].receipt


class AsTheyCome:
    """As SinkSet, of which `one` wants rows as they come."""

    def pace(self, name):
        return Pace(0.0, 1) if name == "one" else None


class Telling:
    """A queue whose sink has told of each delivery."""

    def __init__(self, result):
        self.result = result

    def queue(self, name):
        return self

    def put(self, delivery, size):
        done = Future()
        done.set_result(self.result)
        return done


def begun(asked, results):
    """The pieces of a request of which two positions came in two pieces, and its end's answers."""
    partial = PartialRows(asked, "x", 1, AsTheyCome(), shape_of())
    for position, result in enumerate(results):
        partial.request({"x": RequestProgress("abc", (100, 101, 102), ())})
        partial.receive([answer(("x", [], [rows([PRE, POST], [position])]))])
        run_puts(partial.pieces(), Telling(result))
    return partial, [answer(("x", [2] * 4, [rows([PRE, POST], [2, 3])]))]


@pytest.mark.parametrize("how", ["deliver", "deliver_soon"])
def test_the_last_piece_has_what_is_left_and_the_result_is_that_of_all(sinks, one, how):
    own = Plan((Capture(1, sink="one"), Capture(1)))
    asked = AdmittedRequest("u", BOTH, own, (route("one", (0, 1), 2), route("memory", (0,), 2)))
    first, second = CaptureResult(paths=("a",)), CaptureResult("partial", "half of it", ("b", "a"))
    partial, answers = begun(asked, [first, second])
    one.results = [CaptureResult(paths=("c",), manifest={"all": 3})]
    found = output()
    found.prompt, found.outputs[0].text = "abc", "de"
    found.results = assemble(
        found, AdmittedRequest("u", BOTH), answers, shape_of(), partial.received()
    )
    delivered(sinks, asked, found, how, partial)
    (given,) = one.given
    assert (given.piece, given.is_last, given.text) == (2, True, "de")
    assert given.activations.positions.tolist() == [2, 3]
    assert [each.actual for each in given.receipt.captured] == [4, 4]
    assert found.activations.positions.tolist() == [0, 1, 2, 3]
    assert found.capture_results["one"] == CaptureResult("partial", "half of it", ("a", "b", "c"))
    assert found.capture_results["one"].manifest == {"all": 3}
    assert found.receipt.problems == ("sink one: half of it",)
    assert partial.endings() == [], "it would be ended twice"


@pytest.mark.parametrize("sink", ["one", "memory"])
def test_rows_that_did_not_come_make_the_result_partial(sinks, sink):
    missing = [answer(("x", [2] * 4, [rows([PRE, POST], range(3))]))]
    found = finished(BOTH, missing)
    problems = found.results[0].receipt.problems
    assert problems
    delivered(sinks, AdmittedRequest("u", BOTH, OWN, (route(sink, (0, 1), 2),)), found)
    result = found.capture_results[sink]
    assert (result.status, result.reason) == ("partial", "6 of 8 rows came")
    assert found.receipt.problems == problems, "that rows are missing is said once"


def test_several_completions_have_a_delivery_and_a_result_each(sinks, one):
    plan = plan_of(captures=[([POST], EVERYWHERE)], prompt_len=3)
    answers = [answer(*((f"{n}_x", [2] * 4, [rows([POST], range(4), n)]) for n in range(2)))]
    one.results = [CaptureResult(paths=("a",)), CaptureResult("error", "gone")]
    found = finished(plan, answers, completions=2)
    delivered(sinks, AdmittedRequest("u", plan, OWN, (route("one", (0,), 1),)), found)
    assert [(d.completion, d.completions) for d in one.given] == [(0, 2), (1, 2)]
    assert [d.activations[POST][0].tolist() for d in one.given] == [
        vector(POST, 0, 0),
        vector(POST, 0, 1),
    ]
    assert [c.capture_results["one"].status for c in found.outputs] == ["ok", "error"]
    assert [c.receipt.status for c in found.outputs] == ["ok", "error"]
    assert found.capture_results == {"one": CaptureResult("error", "gone", ("a",))}
    assert not hasattr(found, "activations")


@pytest.mark.parametrize("metrics", [None, SimpleNamespace(), SimpleNamespace(extras={"x": 1})])
def test_the_manifest_of_npz_is_also_the_outputs(metrics):
    npz = Keeping()
    npz.results = [CaptureResult(manifest={"files": []})]
    sinks = Sinks(npz=npz)
    found = finished(BOTH, ROWS)
    found.metrics = metrics
    extras = dict(getattr(metrics, "extras", {}))
    delivered(sinks, AdmittedRequest("u", BOTH, OWN, (route("npz", (0, 1), 2),)), found)
    assert found.activation_manifest == found.outputs[0].activation_manifest == {"files": []}
    if metrics is not None:
        assert metrics.extras == {**extras, "activation_manifest": {"files": []}}
    sinks.queue("npz").close()


def test_a_request_that_captures_nothing_has_no_results(sinks, one):
    plan = plan_of(edits=[], probes=[("p", PRE, EVERYWHERE)], prompt_len=3)
    found = finished(plan, [answer(("x", [3] * 4, []), scores=[(0, [[1.0]] * 4)], taps=[PRE])])
    receipt = found.results[0].receipt
    delivered(sinks, AdmittedRequest("u", plan, None, ()), found)
    assert found.capture_results is None
    assert found.activation_manifest is None
    assert found.receipt is receipt
    assert one.given == []


Z = ("z", 1)
OF_HEADS = ModelShape(2, 4, (), heads={Z: 2})


def of_heads(*captures, routes=None):
    """An output with rows of 2 heads of 2 at `z`, as captures of it show them."""
    plan = plan_of(captures=[([Z, POST], EVERYWHERE)] * len(captures), prompt_len=3)
    routes = routes or (route("memory", tuple(range(len(captures))), len(captures)),)
    found = finished(plan, [answer(("x", [2] * 4, [rows([Z, POST], range(4))]))])
    asked = AdmittedRequest("u", plan, Plan(captures), routes)
    return asked, FinishedRequest(asked, found, OF_HEADS, found.results)


@pytest.mark.parametrize(
    ("heads", "shown"),
    [
        ([None], None),
        ([1], (1,)),
        ([1, 0], (1, 0)),
        ([0, 0], (0,)),
        ([1, None], None),
        ([None, 1], None),
        ([None, 0, 1], None),
    ],
)
def test_outputs_show_the_heads_of_any_capture_of_a_tap(sinks, heads, shown):
    captures = tuple(Capture(1, "z", [n], heads=one) for n, one in enumerate(heads))
    _, whole = of_heads(*captures)
    deliver(sinks, whole).set_results(whole.output)
    activations = whole.output.activations
    assert activations.heads == {Z: Heads(2, shown)}
    values = torch.tensor([vector(Z, p) for p in range(4)]).view(4, 2, 2)
    assert torch.equal(activations[Z], values if shown is None else values[:, list(shown)])
    assert activations[POST].shape == (4, 4)
    assert whole.output.receipt.status == "ok"
    assert {one.site: one.actual for one in whole.output.receipt.captured} == {
        "z": 4, "resid_post": 4,
    }  # fmt: skip


def test_sinks_get_whole_vectors_of_what_the_output_has_by_head(sinks, one):
    captures = Capture(1, "z", heads=1), Capture(1, "z", [0], sink="one")
    asked, whole = of_heads(*captures, routes=(route("one", (0, 1), 2), route("memory", (0, 1), 2)))
    pending = deliver(sinks, whole)
    sinks.drain()
    pending.set_results(whole.output)
    (given,) = one.given
    assert given.activations[Z].tolist() == [vector(Z, p) for p in range(4)]
    assert whole.output.activations[Z].shape == (4, 2, 2)
    assert asked.heads((0,), OF_HEADS) == {Z: Heads(2, (1,))}


def test_captures_of_every_request_have_all_heads_and_sketches_none():
    asked, _ = of_heads(Capture(1, "z", heads=1))
    everywhere = replace(asked.plan, captures=(replace(asked.plan.captures[0], source=-1),))
    assert replace(asked, plan=everywhere, own=None).heads((0,), OF_HEADS) == {Z: Heads(2)}
    sketches = replace(asked.plan, codec="rp8:k=2,seed=0")
    assert replace(asked, plan=sketches).heads((0,), OF_HEADS) == {}
    assert asked.heads((0,), shape_of()) == {}
