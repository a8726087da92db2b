"""Where a version of a plan begins, and what the engine core does then."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.sampling_params import SamplingParams

from midstream.config.config import KEY
from midstream.runtime.core.plan_versions import answer_rpc, change_plans, next_position
from midstream.runtime.core.prefix_cache import keys_of
from midstream.runtime.protocol.cache_keys import CacheKeys
from midstream.runtime.protocol.codec import pack
from midstream.runtime.protocol.plan_version import PlanVersion
from midstream.runtime.protocol.request_payload import RequestPayload
from midstream.runtime.protocol.rpc import RPC, ReadUsage, UpdatePlan, read_request
from midstream.runtime.protocol.vector_update import VectorUpdate
from midstream.runtime.vllm.attributes import EXECUTOR

KEYS = CacheKeys((0,), ("old",), None)
LATER = PlanVersion(1, b"later", CacheKeys((0, 9), ("", "new"), None))


class Request(SimpleNamespace):
    """A vLLM Request, whose hashes are the marks of its blocks of 4."""

    def __init__(self, name="a", **more):
        payload = RequestPayload("u", b"plan", KEYS)
        super().__init__(
            request_id=name,
            sampling_params=SamplingParams(extra_args={KEY: payload}),
            num_preemptions=0,
            num_in_flight_tokens=0,
            num_computed_tokens=6,
            num_tokens=14,
            block_hashes=[],
            **more,
        )
        self.update_block_hashes()

    def update_block_hashes(self):
        for nth in range(len(self.block_hashes), self.num_tokens // 4):
            self.block_hashes.append(keys_of(self).of_block(4 * nth, 4 * nth + 4))


class Executor:
    def __init__(self):
        self.sent = []

    def collective_rpc(self, method, *, args, non_block):
        assert method == RPC
        assert non_block
        self.sent.append(read_request(*args))


def scheduler_of(*requests):
    found = SimpleNamespace(
        requests={one.request_id: one for one in requests},
        hash_block_size=4,
        scheduler_config=SimpleNamespace(async_scheduling=False),
    )
    EXECUTOR.set(found, Executor())
    return found


@pytest.mark.parametrize(
    ("state", "position"),
    [
        ({"num_computed_tokens": 6}, 6),
        # Scheduled ahead of its tokens.
        ({"num_computed_tokens": 16}, 16),
        # Preempted: it computes all but the last again.
        ({"num_computed_tokens": 0, "num_preemptions": 1}, 13),
        # Its last steps were in flight then.
        ({"num_computed_tokens": 0, "num_preemptions": 1, "num_in_flight_tokens": 2}, 15),
        (
            {
                "num_computed_tokens": 4,
                "num_preemptions": 1,
                "num_in_flight_tokens": 4,
                "num_stale_output_tokens": 0,
            },
            13,
        ),
        ({"num_computed_tokens": 20, "num_preemptions": 1}, 20),
    ],
)
def test_a_version_begins_where_nothing_was_scheduled(state, position):
    request = Request()
    vars(request).update(state)
    assert next_position(scheduler_of(request), request) == position


def test_tokens_that_a_preempted_request_computes_again_are_not_late_ones():
    """Before 0.28 vLLM has no count of late ones. With asynchronous scheduling it knows how many
    tokens a request has yet to get.
    """
    request = Request()
    more = {"num_computed_tokens": 4, "num_in_flight_tokens": 4, "num_output_placeholders": 1}
    vars(request).update(more, num_preemptions=1)
    scheduler = scheduler_of(request)
    assert next_position(scheduler, request) == 17
    scheduler.scheduler_config.async_scheduling = True
    assert next_position(scheduler, request) == 14


def test_blocks_are_hashed_again_from_where_a_version_begins():
    request = Request()
    assert request.block_hashes == ["old"] * 3
    scheduler = scheduler_of(request)
    assert change_plans(scheduler, [(request, LATER)]) == {"a": 6}
    assert request.block_hashes == ["old", "0:old|2:", "0:|1:new"]
    (message,) = EXECUTOR.get(scheduler).sent
    (change,) = message.changes
    assert (change.request_id, change.uid, change.number) == ("a", "u", 1)
    assert (change.position, change.plan) == (6, b"later")
    # The payload, which several requests may share, is as it was.
    assert request.sampling_params.extra_args[KEY].keys == KEYS


def test_the_engine_core_answers_for_the_requests_that_run():
    scheduler = scheduler_of(Request("a"), Request("b"))
    engine = SimpleNamespace(scheduler=scheduler, model_executor=Executor())
    update = UpdatePlan("u", ["a", "gone"], LATER, VectorUpdate((), (bytes(4),)))
    assert answer_rpc(engine, RPC, (pack(update),)) == [{"positions": {"a": 6}}]
    # Vectors leave before the plan that names them.
    assert [type(one).__name__ for one in engine.model_executor.sent] == [
        "UpdateVectors",
        "ChangePlans",
    ]
    other = UpdatePlan("of another", ["b"], LATER)
    assert answer_rpc(engine, RPC, (pack(other),)) == [{"positions": {}}]
    assert len(engine.model_executor.sent) == 2
    for method, args in ((RPC, (pack(ReadUsage()),)), ("other", (pack(update),)), (RPC, ())):
        assert answer_rpc(engine, method, args) is None
