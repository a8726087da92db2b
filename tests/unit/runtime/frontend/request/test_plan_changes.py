"""Changes of running requests in the front end: of all or of none, and of whole requests."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from midstream.errors import BusyError, SpecError
from midstream.plan import Plan, ResolvedPlan
from midstream.plan.vectors.vector import Vector
from midstream.runtime.frontend.request.admission import Admission
from midstream.runtime.frontend.request.budget import CapacityBudget, Need
from midstream.runtime.frontend.request.call_plan import CallPlan
from midstream.runtime.frontend.request.plan_changes import PlanChanges
from midstream.runtime.frontend.request.prepared_plan import PreparedPlan
from midstream.runtime.frontend.request.readouts import Registries
from midstream.runtime.frontend.request.sent_vectors import SentVectors
from midstream.runtime.protocol.cache_keys import CacheKeys
from midstream.runtime.protocol.rpc import UpdatedPlan
from midstream.runtime.protocol.segments import Room

pytestmark = pytest.mark.anyio
ROWS = 10
EMPTY = ResolvedPlan(3, (), ())


def need(name: str, rows: int) -> Need:
    empty = {kind: {} for kind in ("programs", "groups", "max_edits", "token_ids")}
    return Need({**empty, "bank_rows": {name: rows}})


class Engine:
    """Running requests; a plan of one takes as many rows as its edits have factors.

    Attributes:
        sent: what was sent to the engine core.
        refused: token ids of prompts for which no change can be carried out.
        ended: uids of requests that have ended there.
        vectors: what the plan of a change names.
        readings: what the engine has: its registered weights; there are none.
    """

    readings = SimpleNamespace(registries=Registries())

    def __init__(self):
        self.budget = CapacityBudget(Room(ROWS, 100, 100, 100, 1))
        self.admission = Admission([self.budget])
        self.sent_vectors, self.brought = SentVectors(None, 0, 0, 1), []
        self.changes = PlanChanges(self, self.admission, [self.sent_vectors])
        self.changes.send_later = self.send
        self.sent, self.refused, self.ended = [], [], set()
        self.vectors = ()

    def add(self, uid, prompt=(1, 2, 3), completions=1, submitted=None):
        """Add a request and submit as many of its completions."""
        params = SimpleNamespace(n=completions)
        request = SimpleNamespace(
            request_id=f"cmpl-{uid}",
            sampling_params=params,
            prompt_token_ids=list(prompt),
            prompt_embeds=None,
        )
        edits = [{"op": "scale", "factor": 2.0, "layer": 1}]
        call_plan = CallPlan(Plan.make(edits=edits))
        self.changes.add(uid, EMPTY, request, call_plan, ((), ()), {})
        for nth in range(completions if submitted is None else submitted):
            self.submit(uid, nth)
        return call_plan

    def submit(self, uid, nth):
        self.changes.submitted(uid, f"{nth}_cmpl-{uid}")
        self.admission.submit(uid, need(uid, 1), lambda: None)

    @staticmethod
    def bind(plan):
        return plan

    def resolve(self, call_plan, before, also, prompt):
        """As the resolver: a plan takes a row for each edit."""
        if prompt.prompt_token_ids in self.refused:
            raise SpecError("edits[0].positions", "the prompt has no such position")
        edits = call_plan.plan.edits
        name = f"{prompt.prompt_token_ids}:{edits}"
        taken = replace(need(name, 2 * len(edits)), vectors=self.vectors)
        return PreparedPlan(EMPTY, taken, b"", CacheKeys((0,), ("",), None))

    async def send(self, replica, message, complete):
        await asyncio.sleep(0)  # as the call of an engine, which is a task
        message = complete(message)
        self.sent.append(message.uid)
        self.brought.append(message.vectors)
        positions = {name: 7 for name in message.request_ids if message.uid not in self.ended}
        return [UpdatedPlan(positions)]


async def test_several_requests_change_together():
    engine = Engine()
    plans = [engine.add("a", (1,)), engine.add("b", (2,)), engine.add("c", (3,))]
    engine.admission.end(["b"])
    engine.ended.add("c")
    first, second, third = await engine.changes.update_all_later(plans, None, 1)
    assert (first.version, first.positions) == (1, {0: 7})
    assert (second, third) == (None, None)
    assert engine.sent == ["a", "c"]


async def test_if_one_is_refused_none_changes():
    engine = Engine()
    plans = [engine.add("a", (1,)), engine.add("b", (2,))]
    used = engine.budget.used
    engine.refused.append([2])
    with pytest.raises(SpecError, match="no such position"):
        await engine.changes.update_all_later(plans, None, 1)
    engine.refused.clear()
    edits = [{"op": "scale", "factor": one, "layer": 1} for one in (1.5, 2.5, 3.5)]
    with pytest.raises(BusyError, match="no capacity now"):
        await engine.changes.update_all_later(plans, edits, None)
    assert (engine.sent, engine.budget.used) == ([], used)
    # The next version is the first, of the edits that the requests began with.
    found = await engine.changes.update_all_later(plans, None, 1)
    assert [one.version for one in found] == [1, 1]
    engine.admission.end(["a", "b"])
    engine.admission.finish(["a", "b"])
    assert not any(engine.budget.used.values())


async def test_what_fails_on_its_way_is_raised():
    engine = Engine()
    plans = [engine.add("a", (1,)), engine.add("b", (2,))]
    engine.changes.send_later = fail
    with pytest.raises(OSError, match="gone"):
        await engine.changes.update_all_later(plans, None, 1)
    with pytest.raises(OSError, match="gone"):
        await engine.changes.update_later(plans[0], None, 1)


async def fail(replica, message, complete):
    complete(message)
    raise OSError("the engine is gone")


async def test_a_request_that_overtakes_a_change_brings_the_vectors_of_both():
    engine = Engine()
    plan = engine.add("a")
    engine.vectors = (Vector(b"1234"),)
    changing = asyncio.create_task(engine.changes.update_later(plan, None, 1))
    await asyncio.sleep(0)
    assert engine.sent == []
    assert engine.sent_vectors.take("b", engine.vectors).added == (b"1234",)
    await changing
    assert engine.brought == [None]
    engine.vectors = (Vector(b"5678"),)
    await engine.changes.update_later(plan, None, 1)
    assert engine.brought[1].added == (b"5678",)
    assert engine.sent_vectors.take("c", engine.vectors) is None


async def test_vectors_of_a_change_that_failed_or_came_too_late_are_brought_by_the_next():
    engine = Engine()
    plan = engine.add("a")
    engine.vectors = (Vector(b"1234"),)
    engine.changes.send_later = fail
    with pytest.raises(OSError, match="gone"):
        await engine.changes.update_later(plan, None, 1)
    assert engine.sent_vectors.take("b", engine.vectors).added == (b"1234",)
    engine.vectors = (Vector(b"5678"),)

    def send(*given):
        """Send a change of a request that ends at that moment."""
        engine.admission.end(["a"])
        engine.sent_vectors.release("a")
        engine.ended.add("a")
        return engine.send(*given)

    engine.changes.send_later = send
    with pytest.raises(SpecError, match="not running"):
        await engine.changes.update_later(plan, None, 1)
    assert engine.brought == [None]
    engine.sent_vectors.release("b")
    assert engine.sent_vectors.in_use == 0


async def test_a_request_changes_once_all_its_completions_are_submitted():
    """An engine with an event loop submits them one after the other; a change in between would be
    one of some of them.
    """
    engine = Engine()
    plan = engine.add("a", completions=3, submitted=2)
    with pytest.raises(BusyError, match="update it when it runs"):
        await engine.changes.update_later(plan, None, 1)
    engine.submit("a", 2)
    found = await engine.changes.update_later(plan, None, 1)
    assert sorted(found.positions) == [0, 1, 2]
