"""The outbox: what a worker holds for the front end, and how it is cut."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.fake_steps import TAPS
from support.plans import plan_of
from support.stored import outbox_of, put_one, rows_block, unmapped, worker_info

from midstream.errors import FetchError
from midstream.runtime.frontend.rpc import fetch as fetching
from midstream.runtime.frontend.rpc.remote_worker import RemoteWorker
from midstream.runtime.protocol.codec import encode, pack
from midstream.runtime.protocol.rpc import (
    Acknowledged,
    CollectedResults,
    CollectResults,
    DiscardData,
    ReadData,
    ResultData,
    read_answers,
    read_request,
)
from midstream.runtime.worker import result_buffer as results
from midstream.runtime.worker.request_state import RequestState

EVERYWHERE = ((0, None),)
NAMES = list(TAPS)


def request(*blocks, done=(), name="a", problem="", scores=(), probes=2):
    """A finished request with some blocks, of a plan with some probes."""
    plan = plan_of(probes=[(f"p{n}", NAMES[0], EVERYWHERE) for n in range(probes)])
    found = RequestState(name, "u", plan, 0, [])
    found.blocks = list(blocks)
    found.scores = list(scores)
    found.done = np.array(done, np.uint16)
    found.problem = problem
    return found


def block(positions, taps, value, dtype=torch.float32):
    """Rows whose every vector tells its position, its place and a value of its own."""
    places = range(len(taps))
    values = torch.tensor([[[value, p, place, 0.5] for place in places] for p in positions])
    return rows_block(taps, positions, values.to(dtype))


def test_data_is_read_in_pieces_until_it_is_released():
    outbox = outbox_of()
    header = put_one(
        outbox, "u", [request(block(range(0, 9), (0, 1), 3), done=[1] * 9)], mapped=False
    )
    whole = outbox.read("u", 0, header.nbytes)
    pieces = [outbox.read("u", offset, 7) for offset in range(0, header.nbytes, 7)]
    assert b"".join(pieces) == whole
    assert outbox.read("u", header.nbytes, 7) == b""
    outbox.release("u")
    with pytest.raises(FetchError, match="the worker has no data for u"):
        outbox.read("u", 0, 1)
    outbox.release("u")
    outbox.release("never heard of")


@pytest.mark.parametrize(
    ("total", "sizes", "inline"),
    [
        (1 << 20, [100, 102], [True, False]),
        (250, [100] * 3, [True, True, False]),
        (250, [1000, 100], [False, True]),
    ],
)
def test_small_data_comes_with_the_header_as_far_as_there_is_room(
    monkeypatch, total, sizes, inline
):
    monkeypatch.setattr(results, "INLINE_BYTES", 100)
    monkeypatch.setattr(results, "INLINE_TOTAL", total)
    outbox, names = outbox_of(), "abc"[: len(sizes)]
    for name, size in zip(names, sizes, strict=True):
        put_one(outbox, name, [request(done=[1] * (size // 2))], mapped=False)
    sent = outbox.inline(list(names))
    whole = [np.ones(size // 2, np.uint16).tobytes() for size in sizes]
    assert sent == [data if comes else None for data, comes in zip(whole, inline, strict=True)]
    held = [name for name, comes in zip(names, inline, strict=True) if not comes]
    assert list(outbox._data) == held
    assert [len(outbox.read(name, 0, 9999)) for name in held] == [
        size for size, comes in zip(sizes, inline, strict=True) if not comes
    ]


def test_each_front_end_reads_its_own_answer_to_the_end(monkeypatch):
    monkeypatch.setattr(results, "INLINE_BYTES", 100)
    outbox = outbox_of()
    # Of a front end's two results another worker has a large one, which all workers are asked for.
    put_one(outbox, "one", [request(done=[1] * 50)], mapped=False, front_end=0)
    assert outbox.inline(["one"], 0) != [None]
    put_one(outbox, "other", [request(done=[1] * 50)], mapped=False, front_end=1)
    assert outbox.inline(["other"], 1) != [None]
    assert outbox.read("one", 0, 999) == outbox.read("other", 0, 999) == b""
    outbox.release("other")
    assert outbox.read("one", 0, 999) == b""
    assert outbox.inline([], 0) == []
    with pytest.raises(FetchError):
        outbox.read("one", 0, 999)


class Arriving:
    """A shipment that notes who waits for it."""

    def __init__(self, shipment):
        self.shipment, self.waited = shipment, 0

    def wait(self):
        self.waited += 1


@pytest.mark.parametrize("is_leased", [False, True])
def test_rows_of_a_running_request_are_there_when_their_answer_is(monkeypatch, is_leased):
    monkeypatch.setattr(results, "LEASED_BYTES", 1 if is_leased else 1 << 30)
    outbox = outbox_of()
    found = rows_block((0,), range(3), torch.ones(3, 1, 4), outbox._arena)
    arriving = [Arriving(source.shipment) for source in found.sources]
    sources = [one._replace(shipment=way) for one, way in zip(found.sources, arriving, strict=True)]
    header = put_one(outbox, "u", [request(replace(found, sources=sources))], mapped=True)
    assert (header.lease is not None) == is_leased
    assert [one.waited for one in arriving] == [1]


def test_rows_in_the_same_segments_have_one_lease_until_the_last_of_them_is_freed(monkeypatch):
    monkeypatch.setattr(results, "LEASED_BYTES", 1)
    outbox = outbox_of()
    arena = outbox._arena
    block = rows_block((0,), range(3), torch.ones(3, 1, 4), arena)
    arena.take(1 << 20)  # the next rows are in another segment
    other = rows_block((0,), range(3), torch.ones(3, 1, 4), arena)
    found = {"a": [request(block)], "b": [request(block)], "c": [request(other)], "d": []}
    headers = outbox.put(found, mapped=True)
    assert headers[0].lease == headers[1].lease
    assert headers[2].lease.number != headers[0].lease.number
    assert headers[3].lease is None
    assert len(arena.leases) == 2
    reader = RemoteWorker(worker_info(taps=(NAMES[0],), arena=arena.leases.address, arena_bytes=99))
    answer = CollectedResults(encode(headers), outbox.inline(list(found)), [], [])
    exchange = fetching.collect([reader], list(found))
    next(exchange)
    with pytest.raises(StopIteration) as end:
        exchange.send([answer])
    answers = end.value.value
    del end
    for name, leases in (("a", 2), ("c", 1), ("b", 0)):
        assert answers.pop(name)[0].leased is not None
        arena.sweep()
        assert len(arena.leases) == leases


class Worker:
    """A worker's answers to the front end, from a real outbox."""

    def __init__(self, stage, tensor_rank, requests):
        self.outbox = outbox_of()
        self.requests = requests
        self.reader = unmapped(stage, tensor_rank)

    def answer(self, request):
        match read_request(pack(request)):
            case CollectResults(uids, mapped):
                headers = [
                    put_one(self.outbox, uid, self.requests, mapped=bool(mapped)) for uid in uids
                ]
                return CollectedResults(encode(headers), self.outbox.inline(uids), [], [])
            case ReadData(name, offset, size):
                return ResultData(self.outbox.read(name, offset, size))
            case DiscardData(name):
                self.outbox.release(name)
        return Acknowledged()


