"""The engines behind one front end: each is called by itself."""

import asyncio
import json
import pickle
import uuid
from types import SimpleNamespace

import pytest
from support.stored import unmapped, worker_info
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.exceptions import EngineDeadError

from midstream.api.async_llm import AsyncLLM
from midstream.config.config import Config
from midstream.errors import UnsupportedError
from midstream.runtime.frontend.engine_info import describe
from midstream.runtime.frontend.rpc import replicas
from midstream.runtime.frontend.rpc.replicas import busy, call, call_all, replicas_of
from midstream.runtime.protocol.codec import pack
from midstream.runtime.protocol.rpc import (
    Acknowledged,
    CollectResults,
    ReadData,
    ResultData,
    read_request,
)
from midstream.runtime.vllm.additional_config import Settings
from midstream.runtime.vllm.additional_config import replicas_of as replicas_here


class Client:
    """As vLLM's, of several engines with two workers each."""

    def __init__(self, count):
        self.core_engines = [f"engine {nth}".encode() for nth in range(count)]
        self.lb_engines = [[nth, 10 * nth] for nth in range(count)]
        self.calls = []
        self.resources = SimpleNamespace(engine_dead=False)
        self.client_index = 3
        self.utility_results = {}  # of calls that were not answered, by number
        self.has_reader = False
        self.answer = lambda engine: [
            pack(ResultData(f"{engine} {worker}".encode())) for worker in range(2)
        ]

    async def _send_input(self, request_type, request, engine):
        assert request_type is EngineCoreRequestType.UTILITY
        client, number, method, (name, timeout, (message,), named) = request
        assert (client, method, name) == (3, "collective_rpc", "midstream_rpc")
        assert timeout is named is None
        self.calls.append((engine, read_request(message)))
        if self.answer is not None:
            waiting, answer = self.utility_results.pop(number), self.answer(engine)
            asyncio.get_running_loop().call_soon(waiting.set_result, answer)

    def _ensure_output_queue_task(self):
        self.has_reader = True

    async def collective_rpc_async(self, *_):
        raise AssertionError("the first engine's answer is not that of all")


def test_an_operation_goes_to_its_engine_or_to_all_in_order():
    client, request = Client(3), ReadData("u", 0, 9)
    answers = [
        [f"{engine} {worker}".encode() for worker in range(2)] for engine in client.core_engines
    ]
    of_one = asyncio.run(call(client, 2, request))
    assert [answer.data for answer in of_one] == answers[2]
    assert client.calls == [(b"engine 2", request)]
    assert client.has_reader
    of_all = asyncio.run(call_all(client, request))
    assert [[answer.data for answer in of_engine] for of_engine in of_all] == answers


def test_each_replica_has_a_batcher_of_its_own_and_they_do_not_wait_for_each_other():
    client = Client(2)
    client.answer = None

    async def work():
        replicas = replicas_of(client, [[unmapped()], [unmapped()]])
        assert [one.number for one in replicas] == [0, 1]
        tasks = [asyncio.create_task(one.batcher.release("u")) for one in replicas]
        for _ in range(5):
            await asyncio.sleep(0)
        assert sorted(engine for engine, _ in client.calls) == client.core_engines
        for waiting in client.utility_results.values():
            waiting.set_result([pack(Acknowledged())])
        await asyncio.gather(*tasks)

    asyncio.run(work())


def test_who_waits_for_an_engine_that_ends_is_told(monkeypatch):
    monkeypatch.setattr(replicas, "_CHECK_SECONDS", 0.01)
    client = Client(2)
    client.answer = None

    async def work():
        asked = asyncio.create_task(call(client, 1, CollectResults(["u"], [])))
        await asyncio.sleep(0.05)
        assert not asked.done()
        client.resources.engine_dead = True
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(asked, 5)

    asyncio.run(work())
    # vLLM's reader looks the number up, should the answer come all the same.
    assert [waiting.cancelled() for waiting in client.utility_results.values()] == [True]


