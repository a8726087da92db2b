"""Errors for those who wait for an engine that has ended, as vLLM may leave them waiting."""

from __future__ import annotations

import weakref
from typing import Any


def end_waits_with(engine: Any) -> None:
    """Raise EngineDeadError in every wait for an LLMEngine's own process when that ends."""
    client = engine.engine_core
    if not hasattr(client, "outputs_queue"):
        return
    original = type(client).shutdown
    # The client ends its processes when it is garbage-collected: keep no reference to it.
    reference = weakref.ref(client)

    def shutdown(*args: Any, **named: Any) -> Any:
        core_client = reference()
        assert core_client is not None, "the client calls this"
        out = original(core_client, *args, **named)
        if core_client.resources.engine_dead:
            _fail_waits(core_client)
        return out

    client.shutdown = shutdown


def fail_streams(engine: Any) -> None:
    """Raise EngineDeadError in every `generate` of an AsyncLLM that is shut down."""
    from vllm.v1.engine.exceptions import EngineDeadError

    handler = getattr(engine, "output_handler", None)  # none if its constructor failed
    if handler is None or handler.get_loop().is_closed():
        return
    tell = engine.output_processor.propagate_error
    handler.get_loop().call_soon_threadsafe(tell, EngineDeadError())


def _fail_waits(client: Any) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    for future in list(client.utility_results.values()):
        if not future.done():
            future.set_exception(EngineDeadError())
    client.outputs_queue.put_nowait(EngineDeadError())
