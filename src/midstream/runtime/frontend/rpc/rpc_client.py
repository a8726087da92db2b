"""Calls of all workers that a synchronous engine need not wait for.

vLLM's own `collective_rpc` waits for the answers, which come between two of the engine's steps: who
waits for them does not process the outputs of the step that is done meanwhile.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

Started = Future[list[dict[str, Any]]]


def start_rpc(engine: Any) -> Callable[[str, tuple[Any, ...]], Started]:
    """How a method of all workers is called, by its name and arguments, without waiting.

    Args:
        engine: vLLM's LLMEngine.
    """
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core_client import SyncMPClient

    client = engine.engine_core

    def start(method: str, args: tuple[Any, ...]) -> Started:
        # As the client itself calls, up to where it waits.
        number = uuid.uuid1().int >> 64
        future: Started = Future()
        client.utility_results[number] = future
        call = (0, number, "collective_rpc", (method, None, args, None))
        client._send_input(EngineCoreRequestType.UTILITY, call)  # noqa: SLF001
        return future

    def run(method: str, args: tuple[Any, ...]) -> Started:
        future: Started = Future()
        future.set_result(engine.collective_rpc(method, args=args))
        return future

    # An engine in this process has nothing to do while it is asked.
    return start if isinstance(client, SyncMPClient) else run
