"""Prefix-cache keys and limits of requests with a plan. Rows that the front end has from earlier
requests are not computed again, unless the cache was reset or weights changed since.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from midstream.config.config import KEY
from midstream.runtime.core import weight_epochs
from midstream.runtime.core.image_ranges import end_of_images, start_of_images
from midstream.runtime.core.scored_blocks import ScoredBlocks
from midstream.runtime.protocol.cache_keys import UNMARKED, CacheKeys, ChangedKeys
from midstream.runtime.protocol.request_payload import payload_of
from midstream.runtime.vllm.attributes import CHANGED_KEYS, RESETS, SCORED_BLOCKS, UNKEYED


def keys_of(request: Any) -> CacheKeys | ChangedKeys | None:
    """Return the cache keys of a vLLM `Request`; None if it has no plan."""
    changed: ChangedKeys | None = CHANGED_KEYS.get(request)
    if changed is not None:
        return changed
    payload = payload_of(request.sampling_params)
    return None if payload is None else payload.keys


def extra_keys(
    original: Callable[..., Any], request: Any, start: int, stop: int, *rest: Any, **kwargs: Any
) -> Any:
    """Add the key of edits to the extra keys that vLLM hashes with a block of positions [start,
    stop): of the edits of its tokens, and of an image's tokens to which they attend ahead. The
    first block also has a key of the weights.
    """
    extra, mm_index = original(request, start, stop, *rest, **kwargs)
    if not start and (weights := weight_epochs.extra_key(request, start)):
        extra = (*(extra or ()), *weights)
    keys = keys_of(request)
    if keys is None or keys.marks == UNMARKED:
        UNKEYED.set(request, request.sampling_params)
        return extra, mm_index
    mark = keys.of_block(start, end_of_images(request, stop))
    if mark is not None:
        extra = (*(extra or ()), (KEY, mark))
    return extra, mm_index


def with_extra_keys(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's function with `extra_keys`, of which most blocks of most prompts have none."""
    name = UNKEYED.name

    # `functools.partial` and any arguments would cost a block three times as much.
    def run(request: Any, start: int, stop: int, mm_index: int, *rest: Any) -> Any:
        if start and not rest and getattr(request, name, None) is request.sampling_params:
            return original(request, start, stop, mm_index)
        return extra_keys(original, request, start, stop, mm_index, *rest)

    return run


def change_keys(request: Any, keys: ChangedKeys) -> None:
    """Set the keys of a request whose plan changes; those of its own plan count no longer."""
    CHANGED_KEYS.set(request, keys)
    UNKEYED.set(request, None)


def computed_blocks(
    original: Callable[..., Any], manager: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Limit a prefix-cache hit to positions before the first row to compute, to blocks that have
    the scores to return, and to whole images whose tokens attend both ways: vLLM may split the
    rest of one between two steps.
    """
    weight_epochs.renew_key(manager, request)
    payload = payload_of(request.sampling_params)
    if payload is None:
        return original(manager, request, *args, **kwargs)
    cap = payload.first_read(RESETS.get(manager) or 0)
    if CHANGED_KEYS.get(request) is not None:
        cap = payload.keys.first_read  # kept rows are those of the plan that it began with
    scores = payload.keys.scores
    scored: ScoredBlocks | None = SCORED_BLOCKS.get(manager.block_pool) if scores else None
    if scores and scored is None:
        firsts = [score.ranges[0][0] for score in scores]
        cap = min(firsts if cap is None else [cap, *firsts])
    if cap is None and not payload.mm_prefix and not scores:
        return original(manager, request, *args, **kwargs)
    coordinator = manager.coordinator
    find = coordinator.find_longest_cache_hit

    def capped(block_hashes: Any, most: int, *args: Any, **kwargs: Any) -> Any:
        hit = find(block_hashes, most if cap is None else min(most, cap), *args, **kwargs)
        # A shorter hit may end in an earlier image.
        while (usable := end_of_hit(hit)) < hit[1]:
            hit = find(block_hashes, usable, *args, **kwargs)
        return hit

    def end_of_hit(hit: Any) -> int:
        length: int = hit[1]
        if scored is not None:
            blocks = hit[0][scored.group]
            length = scored.served(request, scores, manager.block_pool, blocks, length)
        return start_of_images(request, length) if payload.mm_prefix else length

    own = vars(coordinator).get("find_longest_cache_hit")  # None: that of its class
    coordinator.find_longest_cache_hit = capped
    try:
        return original(manager, request, *args, **kwargs)
    finally:
        if own is None:
            del coordinator.find_longest_cache_hit
        else:
            coordinator.find_longest_cache_hit = own


def reset(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Reset the prefix cache, and the rows that the front end keeps. Trainers in the worker's
    process reset it when they have written the weights, by no call of the engine's.
    """
    done = weight_epochs.after(original, engine, *args, **kwargs)
    weight_epochs.count_reset(engine)
    return done
