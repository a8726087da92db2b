"""Rows of an async engine's requests on their way: to sinks and outputs at once, none lost."""

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace

from support.answers import WIDTH, answer, rows, shape_of
from support.plans import plan_of

from midstream.plan import Capture, Plan
from midstream.plan.sink_target import NO_METADATA
from midstream.results.receipt import CaptureResult
from midstream.runtime.frontend.admitted import AdmittedRequest
from midstream.runtime.frontend.request.call_plan import CallPlan
from midstream.runtime.frontend.request.sink_routes import SinkRoute
from midstream.runtime.frontend.results.call import GenerateCall
from midstream.runtime.frontend.results.partial_rows import PartialRows
from midstream.runtime.frontend.results.partial_scores import StreamState
from midstream.runtime.frontend.results.row_streamer import RowStreamer
from midstream.runtime.frontend.rpc.background_tasks import BackgroundTasks
from midstream.runtime.frontend.rpc.replicas import Replica
from midstream.sinks.sink_set import Pace

POST = ("resid_post", 1)
PROMPT = [100, 101, 102]


class Sinks:
    """One that wants rows as they come; as SinkSet, and its own queue."""

    def __init__(self):
        self.given = []
        self.has_room = asyncio.Event()
        self.has_room.set()

    def pace(self, name):
        return Pace(0.0, 1) if name == "rows" else None

    def queue(self, name):
        assert name == "rows"
        return self

    async def put_soon(self, delivery, size):
        await self.has_room.wait()
        self.given.append(delivery)
        done: Future[CaptureResult] = Future()
        done.set_result(CaptureResult())
        return done

    def put_empty(self, delivery):
        self.given.append(delivery)

    @property
    def positions(self):
        return [p for one in self.given for p in one.activations.positions.tolist()]


class Batcher:
    """Hands over each position once, when it may."""

    def __init__(self):
        self.reached = 0
        self.asked = []
        self.may = asyncio.Event()
        self.may.set()

    async def collect_partial(self, uid, stops):
        self.asked.append(stops["x"])
        await self.may.wait()
        come = range(self.reached, max(self.reached, stops["x"]))
        self.reached = max(self.reached, stops["x"])
        found = [rows([POST], come)] if come else []
        return [answer(("x", [], found), taps=[POST])]


class Running:
    """A request that runs, and all that sees to it."""

    def __init__(self):
        captures = [([POST], ((0, None),)), ([POST], ((0, None),))]
        plan = plan_of(captures=captures, prompt_len=3)
        routes = (
            SinkRoute("memory", "", "", NO_METADATA, (0,), False),
            SinkRoute("rows", "", "n", NO_METADATA, (1,), False),
        )
        own = Plan((Capture(1, stream=True), Capture(1, sink="rows")))
        self.sinks, self.batcher, self.came = Sinks(), Batcher(), []
        self.call = GenerateCall(CallPlan(None), admitted=AdmittedRequest("u", plan, own, routes))
        self.call.replica = Replica(0, self.batcher)
        self.call.partial_rows = PartialRows(self.call.admitted, "x", 1, self.sinks, shape_of())
        self.call.partial_rows.ids.append("x")
        self.call.stream = StreamState(plan, PROMPT)
        self.tokens: list[int] = []
        known = SimpleNamespace(output_token_ids=self.tokens)
        self.states = {"x": SimpleNamespace(prompt="p", prompt_token_ids=PROMPT, detokenizer=known)}
        self.streamer = RowStreamer(
            self.sinks, lambda *each: self.came.append(each), BackgroundTasks()
        )

    def see(self, count):
        """So many more tokens are known, and shown."""
        self.tokens += [200] * count
        completion = SimpleNamespace(token_ids=list(self.tokens))
        self.call.stream.record(completion, is_delta=False)


def test_what_an_output_has_fetched_meanwhile_comes_to_the_sink():
    async def work():
        one = Running()
        one.see(1)
        one.batcher.may.clear()
        show = asyncio.create_task(one.streamer.show(one.call, False))
        await asyncio.sleep(0)
        assert not one.streamer.is_due(one.call, one.states), "rows are on their way already"
        give = asyncio.create_task(one.streamer.deliver(one.call, one.states))
        await asyncio.sleep(0)
        one.see(2)
        one.batcher.may.set()
        shown = await show
        again = await one.streamer.show(one.call, False)
        await give
        return one, shown, again

    one, shown, again = asyncio.run(work())
    # What is shown is what was known when it was asked for.
    assert shown.positions.tolist() == [0, 1, 2]
    assert again.positions.tolist() == list(range(5))
    assert one.sinks.positions == list(range(5))
    assert sum(nbytes for _, nbytes in one.came) == 5 * 4 * WIDTH


def test_an_aborted_request_shows_what_is_here_and_asks_nobody():
    async def work():
        one = Running()
        one.see(2)
        await one.streamer.show(one.call, False)
        one.see(3)
        return await one.streamer.show(one.call, True), one.batcher.asked

    shown, asked = asyncio.run(work())
    assert shown.positions.tolist() == [0, 1, 2, 3]
    assert asked == [4]


def test_the_end_waits_for_what_is_on_its_way_and_nothing_follows_it():
    async def work():
        one = Running()
        one.see(1)
        one.sinks.has_room.clear()
        give = asyncio.create_task(one.streamer.deliver(one.call, one.states))
        end = asyncio.create_task(one.streamer.end(one.call))
        await asyncio.sleep(0.01)
        assert not end.done()
        one.sinks.has_room.set()
        await asyncio.gather(give, end)
        one.see(3)
        assert not one.streamer.is_due(one.call, one.states)
        await one.streamer.deliver(one.call, one.states)
        return one

    one = asyncio.run(work())
    assert [(given.piece, given.is_last) for given in one.sinks.given] == [(0, False), (1, True)]
    assert one.sinks.positions == [0, 1, 2]
    assert one.sinks.given[-1].finish_reason == "abort"


def test_of_a_request_that_ended_meanwhile_nothing_is_asked():
    async def work():
        one = Running()
        one.see(1)
        one.states.clear()
        await one.streamer.deliver(one.call, one.states)
        await one.streamer.end(one.call)
        return one

    one = asyncio.run(work())
    assert one.batcher.asked == []
    assert one.sinks.given == []