def collect(monkeypatch, workers, uids):
    """What a front end makes of the workers' answers, reading 16 bytes at a time."""
    monkeypatch.setattr(fetching, "READ_BYTES", 16)

    def call(request):
        return read_answers(request, [pack(worker.answer(request)) for worker in workers])

    exchange = fetching.collect([worker.reader for worker in workers], uids)
    return fetching.carry_out(exchange, call)


@pytest.mark.parametrize("done", [None, [], [1] * 3], ids=["alone", "empty", "small"])
def test_large_results_are_read_in_pieces_beside_small_ones_of_another_rank(monkeypatch, done):
    # Ranks after the first may have states only; a stage may have no taps.
    monkeypatch.setattr(results, "INLINE_BYTES", 10)
    workers = [Worker(0, 0, [request(block(range(0, 9), (0, 1), 3), done=[1] * 3)])]
    workers += [] if done is None else [Worker(0, 1, [request(done=done)])]
    large, *small = collect(monkeypatch, workers, ["u"])["u"]
    whole = outbox_of()
    put_one(whole, "u", workers[0].requests, mapped=False)
    assert large.data == whole.read("u", 0, 9999)
    assert len(large.data) == large.header.nbytes > 16
    assert [answer.data for answer in small] == [np.array(done, np.uint16).tobytes() for _ in small]
    assert not any(worker.outbox._data for worker in workers)
