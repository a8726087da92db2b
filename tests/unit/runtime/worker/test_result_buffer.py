"""The outbox: what a worker holds for the front end, and how it is cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.fake_steps import TAPS, Fake, FakeEngine, captured, scored
from support.plans import VECTORS, plan_of
from support.stored import outbox_of, put_one, rows_block, scores_block, unmapped, worker_info

from midstream.errors import FetchError
from midstream.runtime.frontend.rpc import fetch as fetching
from midstream.runtime.frontend.rpc.remote_worker import RemoteWorker
from midstream.runtime.protocol.codec import encode, pack
from midstream.runtime.protocol.codec import unpack as unpack_message
from midstream.runtime.protocol.results import ResultHeader, ScoresHeader
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


def unpack(entry, data, dtype=torch.float32):
    """(states, {taps: (positions, values)}) of one request, as the header says to cut."""
    size = 2 * entry.states
    states = np.frombuffer(data[:size], np.uint16).tolist()
    blocks = {}
    for block in entry.rows:
        piece = bytearray(data[size : size + block.nbytes])
        size += block.nbytes
        positions = [p for first, n in block.runs for p in range(first, first + n)]
        taps = tuple(NAMES[tap] for tap in block.taps)
        values = torch.frombuffer(piece, dtype=dtype).view(len(positions), len(taps), 4)
        assert taps not in blocks
        blocks[taps] = (positions, values.float().tolist())
    return states, blocks, size


def test_the_header_says_how_to_cut_the_data():
    outbox = outbox_of()
    header = put_one(outbox, "u", [request(block(range(4), (0, 2), 7), done=[1] * 4)], mapped=False)
    data = outbox.read("u", 0, 10**6)
    assert len(data) == header.nbytes
    states, blocks, size = unpack(header.requests[0], data)
    assert size == len(data)
    assert states == [1, 1, 1, 1]
    assert list(blocks) == [(NAMES[0], NAMES[2])]
    positions, values = blocks[NAMES[0], NAMES[2]]
    assert positions == [0, 1, 2, 3]
    assert values == [[[7, p, place, 0.5] for place in range(2)] for p in positions]


def test_blocks_follow_each_other_and_gaps_between_positions_are_runs():
    outbox = outbox_of()
    found = request(block([0, 1, 3, 7, 8], (0,), 1), block([2], (0, 1), 2))
    header = put_one(outbox, "u", [found], mapped=False)
    assert [one.runs for one in header.requests[0].rows] == [
        [(0, 2), (3, 1), (7, 2)],
        [(2, 1)],
    ]
    _, blocks, _ = unpack(header.requests[0], outbox.read("u", 0, 10**6))
    assert blocks[(NAMES[0],)][0] == [0, 1, 3, 7, 8]
    assert blocks[NAMES[0], NAMES[1]] == ([2], [[[2, 2, 0, 0.5], [2, 2, 1, 0.5]]])


def test_rows_that_are_a_view_of_others_are_packed_by_themselves():
    outbox = outbox_of()
    whole = block(range(6), (0, 1, 2), 4)
    part = whole.since(4)
    header = put_one(outbox, "u", [request(part)], mapped=False)
    _, blocks, _ = unpack(header.requests[0], outbox.read("u", 0, 10**6))
    assert blocks[tuple(NAMES[:3])] == (
        [4, 5],
        [[[4, p, place, 0.5] for place in range(3)] for p in (4, 5)],
    )


def test_scores_follow_the_rows_of_a_request_as_wide_as_its_plan_has_probes():
    outbox = outbox_of()
    values = torch.arange(24.0).view(3, 1, 8)
    found = request(
        block(range(2), (0,), 7),
        done=[1] * 3,
        scores=[scores_block([0, 1, 5], values[:, 0])],
    )
    header = put_one(outbox, "u", [found, request(done=[9], name="next")], mapped=False)
    first, second = header.requests
    data = outbox.read("u", 0, 10**6)
    _, _, size = unpack(first, data)
    assert first.scores == [ScoresHeader([(0, 2), (5, 1)], 3 * 2 * 4)]
    read = torch.frombuffer(bytearray(data[size : size + 24]), dtype=torch.float32)
    assert read.view(3, 2).tolist() == [[0.0, 1.0], [8.0, 9.0], [16.0, 17.0]]
    assert unpack(second, data[size + 24 :])[0] == [9]
    assert second.scores == []
    assert unpack_message(ResultHeader, pack(header), "header") == header


def test_a_rank_through_which_no_rows_leave_sends_its_states_and_problems():
    outbox = outbox_of()
    header = put_one(
        outbox,
        "u",
        [request(done=[1, 2], problem="bad")],
        mapped=False,
    )
    entry = header.requests[0]
    assert entry.rows == entry.scores == []
    assert entry.problem == "bad"
    states, _, size = unpack(entry, outbox.read("u", 0, 10**6))
    assert states == [1, 2]
    assert size == header.nbytes == 4


def test_the_requests_of_one_uid_follow_each_other():
    outbox = outbox_of()
    header = put_one(
        outbox,
        "u",
        [
            request(block(range(0, 1), (0,), 5), done=[1], name="0_x"),
            request(name="1_x"),
            request(block(range(1, 3), (1,), 6), done=[0xFFFF, 1, 1], name="2_x"),
        ],
        mapped=False,
    )
    data, offset, found = outbox.read("u", 0, 10**6), 0, {}
    for entry in header.requests:
        states, blocks, size = unpack(entry, data[offset:])
        offset += size
        found[entry.id] = states, {taps: p for taps, (p, _) in blocks.items()}
    assert offset == len(data)
    assert found == {
        "0_x": ([1], {(NAMES[0],): [0]}),
        "1_x": ([], {}),
        "2_x": ([0xFFFF, 1, 1], {(NAMES[1],): [1, 2]}),
    }
    assert unpack_message(ResultHeader, pack(header), "header") == header


def test_bfloat16_rows_keep_their_bytes():
    outbox = outbox_of()
    header = put_one(
        outbox, "u", [request(block(range(0, 2), (0, 1), 3, torch.bfloat16))], mapped=False
    )
    assert header.nbytes == 2 * 2 * 4 * 2
    _, blocks, _ = unpack(header.requests[0], outbox.read("u", 0, 999), torch.bfloat16)
    assert blocks[NAMES[0], NAMES[1]][1][1] == [[3, 1, 0, 0.5], [3, 1, 1, 0.5]]


def test_what_a_session_kept_comes_out_of_the_outbox():
    plan = plan_of(
        edits=[(("resid_post", 1), VECTORS[0], 2.0, ((2, None),))],
        captures=[([NAMES[0], NAMES[3]], EVERYWHERE), ([NAMES[5]], ((2, 4),))],
        probes=[("p", NAMES[1], ((1, 5),))],
    )
    engine, fake = FakeEngine(), Fake("a", plan)
    engine.add(fake)
    for count in (3, 2, 1):
        engine.step([(fake, count)])
    taken = engine.take("a")
    kept = captured(taken[0])
    outbox = outbox_of()
    header = put_one(outbox, "a", taken, mapped=False)
    data = outbox.read("a", 0, 10**6)
    states, blocks, size = unpack(header.requests[0], data)
    assert states == fake.done
    assert header.requests[0].scores == [ScoresHeader([(1, 4)], 16)]
    read = torch.frombuffer(bytearray(data[size:]), dtype=torch.float32).tolist()
    assert read == [scored(taken[0])[position][0] for position in range(1, 5)]
    found = {
        (tap, position): row[place]
        for taps, (positions, values) in blocks.items()
        for position, row in zip(positions, values, strict=True)
        for place, tap in enumerate(taps)
    }
    assert set(found) == set(kept) == set(fake.rows)
    assert all(found[key] == kept[key].tolist() for key in kept)


# ---------------------------------------------------------------- held and let go


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


def test_small_data_comes_with_the_header_and_is_not_held(monkeypatch):
    monkeypatch.setattr(results, "INLINE_BYTES", 100)
    outbox = outbox_of()
    put_one(outbox, "small", [request(done=[1] * 50)], mapped=False)
    put_one(outbox, "large", [request(done=[1] * 51)], mapped=False)
    small, large = outbox.inline(["small", "large"])
    assert small == np.ones(50, np.uint16).tobytes()
    assert large is None
    assert list(outbox._data) == ["large"]
    assert len(outbox.read("large", 0, 999)) == 102


def test_data_that_is_small_one_by_one_may_be_too_much_together(monkeypatch):
    monkeypatch.setattr(results, "INLINE_TOTAL", 250)
    outbox = outbox_of()
    for name in "abc":
        put_one(outbox, name, [request(done=[1] * 50)], mapped=False)
    assert [data is not None for data in outbox.inline(list("abc"))] == [True, True, False]


def test_large_data_does_not_keep_small_data_from_coming_with_the_header(monkeypatch):
    monkeypatch.setattr(results, "INLINE_BYTES", 100)
    monkeypatch.setattr(results, "INLINE_TOTAL", 250)
    outbox = outbox_of()
    put_one(outbox, "large", [request(done=[1] * 500)], mapped=False)
    put_one(outbox, "small", [request(done=[1] * 50)], mapped=False)
    assert [data is not None for data in outbox.inline(["large", "small"])] == [False, True]


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
    sources = [replace(one, shipment=way) for one, way in zip(found.sources, arriving, strict=True)]
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


# ---------------------------------------------------------------- with the front end


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


def test_large_results_are_read_in_pieces_and_put_together(monkeypatch):
    monkeypatch.setattr(results, "INLINE_BYTES", 10)
    worker = Worker(0, 0, [request(block(range(0, 9), (0, 1), 3), done=[1] * 9)])
    [answer] = collect(monkeypatch, [worker], ["u"])["u"]
    header, data = answer.header, answer.data
    assert len(data) == header.nbytes > 16
    _, blocks, _ = unpack(header.requests[0], data)
    assert blocks[NAMES[0], NAMES[1]][0] == list(range(9))
    assert worker.outbox._data == {}


@pytest.mark.parametrize("done", [[], [1] * 3], ids=["empty", "small"])
def test_large_results_of_one_rank_are_read_beside_small_ones_of_another(monkeypatch, done):
    # Ranks after the first may have states only; a stage may have no taps.
    monkeypatch.setattr(results, "INLINE_BYTES", 10)
    large = Worker(0, 0, [request(block(range(0, 9), (0, 1), 3), done=[1] * 3)])
    small = Worker(0, 1, [request(done=done)])
    found = collect(monkeypatch, [large, small], ["u"])["u"]
    assert [len(one.data) for one in found] == [one.header.nbytes for one in found]
    assert len(found[0].data) > 16
    assert found[1].data == np.array(done, np.uint16).tobytes()
    assert large.outbox._data == small.outbox._data == {}
