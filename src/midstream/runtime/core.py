"""midstream's part in the engine core, where the scheduler and the prefix cache are.

What a request carries says under which keys its blocks are cached and how much of it the cache may
serve. And where workers say that something went wrong for a request, it ends here, together with
all that has read KV which it should not have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from midstream.config import KEY
from midstream.runtime.cache_keys import CacheKeys
from midstream.runtime.carried import carried
from midstream.runtime.failures import Failure, failures_of

_ATTRIBUTE = "midstream_keys"


def keys_of(request: Any) -> CacheKeys | None:
    """What a vLLM `Request` carries; None when it asks for nothing."""
    params = request.sampling_params
    if params is None or not params.extra_args or KEY not in params.extra_args:
        return None
    # The next part of a streamed input brings params of its own.
    known: tuple[Any, CacheKeys] | None = getattr(request, _ATTRIBUTE, None)
    if known is None or known[0] is not params:
        found = carried(params)
        assert found is not None
        known = (params, found.keys)
        setattr(request, _ATTRIBUTE, known)
    return known[1]


def extra_keys(
    original: Callable[..., Any], request: Any, start: int, stop: int, *rest: Any, **kwargs: Any
) -> Any:
    """Adds the edits' key to what vLLM hashes with a block of positions [start, stop)."""
    found, mm_index = original(request, start, stop, *rest, **kwargs)
    keys = keys_of(request)
    mark = None if keys is None else keys.of_block(start, stop)
    if mark is not None:
        found = (*(found or ()), (KEY, mark))
    return found, mm_index


def computed_blocks(
    original: Callable[..., Any], manager: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Keeps a hit in the prefix cache below the first position whose row must be computed."""
    keys = keys_of(request)
    if keys is None or keys.first_read is None:
        return original(manager, request, *args, **kwargs)
    cap = keys.first_read
    coordinator = manager.coordinator
    find = coordinator.find_longest_cache_hit

    def capped(block_hashes: Any, most: int, *args: Any, **kwargs: Any) -> Any:
        return find(block_hashes, min(most, cap), *args, **kwargs)

    coordinator.find_longest_cache_hit = capped
    try:
        return original(manager, request, *args, **kwargs)
    finally:
        del coordinator.find_longest_cache_hit


def update_from_output(
    original: Callable[..., Any], scheduler: Any, scheduled: Any, output: Any
) -> Any:
    """Ends the requests for which a worker says that something went wrong."""
    failed = failures_of(output)
    ended = end_failed(scheduler, failed) if failed else []
    outputs = original(scheduler, scheduled, output)
    if ended:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

        for request, reason in ended:
            mine = outputs.setdefault(request.client_index, EngineCoreOutputs())
            mine.outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    stop_reason=reason,
                )
            )
    return outputs


def end_failed(scheduler: Any, failed: dict[str, Failure]) -> list[tuple[Any, str]]:
    """Ends failed requests, and those that were served KV which a failed one computed from where
    it failed on: it is kept under the key of edits which it did not get. The prefix cache is
    emptied, so that nobody else is served it.

    Returns:
        The requests that ended, with the reason.
    """
    from vllm.v1.request import RequestStatus

    manager = scheduler.kv_cache_manager
    failures = dict(failed)
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
    pool.evict_blocks({one.block_id for one in pool.blocks if one.block_hash is not None})
    ended = scheduler.finish_requests(list(reasons), RequestStatus.FINISHED_ERROR)
    return [(request, reasons[request.request_id]) for request in ended]


def _wrong_blocks(scheduler: Any, name: str, position: int) -> set[int]:
    """The blocks of a request that hold positions from the first edited one at or after this."""
    request = scheduler.requests.get(name)
    keys = None if request is None else keys_of(request)
    first = None if keys is None else keys.first_edited(position)
    if first is None:
        return set()
    found = _blocks(scheduler.kv_cache_manager, name)
    return {block for block, _, stop in found if stop > first}


def _blocks(manager: Any, name: str) -> list[tuple[int, int, int]]:
    """A request's blocks: the id of each, and the positions [start, stop) that it holds."""
    groups = manager.kv_cache_config.kv_cache_groups
    sizes = [group.kv_cache_spec.block_size for group in groups]
    return [
        (block.block_id, nth * size, (nth + 1) * size)
        for size, blocks in zip(sizes, manager.get_blocks(name).blocks, strict=True)
        for nth, block in enumerate(blocks)
        if not block.is_null
    ]
