"""A front end that waits for an engine's process is told when that process is gone.

vLLM sees the end of the process, but its client for offline engines waits on, for ever, where the
process was killed: by the system, when memory runs out. Its client for `AsyncLLM` does not.
"""

from __future__ import annotations

import weakref
from typing import Any


def end_waits_with(engine: Any) -> None:
    """Whoever waits for something of an engine's process, when that ends, gets EngineDeadError.

    Args:
        engine: vLLM's LLMEngine. Where it computes in this process, there is nothing to do.
    """
    client = engine.engine_core
    if not hasattr(client, "outputs_queue"):
        return
    original = type(client).shutdown
    # The client lets go of its processes when nobody refers to it.
    reference = weakref.ref(client)

    def shutdown(*args: Any, **named: Any) -> Any:
        found = reference()
        assert found is not None, "it is calling this"
        out = original(found, *args, **named)
        if found.resources.engine_dead:
            _tell(found)
        return out

    client.shutdown = shutdown


def _tell(client: Any) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    for future in list(client.utility_results.values()):
        if not future.done():
            future.set_exception(EngineDeadError())
    client.outputs_queue.put_nowait(EngineDeadError())
