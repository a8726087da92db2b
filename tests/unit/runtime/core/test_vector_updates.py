"""Vectors on their way to the workers: ahead of every request that names them."""

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_steps import FakeEngine
from support.nightly import rounds
from support.plans import VECTORS, add, plan_of, rows

from midstream.plan import ResolvedPlan, Vector
from midstream.plan.resolve.wire import to_bytes
from midstream.runtime.core import vector_updates
from midstream.runtime.frontend.request.sent_vectors import SentVectors
from midstream.runtime.protocol.cache_keys import CacheKeys
from midstream.runtime.protocol.request_payload import RequestPayload, payload_of
from midstream.runtime.protocol.rpc import RPC, read_request
from midstream.runtime.protocol.vector_update import VectorUpdate

KEYS = CacheKeys((0,), ("",), None)
SIZE = len(VECTORS[0].data)


def params(update: VectorUpdate | None, uid: str = "u", plan: bytes = b"plan") -> SimpleNamespace:
    """Parameters as the engine core decodes them."""
    payload = RequestPayload(uid, plan, KEYS, update)
    value = msgspec.msgpack.decode(msgspec.msgpack.encode(payload))
    return SimpleNamespace(extra_args={"midstream": value, "other": 1})


def core() -> SimpleNamespace:
    """An engine core whose executor keeps what it is given, in order."""
    queue: list[Any] = []

    def collective_rpc(method, args, non_block):
        assert (method, non_block) == (RPC, True), "the engine core must not wait"
        queue.append(read_request(*args))

    engine = SimpleNamespace(model_executor=SimpleNamespace(collective_rpc=collective_rpc))
    engine.queue = queue
    vector_updates.prepare(engine)
    return engine


def receive(engine: Any, given: SimpleNamespace) -> SimpleNamespace:
    payload = payload_of(given)
    assert payload is not None
    vector_updates.take_update(engine, given, payload)
    return given


def test_updates_that_arrived_are_sent_together_in_their_order_and_once():
    engine = core()
    one, two = VectorUpdate((), (VECTORS[0].data,)), VectorUpdate(("ab",), (VECTORS[1].data,))
    receive(engine, params(one))
    receive(engine, params(None))
    receive(engine, params(two))
    assert engine.queue == []
    vector_updates.send_updates(engine)
    vector_updates.send_updates(engine)
    [request] = engine.queue
    assert request.updates == [one, two]


def test_what_a_step_sends_to_the_workers_has_no_numbers():
    engine = core()
    update = VectorUpdate((), (VECTORS[0].data,))
    given = params(update)
    before = given.extra_args
    receive(engine, given)
    assert payload_of(given) == RequestPayload("u", b"plan", KEYS)
    assert given.extra_args["other"] == 1
    assert before["midstream"].vectors == update, "the caller's dict was changed"


def test_an_engine_without_midstream_has_nothing_to_send():
    vector_updates.send_updates(SimpleNamespace())


class Way:
    """Front end, engine core and worker, with queues between them that run when a test says so."""

    def __init__(self, most_unused: int) -> None:
        self.sent = SentVectors(most_unused)
        self.to_core: deque[tuple[str, Any]] = deque()
        self.core = core()
        self.worker = FakeEngine()
        self.plans: dict[str, ResolvedPlan] = {}  # of requests that did not end
        self.waiting: list[tuple[str, SimpleNamespace]] = []
        self.rejected: set[str] = set()
        self._count = 0

    def send(self, plan: ResolvedPlan, vectors: list[Vector], is_rejected: bool = False) -> None:
        self._count += 1
        uid = f"u{self._count}"
        self.plans[uid] = plan
        if is_rejected:
            self.rejected.add(uid)
        update = self.sent.take(uid, vectors)
        packed = to_bytes(plan, frozenset(vectors))
        self.to_core.append((uid, params(update, uid, packed)))

    def end(self, uid: str) -> None:
        """End a request, wherever it is: for the front end it is over now."""
        del self.plans[uid]
        self.to_core.append((uid, None))
        self.sent.release(uid)

    def work_core(self) -> None:
        """The engine core takes one message."""
        if self.to_core:
            uid, message = self.to_core.popleft()
            if message is None:
                self.waiting = [one for one in self.waiting if one[0] != uid]
                self.core.queue.append(("finish", uid, None))
            else:
                receive(self.core, message)
                if uid in self.rejected:
                    return  # by vLLM, after the request has arrived
                vector_updates.send_updates(self.core)
                self.waiting.append((uid, message))

    def schedule(self, nth: int) -> None:
        """The scheduler begins a waiting request, in any order."""
        if self.waiting:
            uid, message = self.waiting[nth % len(self.waiting)]
            self.waiting.remove((uid, message))
            self.core.queue.append(("start", uid, payload_of(message)))

    def work_worker(self) -> None:
        """The worker takes one message."""
        if not self.core.queue:
            return
        message = self.core.queue.pop(0)
        table = self.worker.session.requests
        if not isinstance(message, tuple):
            for update in message.updates:
                table.plans.update_vectors(update)
            return
        what, uid, payload = message
        if what == "finish":
            table.finish(uid)
            table.pop_finished(uid)
            return
        table.add(uid, payload.uid, payload.plan)
        [state] = table.of_uids([uid])
        assert not state.problem, state.problem
        if uid in self.plans:
            assert state.plan == self.plans[uid], f"{uid} got the vectors of another request"

    def drain(self) -> None:
        while self.to_core:
            self.work_core()
        while self.waiting:
            self.schedule(0)
        while self.core.queue:
            self.work_worker()


