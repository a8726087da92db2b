"""The engine core's part, against a small stand-in for vLLM's scheduler."""

from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from support.plans import SMALL, plan_of
from unit.runtime.core.blocks import Scheduler

from midstream.errors import SpecError
from midstream.plan.resolve.wire import to_bytes
from midstream.runtime.core.prefix_cache import (
    change_keys,
    computed_blocks,
    extra_keys,
    keys_of,
    with_extra_keys,
)
from midstream.runtime.protocol.cache_keys import ChangedKeys, cache_keys
from midstream.runtime.protocol.failures import Failure, failures_of
from midstream.runtime.protocol.request_payload import RequestPayload
from midstream.runtime.worker.model_runner.hooks import attach_results

TAP = ("resid_post", 0)


def _request(start=None, read=None):
    extra_args = None
    if start is not None or read is not None:
        edits = [] if start is None else [(TAP, SMALL[0], 1.0, [(start, None)])]
        captures = [] if read is None else [([TAP], [(read, None)])]
        plan = plan_of(edits, captures)
        extra_args = {"midstream": RequestPayload("r", to_bytes(plan), cache_keys(plan))}
    params = SimpleNamespace(extra_args=extra_args)
    return SimpleNamespace(request_id="r", sampling_params=params)


def test_a_request_that_asks_for_nothing_keeps_vllms_own_keys():
    for request in (_request(), SimpleNamespace(sampling_params=None)):
        assert extra_keys(lambda *_: (None, 7), request, 0, 4, 0) == (None, 7)
        assert extra_keys(lambda *_: (("lora",), 7), request, 0, 4, 0) == (("lora",), 7)


def test_the_edits_key_joins_vllms_own_from_the_first_edited_block_on():
    request = _request(start=6)
    assert extra_keys(lambda *_: (("salt",), 0), request, 0, 4, 0) == (("salt",), 0)
    (salt, (name, mark)), index = extra_keys(lambda *_: (("salt",), 3), request, 4, 8, 0)
    assert (salt, name, index) == ("salt", "midstream", 3)
    assert mark == keys_of(request).of_block(4, 8)
    # vLLM's events take a key of one block apart like a pair.
    assert extra_keys(lambda *_: (None, 0), request, 4, 8, 0) == ((("midstream", mark),), 0)


def test_what_comes_next_in_a_session_has_the_keys_of_its_own_params():
    request = _request(start=6)
    before = keys_of(request)
    assert keys_of(request) is before
    request.sampling_params = _request(start=2).sampling_params
    assert keys_of(request).first_edited(0) == 2
    request.sampling_params = _request().sampling_params
    assert keys_of(request) is None


def test_once_a_requests_edits_change_each_block_has_their_key():
    plain, edited = cache_keys(plan_of([], [([TAP], [(0, None)])])), _request(start=6)
    payload = edited.sampling_params.extra_args["midstream"]
    params = SimpleNamespace(extra_args={"midstream": replace(payload, keys=plain)})
    request = SimpleNamespace(request_id="r", sampling_params=params)
    keyed = with_extra_keys(lambda *_: (None, 0))
    of_blocks = lambda: [keyed(request, start, start + 4, 0)[0] for start in (0, 4, 8)]  # noqa: E731
    assert of_blocks() == of_blocks() == [None, None, None]
    changed = ChangedKeys(plain)
    changed.change(4, payload.keys)
    change_keys(request, changed)
    marks = [changed.of_block(start, start + 4) for start in (4, 8)]
    assert of_blocks() == [None, *((("midstream", mark),) for mark in marks)]
    # What comes next in a session has the keys of its own.
    later = SimpleNamespace(request_id="r", sampling_params=params)
    assert keyed(later, 0, 4, 0)[0] is None
    later.sampling_params = edited.sampling_params
    assert keyed(later, 4, 8, 0)[0] is not None


def test_what_did_not_come_through_the_front_door_is_refused():
    request = SimpleNamespace(sampling_params=SimpleNamespace(extra_args={"midstream": {}}))
    with pytest.raises(SpecError, match="without having been checked"):
        keys_of(request)


def test_the_cap_is_gone_after_a_look_up_that_failed():
    class Coordinator:
        def find_longest_cache_hit(self, hashes, most):
            raise RuntimeError("broken")

    manager = SimpleNamespace(coordinator=Coordinator())
    with pytest.raises(RuntimeError, match="broken"):
        computed_blocks(
            lambda m, r: m.coordinator.find_longest_cache_hit((), 9), manager, _request(read=2)
        )
    assert "find_longest_cache_hit" not in vars(manager.coordinator)


def test_a_failed_request_ends_and_whoever_has_read_its_wrong_kv():
    scheduler = Scheduler(
        bad=(_request(start=4), [1, 2, 3]),
        reader=(_request(start=4), [1, 2, 3, 4]),
        grandchild=(_request(start=4), [1, 2, 3, 4, 5]),
        prefix_only=(_request(), [1, 6]),
        other=(_request(start=0), [7, 8]),
    )
    ended = scheduler.end(bad=Failure(0, "broken"))
    assert set(ended) == {"bad", "reader", "grandchild"}
    assert ended["bad"] == "broken"
    assert "served KV of a request that failed: broken" in ended["reader"]
    assert set(scheduler.requests) == {"prefix_only", "other"}
    assert scheduler.evicted == {1, 3, 5, 7}


@pytest.mark.parametrize(
    ("bad", "position", "others", "ended"),
    [
        # What was right before it failed taints nobody; the block in which it failed is wrong.
        ((_request(0), [1, 2, 3]), 8, {"early": [1, 2], "late": [1, 2, 3]}, {"bad", "late"}),
        ((_request(0), [1, 2]), 7, {"early": [1, 2, 3]}, {"bad", "early"}),
        # Who only reads taints nobody.
        ((_request(read=4), [1, 2]), 0, {"other": [1, 2]}, {"bad"}),
        # Blocks that left the window are nobody's.
        ((_request(0), [0, 2]), 0, {"other": [0, 3]}, {"bad"}),
        # One that has ended already is no matter.
        (None, 0, {"other": [1]}, set()),
    ],
)
def test_others_end_exactly_if_they_have_a_block_that_is_wrong(bad, position, others, ended):
    blocks = {name: (_request(0), ids) for name, ids in others.items()}
    scheduler = Scheduler(**blocks, **({} if bad is None else {"bad": bad}))
    assert set(scheduler.end(bad=Failure(position, "x"))) == ended
    assert set(scheduler.requests) == {*others} - ended


def test_failures_leave_with_any_output_that_reaches_the_scheduler():
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

    failed = {"r": Failure(3, "why")}
    told = attach_results(EMPTY_MODEL_RUNNER_OUTPUT, failed)
    assert failures_of(told) == failed
    # vLLM's one empty output is shared.
    assert failures_of(EMPTY_MODEL_RUNNER_OUTPUT) == {}
    for name in ("model_runner_output", "_model_runner_output"):
        inner = attach_results(EMPTY_MODEL_RUNNER_OUTPUT, {"s": Failure(0, "")})
        late = SimpleNamespace(**{name: inner})
        assert attach_results(late, failed) is late
        assert failures_of(inner) == failed
    assert attach_results(None, failed) is None
    assert attach_results(SimpleNamespace(), failed) is None
