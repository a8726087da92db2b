"""Where a version of a plan begins, and what the engine core does then."""

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
    ("state", "is_async", "position"),
    [
        # (computed, preemptions, in flight, late ones, placeholders), as far as they are known
        ((6,), False, 6),
        ((16,), False, 16),  # scheduled ahead of its tokens
        ((0, 1), False, 13),  # preempted: it computes all but the last again
        ((0, 1, 2), False, 15),  # its last steps were in flight then
        ((4, 1, 4, 0), False, 13),
        ((20, 1), False, 20),
        # Before 0.28 vLLM has no count of late ones; it knows how many a request has yet to get.
        ((4, 1, 4, None, 1), False, 17),
        ((4, 1, 4, None, 1), True, 14),
    ],
)
def test_a_version_begins_where_nothing_was_scheduled(state, is_async, position):
    request, names = Request(), (
        "num_computed_tokens", "num_preemptions", "num_in_flight_tokens",
        "num_stale_output_tokens", "num_output_placeholders",
    )  # fmt: skip
    known = dict(zip(names, state, strict=False))
    vars(request).update({name: count for name, count in known.items() if count is not None})
    scheduler = scheduler_of(request)
    scheduler.scheduler_config.async_scheduling = is_async
    assert next_position(scheduler, request) == position


def test_blocks_are_hashed_again_from_where_a_version_begins():
    request = Request()
    assert request.block_hashes == ["old"] * 3
    scheduler = scheduler_of(request)
    assert change_plans(scheduler, [(request, LATER, 0)]) == {"a": 6}
    assert request.block_hashes == ["old", "0:old|2:", "0:|1:new"]
    (message,) = EXECUTOR.get(scheduler).sent
    (change,) = message.changes
    assert (change.request_id, change.uid, change.number) == ("a", "u", 1)
    assert (change.position, change.plan) == (6, b"later")
    # The payload, which several requests may share, is as it was.
    assert request.sampling_params.extra_args[KEY].keys == KEYS


def test_the_engine_core_answers_for_the_requests_that_run():
    scheduler = scheduler_of(Request("a"), Request("b"))
    no_groups = SimpleNamespace(kv_cache_groups=[])
    scheduler.kv_cache_manager = SimpleNamespace(kv_cache_config=no_groups)
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
