"""A forked child inherits the memory of leases: it ends none, and its rows stay as they are."""

import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from support.open_files import PIPE, open_files
from support.stored import SEGMENT, make_arena

from midstream.transport.forks import FORKS, NO_FORK
from midstream.transport.reader import MappedArena

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
READ, END = b"r", b"e"


@pytest.fixture
def held():
    """A reader's tensor of sevens, which fills a segment."""
    arena = make_arena()
    extent = arena.take(SEGMENT)
    extent.memory.fill_(7)
    reader = MappedArena(arena.leases.address)
    reader.update(arena.describe([extent.segment]), [])
    arrays = reader.lease(arena.lease([extent.segment]), [extent.segment])
    tensor = torch.from_numpy(arrays.pop(extent.segment))
    return SimpleNamespace(arena=arena, reader=reader, tensor=tensor, segment=extent.segment)


def forked(run):
    """Run a function in a forked child; return the child's id."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            run()
            status = 0
        finally:
            os._exit(status)
    return pid


def joined(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def overwritten(held):
    """Write other rows, and return whether they are where the first ones were."""
    extent = held.arena.take(SEGMENT)
    extent.memory.fill_(9)
    return bool(extent.segment == held.segment)


class Reading:
    """A forked child that reads a tensor when it is asked to, until it is ended."""

    def __init__(self, held):
        asked, self._ask = os.pipe()
        self._answers, answer = os.pipe()

        def run():
            # So that it also ends with this process, if a test fails before `end`.
            os.close(self._ask)
            while os.read(asked, 1) == READ:
                os.write(answer, bytes([int(held.tensor.min()), int(held.tensor.max())]))

        self.pid = forked(run)

    def read(self):
        os.write(self._ask, READ)
        return list(os.read(self._answers, 2))

    def end(self):
        os.write(self._ask, END)
        assert joined(self.pid) == 0


def test_a_lease_stays_when_a_forked_child_frees_its_tensors(held):
    def run():
        del held.tensor

    assert joined(forked(run)) == 0
    assert not overwritten(held)
    assert held.arena.used["leases"] == 1
    assert held.tensor.tolist() == [7] * SEGMENT
    del held.tensor
    assert held.reader.held == 0
    held.arena.sweep()
    assert held.arena.used["leases"] == 0


def test_a_child_reads_its_rows_after_the_parent_has_freed_them(held):
    child = Reading(held)
    del held.tensor
    assert held.reader.held == SEGMENT
    assert not overwritten(held)
    assert child.read() == [7, 7]
    child.end()
    assert held.reader.held == 0
    held.arena.sweep()
    assert held.arena.used["leases"] == 0


def test_a_killed_child_keeps_no_lease(held):
    child = Reading(held)
    del held.tensor
    os.kill(child.pid, signal.SIGKILL)
    joined(child.pid)
    assert held.reader.held == 0
    held.arena.sweep()
    assert held.arena.used["leases"] == 0


def test_a_childs_child_reads_its_rows_after_both_have_ended(held):
    go, said = os.pipe(), os.pipe()

    def inner():
        os.read(go[0], 1)
        os.write(said[1], bytes([int(held.tensor.max())]))

    joined(forked(lambda: forked(inner) and None))
    del held.tensor
    assert not overwritten(held)
    os.write(go[1], b"g")
    assert os.read(said[0], 1) == b"\x07"
    deadline = time.monotonic() + 30
    while held.reader.held and time.monotonic() < deadline:
        time.sleep(0.01)
    held.arena.sweep()
    assert held.arena.used["leases"] == 0


def test_a_lease_after_the_fork_ends_while_the_child_lives(held):
    child = Reading(held)
    extent = held.arena.take(SEGMENT)
    held.reader.update(held.arena.describe([extent.segment]), [])
    arrays = held.reader.lease(held.arena.lease([extent.segment]), [extent.segment])
    assert held.reader.held == 2 * SEGMENT
    arrays.clear()
    assert held.reader.held == SEGMENT
    child.end()


def test_a_fork_without_leases_opens_no_file(held):
    del held.tensor
    assert FORKS.newest() == NO_FORK
    before = open_files(PIPE)
    child = forked(lambda: time.sleep(30))
    try:
        assert open_files(PIPE) <= before
        assert FORKS.newest() == NO_FORK
    finally:
        os.kill(child, signal.SIGKILL)
        joined(child)


def test_files_of_ended_children_are_closed(held):
    FORKS.newest()
    before = open_files(PIPE)
    for _ in range(5):
        joined(forked(lambda: None))
    assert FORKS.newest() == NO_FORK
    assert open_files(PIPE) <= before
