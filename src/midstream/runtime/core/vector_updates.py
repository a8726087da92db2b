"""Changes of the workers' vectors, sent ahead of the first step whose plans name them."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from midstream.config.config import KEY
from midstream.runtime.protocol.request_payload import RequestPayload
from midstream.runtime.protocol.rpc import RPC, UpdateVectors, arguments_of
from midstream.runtime.vllm.attributes import VECTOR_UPDATES


def prepare(engine: Any) -> None:
    VECTOR_UPDATES.set(engine, deque())


def is_prepared(engine: Any) -> bool:
    """Return whether an engine core was prepared: midstream is enabled for it."""
    return VECTOR_UPDATES.get(engine) is not None


def take_update(engine: Any, sampling_params: Any, payload: RequestPayload) -> None:
    """Take the changes, which come once, out of a request that arrives, in any thread."""
    updates = VECTOR_UPDATES.get(engine)
    if payload.vectors is not None and updates is not None:
        updates.append(payload.vectors)
        stripped = msgspec.structs.replace(payload, vectors=None)
        sampling_params.extra_args = {**sampling_params.extra_args, KEY: stripped}


def send_updates(engine: Any) -> None:
    """Send the changes, on the steps' thread, before a request that came with them is scheduled."""
    waiting = VECTOR_UPDATES.get(engine)
    if not waiting:
        return
    updates = [waiting.popleft() for _ in range(len(waiting))]
    engine.model_executor.collective_rpc(
        RPC, args=arguments_of(UpdateVectors(updates)), non_block=True
    )
