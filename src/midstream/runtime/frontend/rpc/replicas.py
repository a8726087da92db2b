"""The engines behind one front end: one, or with data parallelism several, each with workers of its
own.

vLLM's own call of all workers goes to every engine and returns the first one's answer. Here each
engine is called by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

from midstream.runtime.frontend.rpc.remote_worker import RemoteWorker
from midstream.runtime.frontend.rpc.rpc_batcher import RpcBatcher
from midstream.runtime.protocol.rpc import RPC, A, RpcRequest, arguments_of, read_answers

_BETWEEN_LOOKS = 0.5  # seconds


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine.

    Attributes:
        number: its place among the engines of this front end, by which vLLM sends it requests.
        batcher: calls its workers.
    """

    number: int
    batcher: RpcBatcher


def replicas_of(client: Any, workers: Sequence[Sequence[RemoteWorker]]) -> list[Replica]:
    """The engines of a client.

    Args:
        client: vLLM's client of its engine cores.
        workers: those of each engine.
    """
    return [
        Replica(number, RpcBatcher(partial(call, client, number), mine))
        for number, mine in enumerate(workers)
    ]


async def call(client: Any, number: int, request: RpcRequest[A]) -> list[A]:
    """Return the answers of one engine's workers to a request.

    Args:
        client: vLLM's client of its engine cores.
        number: number of the engine.
        request: the request.

    Raises:
        EngineDeadError: an engine of the client has ended, and no answer will arrive.
    """
    arguments = ("collective_rpc", RPC, None, arguments_of(request), None)
    engine = client.core_engines[number]
    answer = asyncio.ensure_future(
        client._call_utility_async(*arguments, engine=engine)  # noqa: SLF001
    )
    try:
        while not (await asyncio.wait([answer], timeout=_BETWEEN_LOOKS))[0]:
            # vLLM tells those who wait for outputs, and not those who wait for such an answer.
            if client.resources.engine_dead:
                raise EngineDeadError
        return read_answers(request, answer.result())
    finally:
        answer.cancel()


async def call_all(client: Any, request: RpcRequest[A]) -> list[list[A]]:
    """Return the answers of each engine's workers to a request; see `call`."""
    numbers = range(len(client.core_engines))
    return list(await asyncio.gather(*(call(client, number, request) for number in numbers)))


def busy(client: Any) -> list[int]:
    """How many requests each engine has, as vLLM's load balancer was last told: ten times a second.

    Args:
        client: vLLM's client of its engine cores.
    """
    if len(client.core_engines) == 1:
        return [0]
    # Waiting, running, and in later releases how full the KV cache is.
    return [int(waiting + running) for waiting, running, *_ in client.lb_engines]