def _plan(draw: random.Random) -> tuple[ResolvedPlan, list[Vector]]:
    """A plan of vectors that other plans have too, or of its own."""
    own = [Vector.parse([draw.random() for _ in range(4)]) for _ in range(2)]
    vectors = draw.sample([*VECTORS, *own], draw.randint(1, 3))
    edits = [(("resid_post", 1), add(one, draw.choice([0.5, 2.0])), ((0, 9),)) for one in vectors]
    named = list(dict.fromkeys(vectors))
    if draw.random() < 0.2:
        replaced = rows(draw.randint(1, 4), 3)
        edits.append((("resid_post", 0), replaced, ((3, 3 + len(replaced[0].write)),)))
        named += replaced[0].write
    return plan_of(edits), named


@given(st.integers(0, 2**32), st.sampled_from([0, SIZE, 4 * SIZE, 1 << 20]))
@settings(max_examples=rounds(suite=60, nightly=1500))
def test_each_request_has_its_vectors_whatever_begins_and_ends_in_between(seed, most_unused):
    draw = random.Random(seed)
    way = Way(most_unused)
    for _ in range(draw.randint(10, 80)):
        step = draw.random()
        if step < 0.3:
            way.send(*_plan(draw), is_rejected=draw.random() < 0.1)
        elif step < 0.45 and way.plans:
            way.end(draw.choice(sorted(way.plans)))
        elif step < 0.65:
            way.work_core()
        elif step < 0.8:
            way.schedule(draw.randrange(10))
        else:
            way.work_worker()
    for uid in sorted(way.plans):
        way.end(uid)
    last = Vector.parse([9.0, 9.0, 9.0, 9.0])
    way.send(plan_of([(("resid_post", 1), add(last), ((0, 9),))]), [last])
    way.drain()
    stored = way.worker.session.requests.plans.vectors
    way.sent.check_integrity([len(stored)])
    assert last.digest in stored
    # Of the others no more is left than may be, and nothing is in use.
    assert SIZE * (len(stored) - 1) <= most_unused
    assert way.sent.in_use == 1


@pytest.mark.parametrize("lost", [0, 1])
def test_a_worker_that_lacks_a_vector_fails_that_request_alone(lost):
    way = Way(1 << 20)
    for vector in VECTORS[:2]:
        way.send(plan_of([(("resid_post", 1), add(vector), ((0, 9),))]), [vector])
    way.work_core()
    way.work_core()
    table = way.worker.session.requests
    way.work_worker()
    way.work_worker()
    table.plans.update_vectors(VectorUpdate((VECTORS[lost].digest,), ()))
    for uid, message in way.waiting:
        payload = payload_of(message)
        table.add(uid, payload.uid, payload.plan)
    assert list(table.failures) == [f"u{lost + 1}"]
    [failure] = table.failures.values()
    assert failure.reason == (
        f"SpecError: vectors[0]: there is no vector with the digest '{VECTORS[lost].digest}' here"
    )
