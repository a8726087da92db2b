"""RPCs for which a synchronous engine does not wait: it goes on with its steps meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any, TypeVar

from midstream.runtime.frontend.rpc.fetch import Call, Exchange, carry_on
from midstream.runtime.protocol.rpc import RPC, RpcRequest, arguments_of, read_answers, utility_of

T = TypeVar("T")

# The workers' answers as plain values; see `read_answers`.
Started = Future[list[object]]


def start_rpc(engine: Any) -> Callable[[RpcRequest[Any]], Started]:
    """Return a function that sends a request to all workers without waiting for the answers."""
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core_client import SyncMPClient

    client = engine.engine_core

    def start(request: RpcRequest[Any]) -> Started:
        # As the client itself calls, up to where it waits.
        number, *call = utility_of(request)
        future: Started = Future()
        client.utility_results[number] = future
        client._send_input(EngineCoreRequestType.UTILITY, (0, number, *call))
        return future

    def run(request: RpcRequest[Any]) -> Started:
        future: Started = Future()
        future.set_result(engine.collective_rpc(RPC, args=arguments_of(request)))
        return future

    # An engine in this process has nothing to do while it answers.
    return start if isinstance(client, SyncMPClient) else run


def carry_out_whole(
    exchange: Exchange[T], start: Callable[[RpcRequest[Any]], Started], call: Call
) -> T:
    """Return `carry_out`'s result; if interrupted, read the first answers too: they have leases."""
    request = next(exchange)
    answers = start(request)
    try:
        wait_for([answers])
    finally:
        wait_for([answers])
        result = carry_on(exchange, read_answers(request, answers.result()), call)
    return result
