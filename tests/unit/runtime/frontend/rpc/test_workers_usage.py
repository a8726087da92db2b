"""The workers' usage is shown also while a worker does not answer: its last one."""

import asyncio
import time

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from midstream.runtime.frontend.rpc import workers_usage
from midstream.runtime.frontend.rpc.workers_usage import WorkersUsage

pytestmark = pytest.mark.anyio


class Workers:
    """One worker, which may hang."""

    def __init__(self, monkeypatch, usage):
        self.calls, self.hangs, self.dies = 0, False, False
        self.go_on = asyncio.Event()
        self.usage = usage

        async def call_all(client, request):
            self.calls += 1
            if self.dies:
                raise EngineDeadError
            if self.hangs:
                await self.go_on.wait()
            return [[self.usage]]

        monkeypatch.setattr(workers_usage, "call_all", call_all)


@pytest.fixture
def workers(monkeypatch):
    import msgspec

    class Usage(msgspec.Struct):
        steps: int

    return Workers(monkeypatch, Usage(5))


async def read(usage, timeout):
    found = await usage.read(timeout)
    return found["workers"], found["workers_age_seconds"]


async def test_an_answer_is_new(workers):
    assert await read(WorkersUsage(None), 1) == ([{"replica": 0, "steps": 5}], 0.0)


async def test_a_worker_that_hangs_has_its_last_answer_and_is_asked_once(workers):
    usage = WorkersUsage(None)
    await usage.read(None)
    workers.hangs = True
    began = time.monotonic()
    for _ in range(3):
        found, age = await read(usage, 0.1)
        assert found == [{"replica": 0, "steps": 5}]
        assert age > 0
    assert time.monotonic() - began < 20
    assert workers.calls == 2
    workers.hangs = False
    workers.go_on.set()
    assert (await read(usage, 5))[1] == 0.0


@pytest.mark.parametrize("how", ["hangs", "dies"])
async def test_without_any_answer_there_is_none(workers, how):
    setattr(workers, how, True)
    assert await read(WorkersUsage(None), 0.05) == ([], None)
