"""A front end that waits for an engine's process is told when that process is gone."""

import asyncio
import gc
import queue
import weakref
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
from vllm.v1.engine.exceptions import EngineDeadError

from midstream.runtime.frontend.engine_death import end_waits_with, fail_streams


class Client:
    """As vLLM's, of an engine in another process."""

    def __init__(self) -> None:
        self.outputs_queue: queue.Queue = queue.Queue()
        self.utility_results: dict[int, Future] = {1: Future(), 2: Future()}
        self.resources = SimpleNamespace(engine_dead=False)
        self.ended = 0

    def shutdown(self, timeout: float | None = None) -> float | None:
        self.ended += 1
        return timeout


def test_those_who_wait_get_an_error_when_the_process_has_died():
    client = Client()
    client.utility_results[1].set_result("came before")
    end_waits_with(SimpleNamespace(engine_core=client))
    client.resources.engine_dead = True
    assert client.shutdown(timeout=3.0) == 3.0
    assert isinstance(client.outputs_queue.get_nowait(), EngineDeadError)
    assert client.utility_results[1].result() == "came before"
    with pytest.raises(EngineDeadError):
        client.utility_results[2].result(timeout=0)


def test_an_engine_that_is_ended_in_good_order_tells_nobody():
    client = Client()
    end_waits_with(SimpleNamespace(engine_core=client))
    client.shutdown()
    assert client.ended == 1
    assert client.outputs_queue.empty()
    assert not client.utility_results[2].done()


def test_a_client_goes_as_soon_as_nobody_refers_to_it():
    client = Client()
    end_waits_with(SimpleNamespace(engine_core=client))
    gone = weakref.ref(client)
    gc.disable()
    try:
        del client
        assert gone() is None
    finally:
        gc.enable()


def test_an_engine_in_this_process_is_left_alone():
    end_waits_with(SimpleNamespace(engine_core=SimpleNamespace()))


def test_streams_of_an_engine_that_is_shut_down_end_with_an_error():
    """Though the task that would tell them was cancelled, and from another thread."""

    async def shut_down() -> list[object]:
        told: list[object] = []
        handler = asyncio.create_task(asyncio.sleep(60))
        handler.cancel()
        processor = SimpleNamespace(propagate_error=told.append)
        engine = SimpleNamespace(output_handler=handler, output_processor=processor)
        await asyncio.to_thread(fail_streams, engine)
        await asyncio.sleep(0)
        return told

    (error,) = asyncio.run(shut_down())
    assert isinstance(error, EngineDeadError)
    fail_streams(SimpleNamespace(output_handler=None))
