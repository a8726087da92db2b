"""The outbox: what a worker holds for the front end, and how it is cut."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.fake_steps import TAPS, VECTORS, Fake, FakeEngine, captured, plan_of

from midstream.errors import FetchError
from midstream.runtime import results
from midstream.runtime.ledger import Block
from midstream.runtime.requests import Request
from midstream.runtime.results import Outbox

EVERYWHERE = ((0, None),)
NAMES = list(TAPS)


def request(*blocks, done=(), name="a", problem=""):
    """A finished request with some blocks."""
    found = Request(name, "u", plan_of(captures=[([NAMES[0]], EVERYWHERE)]), 0, [])
    found.blocks = list(blocks)
    found.done = np.array(done, np.uint16)
    found.problem = problem
    return found


def block(positions, taps, value, dtype=torch.float32):
    """Rows whose every vector tells its position, its place and a value of its own."""
    places = range(len(taps))
    values = torch.tensor([[[value, p, place, 0.5] for place in places] for p in positions])
    return Block(taps, np.array(positions), values.to(dtype))


def unpack(entry, data, dtype=torch.float32):
    """(states, {taps: (positions, values)}) of one request, as the header says to cut."""
    size = 2 * entry["done"]
    states = np.frombuffer(data[:size], np.uint16).tolist()
    blocks = {}
    for block in entry["blocks"]:
        piece = bytearray(data[size : size + block["nbytes"]])
        size += block["nbytes"]
        positions = [p for first, n in block["runs"] for p in range(first, first + n)]
        taps = tuple(tuple(tap) for tap in block["taps"])
        values = torch.frombuffer(piece, dtype=dtype).view(len(positions), len(taps), 4)
        assert taps not in blocks
        blocks[taps] = (positions, values.float().tolist())
    return states, blocks, size


def test_the_header_says_how_to_cut_the_data():
    outbox = Outbox(NAMES)
    header = outbox.put("u", [request(block(range(4), (0, 2), 7), done=[1] * 4)], True)
    data = outbox.read("u", 0, 10**6)
    assert len(data) == header["nbytes"]
    states, blocks, size = unpack(header["requests"][0], data)
    assert size == len(data)
    assert states == [1, 1, 1, 1]
    assert list(blocks) == [(NAMES[0], NAMES[2])]
    positions, values = blocks[NAMES[0], NAMES[2]]
    assert positions == [0, 1, 2, 3]
    assert values == [[[7, p, place, 0.5] for place in range(2)] for p in positions]


def test_blocks_follow_each_other_and_gaps_between_positions_are_runs():
    outbox = Outbox(NAMES)
    found = request(block([0, 1, 3, 7, 8], (0,), 1), block([2], (0, 1), 2))
    header = outbox.put("u", [found], True)
    assert [one["runs"] for one in header["requests"][0]["blocks"]] == [
        [[0, 2], [3, 1], [7, 2]],
        [[2, 1]],
    ]
    _, blocks, _ = unpack(header["requests"][0], outbox.read("u", 0, 10**6))
    assert blocks[(NAMES[0],)][0] == [0, 1, 3, 7, 8]
    assert blocks[NAMES[0], NAMES[1]] == ([2], [[[2, 2, 0, 0.5], [2, 2, 1, 0.5]]])


def test_rows_that_are_a_view_of_others_are_packed_by_themselves():
    outbox = Outbox(NAMES)
    whole = block(range(6), (0, 1, 2), 4)
    part = Block((0, 1, 2), np.array([4, 5]), whole.values[4:])
    turned = Block((0,), np.array([0, 1]), whole.values[:2].flip(1)[:, :1])
    header = outbox.put("u", [request(part, turned)], True)
    _, blocks, _ = unpack(header["requests"][0], outbox.read("u", 0, 10**6))
    assert blocks[tuple(NAMES[:3])] == ([4, 5], whole.values[4:].tolist())
    assert [row[0][2] for row in blocks[(NAMES[0],)][1]] == [2, 2]


def test_a_rank_that_does_not_send_rows_sends_its_states_and_problems():
    outbox = Outbox(NAMES)
    header = outbox.put(
        "u", [request(block(range(0, 2), (0,), 1), done=[1, 2], problem="bad")], False
    )
    entry = header["requests"][0]
    assert entry["blocks"] == []
    assert entry["problem"] == "bad"
    states, _, size = unpack(entry, outbox.read("u", 0, 10**6))
    assert states == [1, 2]
    assert size == header["nbytes"] == 4


def test_the_requests_of_one_uid_follow_each_other():
    outbox = Outbox(NAMES)
    header = outbox.put(
        "u",
        [
            request(block(range(0, 1), (0,), 5), done=[1], name="0_x"),
            request(name="1_x"),
            request(block(range(1, 3), (1,), 6), done=[0xFFFF, 1, 1], name="2_x"),
        ],
        True,
    )
    data, offset, found = outbox.read("u", 0, 10**6), 0, {}
    for entry in header["requests"]:
        states, blocks, size = unpack(entry, data[offset:])
        offset += size
        found[entry["id"]] = states, {taps: p for taps, (p, _) in blocks.items()}
    assert offset == len(data)
    assert found == {
        "0_x": ([1], {(NAMES[0],): [0]}),
        "1_x": ([], {}),
        "2_x": ([0xFFFF, 1, 1], {(NAMES[1],): [1, 2]}),
    }
    assert json.loads(json.dumps(header)) == header


def test_bfloat16_rows_keep_their_bytes():
    outbox = Outbox(NAMES)
    header = outbox.put("u", [request(block(range(0, 2), (0, 1), 3, torch.bfloat16))], True)
    assert header["nbytes"] == 2 * 2 * 4 * 2
    _, blocks, _ = unpack(header["requests"][0], outbox.read("u", 0, 999), torch.bfloat16)
    assert blocks[NAMES[0], NAMES[1]][1][1] == [[3, 1, 0, 0.5], [3, 1, 1, 0.5]]


def test_what_a_session_kept_comes_out_of_the_outbox():
    plan = plan_of(
        edits=[(("resid_post", 1), VECTORS[0], 2.0, ((2, None),))],
        captures=[([NAMES[0], NAMES[3]], EVERYWHERE), ([NAMES[5]], ((2, 4),))],
    )
    engine, fake = FakeEngine(), Fake("a", plan)
    engine.add(fake)
    for count in (3, 2, 1):
        engine.step([(fake, count)])
    taken = engine.take("a")
    kept = captured(taken[0])
    outbox = Outbox(NAMES)
    header = outbox.put("a", taken, True)
    states, blocks, _ = unpack(header["requests"][0], outbox.read("a", 0, 10**6))
    assert states == fake.done
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
    outbox = Outbox(NAMES)
    header = outbox.put("u", [request(block(range(0, 9), (0, 1), 3), done=[1] * 9)], True)
    whole = outbox.read("u", 0, header["nbytes"])
    pieces = [outbox.read("u", offset, 7) for offset in range(0, header["nbytes"], 7)]
    assert b"".join(pieces) == whole
    assert outbox.read("u", header["nbytes"], 7) == b""
    outbox.release("u")
    with pytest.raises(FetchError, match="nothing is held for u"):
        outbox.read("u", 0, 1)
    outbox.release("u")
    outbox.release("never heard of")


def test_small_data_comes_with_the_header_and_is_not_held(monkeypatch):
    monkeypatch.setattr(results, "INLINE_BYTES", 100)
    outbox = Outbox(NAMES)
    outbox.put("small", [request(done=[1] * 50)], True)
    outbox.put("large", [request(done=[1] * 51)], True)
    small, large = outbox.inline(["small", "large"])
    assert small == np.ones(50, np.uint16).tobytes()
    assert large is None
    assert list(outbox._data) == ["large"]
    assert len(outbox.read("large", 0, 999)) == 102


def test_data_that_is_small_one_by_one_may_be_too_much_together(monkeypatch):
    monkeypatch.setattr(results, "INLINE_TOTAL", 250)
    outbox = Outbox(NAMES)
    for name in "abc":
        outbox.put(name, [request(done=[1] * 50)], True)
    assert [data is not None for data in outbox.inline(list("abc"))] == [True, True, False]


def test_large_data_does_not_keep_small_data_from_coming_with_the_header(monkeypatch):
    monkeypatch.setattr(results, "INLINE_BYTES", 100)
    monkeypatch.setattr(results, "INLINE_TOTAL", 250)
    outbox = Outbox(NAMES)
    outbox.put("large", [request(done=[1] * 500)], True)
    outbox.put("small", [request(done=[1] * 50)], True)
    assert [data is not None for data in outbox.inline(["large", "small"])] == [False, True]


# ---------------------------------------------------------------- with the front end


class Worker:
    """A worker's answers to the front end, from a real outbox."""

    def __init__(self, stage, tensor_rank, requests, with_rows):
        self.outbox = Outbox(NAMES)
        self.requests, self.with_rows = requests, with_rows
        self.place = {"stage": stage, "tensor_rank": tensor_rank}

    def answer(self, op, argument):
        given = json.loads(argument)
        if op == "describe":
            taps = {"num_layers": 3, "hidden_size": 4, "taps": NAMES, "lacking": []}
            rest = {"dtype": "float32", "capture_limit": 9}
            return {"json": json.dumps({**self.place, **taps, **rest})}
        if op == "collect":
            headers = [self.outbox.put(uid, self.requests, self.with_rows) for uid in given]
            return {"json": json.dumps(headers), "inline": self.outbox.inline(given)}
        if op == "read":
            return {"data": self.outbox.read(*given)}
        assert op == "release"
        for uid in given:
            self.outbox.release(uid)
        return {}