def test_a_call_has_a_number_that_none_of_vllms_own_has():
    client = Client(1)
    client.answer = None

    async def work():
        calls = [asyncio.create_task(call(client, 0, ReadData("u", 0, 9))) for _ in range(3)]
        await asyncio.sleep(0)
        for waiting in client.utility_results.values():
            waiting.set_result([])
        await asyncio.gather(*calls)

    asyncio.run(work())
    mine = list(client.utility_results)
    assert len(set(mine)) == 3
    assert {number & 0xFFFF for number in mine} == {0}
    assert (uuid.uuid1().int >> 64) & 0xFFFF


@pytest.mark.parametrize("more", [(), (0.5,)])
def test_how_busy_engines_are_is_what_waits_and_runs(more):
    client = Client(3)
    client.lb_engines = [[1, 2, *more], [0, 0, *more], [3, 9, *more]]
    assert busy(client) == [3, 0, 12]
    alone = Client(1)
    del alone.lb_engines
    assert busy(alone) == [0]


def test_workers_are_told_apart_by_their_replica():
    taps = (("resid_post", 0),)
    answers = [[worker_info(stage=stage, taps=taps) for stage in range(2)] for _ in range(2)]
    info = describe(answers)
    found = [(worker.replica, worker.stage) for worker in info.workers]
    assert found == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_how_many_engines_share_a_machine_rides_unseen_with_the_settings():
    plain = Settings(Config().to_dict())
    config = SimpleNamespace(additional_config={"midstream": plain})
    assert replicas_here(config) == 1
    text = json.dumps(plain)
    plain.replicas = 4
    assert json.dumps(plain) == text
    assert replicas_here(pickle.loads(pickle.dumps(config))) == 4
    assert replicas_here(SimpleNamespace(additional_config={"midstream": {}})) == 1


def test_any_offline_engine_is_refused_before_it_starts_anything():
    patches = pytest.importorskip("midstream.runtime.install")
    started = []
    config = SimpleNamespace(
        additional_config={"midstream": {}}, parallel_config=SimpleNamespace(data_parallel_size=2)
    )
    with pytest.raises(UnsupportedError, match=r"data_parallel_size=2: .*midstream\.AsyncLLM"):
        patches._engine_init(lambda *_: started.append(1), SimpleNamespace(), config, object, False)
    assert not started
    # One that does not name midstream is vLLM's own affair.
    config.additional_config = {}
    patches._engine_init(lambda *_: started.append(1), SimpleNamespace(), config, object, False)
    assert started == [1]


class Unstarted(AsyncLLM):
    """An engine without a process, which need not be shut down."""

    def __del__(self):
        pass


def test_a_call_from_another_event_loop_is_refused_with_the_reason():
    client = Client(1)
    client.resources.output_queue_task = None

    async def use():
        if getattr(client.resources, "output_queue_task", 0) is None:  # as vLLM at the first call
            client.resources.output_queue_task = asyncio.ensure_future(asyncio.sleep(0))
        return await call_all(client, ReadData("u", 0, 9))

    async def generate():
        llm = Unstarted.__new__(Unstarted)
        llm.engine_core, llm._front_end, llm._default_capture = client, "front end", None
        return await anext(aiter(llm.generate("x", None)))

    loop = asyncio.new_event_loop()
    assert len(loop.run_until_complete(use())) == 1
    assert len(loop.run_until_complete(use())) == 1
    for again in (use, generate):
        with pytest.raises(RuntimeError, match="call it there, with asyncio.run_coroutine_thread"):
            asyncio.run(again())
    loop.close()
    for again in (use, generate):
        with pytest.raises(RuntimeError, match="each asyncio.run has a loop of its own"):
            asyncio.run(again())
    del client.resources.output_queue_task  # as vLLM does when it shuts down
    assert len(asyncio.run(use())) == 1
