"""The engines of one front end, called one by one: vLLM's call of all returns one answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.exceptions import EngineDeadError

from midstream.errors import BusyError
from midstream.runtime.frontend.rpc.remote_worker import RemoteWorker
from midstream.runtime.frontend.rpc.rpc_batcher import RpcBatcher
from midstream.runtime.protocol.rpc import A, RpcRequest, read_answers, utility_of

_CHECK_SECONDS = 0.5  # interval of checks whether the engine is alive
# An engine answers between two steps. Longer than any step, also one of a slow machine.
ANSWER_SECONDS = 600.0
_RETRY_SECONDS = 30


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine."""

    number: int  # by which vLLM sends it requests
    batcher: RpcBatcher


def replicas_of(client: Any, workers: Sequence[Sequence[RemoteWorker]]) -> list[Replica]:
    return [
        Replica(number, RpcBatcher(partial(call, client, number), mine))
        for number, mine in enumerate(workers)
    ]


async def call(
    client: Any,
    number: int,
    request: RpcRequest[A],
    complete: Callable[[RpcRequest[A]], RpcRequest[A]] = lambda request: request,
) -> list[A]:
    """Return the answers of one engine's workers to a request, as `complete` makes it last."""
    check_loop(client)
    # As the client itself calls, without a task of its own.
    answer = asyncio.get_running_loop().create_future()
    until = time.monotonic() + ANSWER_SECONDS
    name, *utility = utility_of(complete(request))
    client.utility_results[name] = answer
    try:
        kind, engine = EngineCoreRequestType.UTILITY, client.core_engines[number]
        await client._send_input(kind, (client.client_index, name, *utility), engine)
        client._ensure_output_queue_task()
        while not (await asyncio.wait([answer], timeout=_CHECK_SECONDS))[0]:
            # vLLM raises this for callers that wait for outputs, but not for those that wait here.
            if client.resources.engine_dead:
                raise EngineDeadError
            if time.monotonic() >= until:
                raise BusyError(
                    f"the engine has not answered for {ANSWER_SECONDS:g} seconds, though its "
                    "process has not ended",
                    _RETRY_SECONDS,
                )
        return read_answers(request, answer.result())
    finally:
        answer.cancel()  # the client drops an answer that comes later


async def call_all(client: Any, request: RpcRequest[A]) -> list[list[A]]:
    """Return the answers of each engine's workers to a request; see `call`."""
    numbers = range(len(client.core_engines))
    return list(await asyncio.gather(*(call(client, number, request) for number in numbers)))


def check_loop(client: Any) -> None:
    """Check that an engine is called from its own event loop: vLLM reads its answers there."""
    reader = getattr(client.resources, "output_queue_task", None)
    if reader is None or reader.get_loop() is asyncio.get_running_loop():
        return
    problem = "this AsyncLLM belongs to the event loop on which it was used first"
    if reader.get_loop().is_closed():
        raise RuntimeError(
            f"{problem}, and that loop has ended: each asyncio.run has a loop of its own. Make all "
            "calls within one asyncio.run, or start another engine"
        )
    raise RuntimeError(f"{problem}: call it there, with asyncio.run_coroutine_threadsafe")


def busy(client: Any) -> list[int]:
    """Return the number of requests on each engine, which engines report ten times a second."""
    if len(client.core_engines) == 1:
        return [0]
    # Waiting, running, and in later releases the usage of the KV cache.
    return [int(waiting + running) for waiting, running, *_ in client.lb_engines]
