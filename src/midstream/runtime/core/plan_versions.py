"""Changes of running requests' plans. A version holds from the first position that is not scheduled
yet; positions computed again keep theirs. RPCs and steps are carried out in order: all workers
change before the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from midstream.runtime.core import scored_blocks
from midstream.runtime.core.ended_requests import stop_later
from midstream.runtime.core.prefix_cache import change_keys
from midstream.runtime.protocol.cache_keys import ChangedKeys
from midstream.runtime.protocol.codec import pack
from midstream.runtime.protocol.plan_version import PlanChange, PlanVersion
from midstream.runtime.protocol.request_payload import payload_of, uid_of
from midstream.runtime.protocol.rpc import (
    RPC,
    Acknowledged,
    ChangePlans,
    StopRequests,
    UpdatedPlan,
    UpdatePlan,
    UpdateVectors,
    arguments_of,
    read_request,
)
from midstream.runtime.vllm.attributes import CHANGED_KEYS, DECLARED, EXECUTOR


def prepare(engine: Any) -> None:
    """Let the scheduler of an engine core reach the workers, the declared controllers and the
    scores of cached blocks, once.
    """
    if EXECUTOR.get(engine.scheduler) is not engine.model_executor:
        scored_blocks.prepare(engine)
        EXECUTOR.set(engine.scheduler, engine.model_executor)
        DECLARED.set(engine.scheduler, DECLARED.get(engine) or {})


def answer_rpc(engine: Any, method: object, args: Sequence[object]) -> list[Any] | None:
    """Answer a `collective_rpc` that is for the engine core itself; None: it is for the workers."""
    if method != RPC or len(args) != 1 or not isinstance(args[0], dict):
        return None
    if args[0].get("op") not in (UpdatePlan.__name__, StopRequests.__name__):
        return None
    request = read_request(args[0])
    if isinstance(request, StopRequests):
        stop_later(engine.scheduler, request)
        return [pack(Acknowledged())]
    assert isinstance(request, UpdatePlan)
    return [pack(_update(engine, request))]


def _update(engine: Any, update: UpdatePlan) -> UpdatedPlan:
    if update.vectors is not None:
        message = UpdateVectors([update.vectors])
        engine.model_executor.collective_rpc(RPC, args=arguments_of(message), non_block=True)
    prepare(engine)
    scheduler = engine.scheduler
    running = [scheduler.requests.get(name) for name in update.request_ids]
    changes = [
        (request, update.version, 0)
        for request in running
        if request is not None and uid_of(request.sampling_params) == update.uid
    ]
    return UpdatedPlan(change_plans(scheduler, changes))


def change_plans(scheduler: Any, changes: Sequence[tuple[Any, PlanVersion, int]]) -> dict[str, int]:
    """Give running requests other versions, whose vectors the workers have, each from a position on
    or a later one; return their first positions by id. Call on the thread of the engine's steps,
    between two.
    """
    messages = []
    for request, version, earliest in changes:
        position = max(next_position(scheduler, request), earliest)
        _set_keys(request, position, version, scheduler.hash_block_size)
        uid = uid_of(request.sampling_params)
        assert uid is not None
        messages.append(PlanChange(request.request_id, uid, version.number, position, version.plan))
    if messages:
        executor: Any = EXECUTOR.get(scheduler)
        executor.collective_rpc(RPC, args=arguments_of(ChangePlans(messages)), non_block=True)
    return {message.request_id: message.position for message in messages}


def next_position(scheduler: Any, request: Any) -> int:
    """Return the first position without a scheduled step; drafts count as accepted."""
    position: int = request.num_computed_tokens
    if request.num_preemptions:
        # It is computed anew, from the first position on. Each token but the last was computed
        # before, and tokens of steps that were in flight then are still to come.
        position = max(position, request.num_tokens - 1 + _late_tokens(scheduler, request))
    return position


def _late_tokens(scheduler: Any, request: Any) -> int:
    late = getattr(request, "num_stale_output_tokens", None)
    if late is None:
        # Tokens in flight are also those of its prompt that are being computed again.
        is_async = scheduler.scheduler_config.async_scheduling
        late = request.num_output_placeholders if is_async else request.num_in_flight_tokens
    return int(late)


def _set_keys(request: Any, position: int, version: PlanVersion, block_size: int) -> None:
    """Set a request's cache keys from a position on, and hash its blocks from there on again."""
    keys: ChangedKeys | None = CHANGED_KEYS.get(request)
    if keys is None:
        payload = payload_of(request.sampling_params)
        assert payload is not None
        keys = ChangedKeys(payload.keys)
        change_keys(request, keys)
    keys.change(position, version.keys)
    first = position // block_size
    if first < len(request.block_hashes):
        del request.block_hashes[first:]
        request.update_block_hashes()