def collect(monkeypatch, workers, uids):
    """What a real front end makes of the workers' answers, reading 16 bytes at a time."""
    frontend = pytest.importorskip("midstream.runtime.frontend")
    monkeypatch.setattr(frontend, "_READ_BYTES", 16)
    engine = SimpleNamespace(
        collective_rpc=lambda _method, timeout=None, args=(): [w.answer(*args) for w in workers],
        has_unfinished_requests=lambda: False,
    )
    front = frontend.FrontEnd(engine)
    return front._collect(uids)


def test_large_results_are_read_in_pieces_and_put_together(monkeypatch):
    monkeypatch.setattr(results, "INLINE_BYTES", 10)
    worker = Worker(0, 0, [request(block(range(0, 9), (0, 1), 3), done=[1] * 9)], True)
    [(header, data)] = collect(monkeypatch, [worker], ["u"])["u"]
    assert len(data) == header["nbytes"] > 16
    _, blocks, _ = unpack(header["requests"][0], data)
    assert blocks[NAMES[0], NAMES[1]][0] == list(range(9))
    assert worker.outbox._data == {}


@pytest.mark.parametrize("done", [[], [1] * 3], ids=["empty", "small"])
def test_large_results_of_one_rank_are_read_beside_small_ones_of_another(monkeypatch, done):
    # Ranks of a tensor-parallel group after the first send states only; a stage may have no taps.
    monkeypatch.setattr(results, "INLINE_BYTES", 10)
    large = Worker(0, 0, [request(block(range(0, 9), (0, 1), 3), done=[1] * 3)], True)
    small = Worker(0, 1, [request(done=done)], False)
    found = collect(monkeypatch, [large, small], ["u"])["u"]
    assert [len(data) for _, data in found] == [header["nbytes"] for header, _ in found]
    assert len(found[0][1]) > 16
    assert found[1][1] == np.array(done, np.uint16).tobytes()
    assert large.outbox._data == small.outbox._data == {}
