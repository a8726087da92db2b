"""Ending of requests whose captures or edits failed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from midstream.runtime.core.ended_requests import add_end
from midstream.runtime.core.image_ranges import start_of_images
from midstream.runtime.core.prefix_cache import change_keys, keys_of
from midstream.runtime.protocol.cache_keys import CacheKeys, ChangedKeys
from midstream.runtime.protocol.failures import Failure, failures_of
from midstream.runtime.protocol.request_payload import payload_of


def update_from_output(
    original: Callable[..., Any], scheduler: Any, scheduled: Any, output: Any
) -> Any:
    """End the requests for which a worker reports a failure, then call vLLM's method."""
    failed = failures_of(output)
    ended = end_failed(scheduler, failed) if failed else []
    outputs = original(scheduler, scheduled, output)
    for request, reason in ended:
        add_end(outputs, request, reason)
    return outputs


def end_failed(scheduler: Any, failed: dict[str, Failure]) -> list[tuple[Any, str]]:
    """End failed requests, and those served KV that one computed after it failed, which has the
    wrong key; empty the prefix cache. Return those that ended, with reasons; others keep their KV
    to themselves.
    """
    from vllm.v1.request import RequestStatus

    manager = scheduler.kv_cache_manager
    failures = {name: failure for name, failure in failed.items() if failure.ends}
    for name in failed.keys() - failures.keys():
        _stop_sharing(scheduler.requests.get(name))
    reasons: dict[str, str] = {}
    while failures:
        name, failure = failures.popitem()
        reasons[name] = failure.reason
        wrong = _wrong_blocks(scheduler, name, failure.position)
        for other in scheduler.requests:
            if wrong and other not in reasons and other not in failures:
                starts = [start for block, start, _ in _blocks(manager, other) if block in wrong]
                if starts:
                    why = f"it was served KV of a request that failed: {failure.reason}"
                    failures[other] = Failure(min(starts), why)
    pool = manager.block_pool
    pool.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})
    ended = scheduler.finish_requests(list(reasons), RequestStatus.FINISHED_ERROR)
    return [(request, reasons[request.request_id]) for request in ended]


def _stop_sharing(request: Any) -> None:
    """Let vLLM find no block of a running request by its hash; None: it has ended. vLLM chains the
    hashes of later blocks to the last one, so these are the request's own too.
    """
    if request is None:
        return
    request.block_hashes[:] = [os.urandom(32) for _ in request.block_hashes]
    keys = keys_of(request)
    if keys is not None:
        # Also for blocks that are hashed again when its plan changes.
        own = CacheKeys((0,), (os.urandom(16).hex(),), keys.first_read)
        change_keys(request, ChangedKeys(own))


def _wrong_blocks(scheduler: Any, name: str, position: int) -> set[int]:
    """Return a request's blocks from its first edited position from `position`, or its image."""
    request = scheduler.requests.get(name)
    keys = None if request is None else keys_of(request)
    first = None if keys is None else keys.first_edited(position)
    payload = None if request is None else payload_of(request.sampling_params)
    if payload is not None and payload.keys.scores:
        first = position  # scores from there on are not those that their blocks should have
    if first is None:
        return set()
    first = start_of_images(request, first)
    blocks = _blocks(scheduler.kv_cache_manager, name)
    return {block for block, _, stop in blocks if stop > first}


def _blocks(manager: Any, name: str) -> list[tuple[int, int, int]]:
    """Return (id, first position, last position + 1) of each block of a request."""
    groups = manager.kv_cache_config.kv_cache_groups
    sizes = [group.kv_cache_spec.block_size for group in groups]
    return [
        (block.block_id, index * size, (index + 1) * size)
        for size, blocks in zip(sizes, manager.get_blocks(name).blocks, strict=True)
        for index, block in enumerate(blocks)
        if not block.is_null
    ]
