"""Rows that leave the process take no other row with them, of whatever way they leave."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
import torch.multiprocessing
from support.plans import plan_of
from support.stored import make_arena, put_one, rows_block, worker_info

from midstream.codecs import Raw, RowEncoding
from midstream.results.activations import Activations
from midstream.results.encoded_rows import Rows
from midstream.runtime.frontend.results.assembly import activations_of, select_final
from midstream.runtime.frontend.rpc.remote_worker import RemoteWorker
from midstream.runtime.protocol.results import WorkerAnswer, split
from midstream.runtime.worker import result_buffer as results
from midstream.runtime.worker.request_state import RequestState
from midstream.runtime.worker.result_buffer import ResultBuffer

POSITIONS, HIDDEN = 20, 48
NBYTES = POSITIONS * HIDDEN * 4
TAPS = [("resid_post", layer) for layer in range(5)]
OTHER = b"another's bytes!"
MORE = 2500  # what a file has beside its tensors


class Held:
    """Rows of a request in an arena that is full of others' rows, as its caller has them."""

    def __init__(self, taps: int, steps: int = 1) -> None:
        self.arena = make_arena()
        plan = plan_of(captures=[(TAPS[:taps], ((0, None),))])
        self.values = torch.randn(POSITIONS, taps, HIDDEN)
        sizes = [POSITIONS // steps] * steps
        blocks, begin = [], 0
        for size in sizes:
            self.fill()
            rows = self.values[begin : begin + size]
            blocks.append(
                rows_block(tuple(range(taps)), range(begin, begin + size), rows, self.arena)
            )
            begin += size
        self.fill()
        request = RequestState("a", "u", plan, 0, [])
        request.blocks = blocks
        buffer = ResultBuffer(self.arena, lambda _: RowEncoding.of(Raw(), (), HIDDEN))
        header = put_one(buffer, "u", [request], mapped=True)
        worker = RemoteWorker(
            worker_info(
                taps=tuple(TAPS),
                hidden_size=HIDDEN,
                arena=self.arena.leases.address,
                arena_bytes=1 << 40,
            )
        )
        worker.see([header], [])
        (data,) = buffer.inline(["u"])
        answer = WorkerAnswer(worker.info, header, data or b"", worker.leased(header.lease))
        found = split([answer], 1)[0][0].blocks()
        tokens = list(range(POSITIONS + 1))
        nothing = dict.fromkeys(plan.taps, Rows(Raw(), HIDDEN, torch.float32, (), ()))
        self.rows = activations_of(
            plan, found, select_final(plan, tokens[:-1]), tokens[:-1], nothing
        )

    def fill(self) -> None:
        extent = self.arena.take(1024)
        extent.memory.copy_(torch.frombuffer(bytearray(OTHER * 64), dtype=torch.uint8))

    def leased(self) -> int:
        self.arena.sweep()
        return self.arena.used["leases"]


@pytest.fixture(autouse=True)
def _all_is_leased(monkeypatch):
    monkeypatch.setattr(results, "LEASED_BYTES", 1)


@pytest.fixture(params=[(1, 1), (5, 1), (5, 4)], ids=["one tap", "five taps", "in four steps"])
def held(request) -> Held:
    return Held(*request.param)


def by_save(row: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(row, file)
    assert len(file.getvalue()) <= NBYTES + MORE
    assert OTHER not in file.getvalue()
    return torch.load(io.BytesIO(file.getvalue()))


def by_pickle(row: torch.Tensor) -> torch.Tensor:
    data = pickle.dumps(row)
    assert len(data) <= NBYTES + MORE
    assert OTHER not in data
    return pickle.loads(data)


def by_numpy(row: torch.Tensor) -> torch.Tensor:
    data = row.numpy().tobytes()
    assert len(data) == NBYTES
    return torch.frombuffer(bytearray(data), dtype=torch.float32).view(row.shape)


def by_share_memory(row: torch.Tensor) -> torch.Tensor:
    assert row.share_memory_() is row
    assert row.is_shared()
    return row


def by_queue(row: torch.Tensor) -> torch.Tensor:
    through = torch.multiprocessing.get_context("spawn").SimpleQueue()
    through.put(row)
    return through.get()


@pytest.mark.parametrize(
    "leave", [by_save, by_pickle, copy.deepcopy, by_numpy, by_share_memory, by_queue]
)
def test_a_tensor_leaves_with_its_own_bytes(held, leave):
    for place, tap in enumerate(held.rows):
        row = held.rows[tap]
        found = leave(row)
        assert torch.equal(found, held.values[:, place])
        assert found.untyped_storage().nbytes() == NBYTES
        stored = torch.tensor([], dtype=torch.uint8).set_(found.untyped_storage())
        assert OTHER not in stored.numpy().tobytes()


def test_a_part_of_a_tensor_leaves_with_rows_of_its_own_request_alone(held):
    for tap in held.rows:
        data = pickle.dumps(held.rows[tap][3:7])
        assert len(data) <= NBYTES * len(held.rows) + MORE
        assert OTHER not in data


def test_results_leave_as_the_bytes_of_their_rows(held):
    for read in (False, True):
        data = pickle.dumps(held.rows)
        assert len(data) <= NBYTES * len(held.rows) + 4 * MORE
        assert OTHER not in data
        for found in (pickle.loads(data), copy.deepcopy(held.rows)):
            assert isinstance(found, Activations)
            assert found.keys() == held.rows.keys()
            assert found.positions.tolist() == list(range(POSITIONS))
            assert found.token_ids.tolist() == list(range(POSITIONS))
            for place, tap in enumerate(found):
                assert torch.equal(found[tap], held.values[:, place])
        if not read:
            held.rows.items()


def test_copies_end_no_lease_and_keep_none(held):
    copies = copy.deepcopy(held.rows), pickle.loads(pickle.dumps(held.rows))
    assert held.leased() == 1
    held.rows = None
    assert held.leased() == 0
    assert all(torch.equal(found[TAPS[0]], held.values[:, 0]) for found in copies)


def test_rows_that_lie_together_are_not_copied_when_they_are_read():
    held = Held(taps=5)
    first, second = held.rows[TAPS[0]], held.rows[TAPS[1]]
    assert second.data_ptr() - first.data_ptr() == HIDDEN * 4
    first.fill_(0)
    assert torch.equal(held.rows[TAPS[0]], torch.zeros(POSITIONS, HIDDEN))
    assert torch.equal(second, held.values[:, 1])
    whole = Held(taps=1).rows[TAPS[0]]
    assert type(whole) is torch.Tensor
    assert whole.untyped_storage().nbytes() == NBYTES


def test_rows_between_others_are_tensors_in_every_other_way():
    row = Held(taps=5).rows[TAPS[2]]
    plain = row.contiguous()
    assert isinstance(row, torch.Tensor)
    assert type(plain) is torch.Tensor
    assert type(row + 1) is type(row[2]) is type(row.clone()) is torch.Tensor
    assert repr(row) == repr(plain)
    torch.testing.assert_close(row, plain)
    assert torch.equal(torch.stack([row, row])[1], plain)
    assert np.array_equal(np.asarray(row), plain.numpy())
    row.requires_grad_()
    assert copy.deepcopy(row).requires_grad
    (row * 2).sum().backward()
    assert torch.equal(row.grad, torch.full_like(plain, 2))
