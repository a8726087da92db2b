"""Rows that are held: found by whoever knows their id, up to a limit and for a while."""

import errno
import os
import threading
import weakref

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.open_files import open_files

from midstream.config.http import HttpSettings
from midstream.errors import HttpError
from midstream.server.cached_rows.capture_cache import CaptureCache

LIMITS = HttpSettings(
    held_bytes=100, client_bytes=60, client_captures=3, held_captures=5, held_seconds=10
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def holding(clock):
    made = CaptureCache(LIMITS, clock)
    yield made
    made.close()


def read(holding, name):
    found = holding.open(name, "me")
    if found is None:
        return None
    try:
        return os.pread(found[1], 1 << 20, 0)
    finally:
        holding.end_read(*found)


def file_of(holding, held):
    return holding._captures[held.id].file


def status_of(holding, size, client):
    with pytest.raises(HttpError) as caught:
        holding.store(b"x" * size, client, "r", {})
    return caught.value.status


class Lazy:
    def __init__(self, data):
        self.data, self.nbytes, self.packed = data, len(data), 0

    def tobytes(self):
        self.packed += 1
        return self.data


def test_rows_are_packed_when_they_are_first_fetched_and_once(holding):
    rows, before = Lazy(b"abc"), open_files()
    held = holding.store(rows, "me", "r-1", {})
    assert (held.nbytes, holding.nbytes, rows.packed, open_files() - before) == (3, 3, 0, set())
    assert read(holding, held.id) == b"abc"
    assert read(holding, held.id) == b"abc"
    assert rows.packed == 1
    assert holding.delete(held.id)
    assert open_files() <= before


def test_rows_that_nobody_fetches_are_not_packed_and_are_let_go(holding, clock):
    rows = Lazy(b"abc")
    kept = weakref.ref(rows)
    holding.store(rows, "me", "r-1", {})
    holding.store(Lazy(b""), "me", "r-2", {})
    assert rows.packed == 0
    del rows
    clock.now = 10
    assert len(holding) == 0
    assert kept() is None


def test_rows_that_are_not_packed_count_for_the_limits(holding):
    holding.store(Lazy(b"x" * 50), "me", "r", {})
    assert status_of(holding, 11, "me") == 429


def test_ids_cannot_be_guessed(holding, monkeypatch):
    ids = {holding.store(b"", str(nth), "r", {}).id for nth in range(4)}
    assert len(ids) == 4
    assert all(len(one) == 32 for one in ids)
    # All of it is of the system's source of secrets, and 24 bytes of it.
    monkeypatch.setattr("secrets.token_urlsafe", lambda nbytes: f"{nbytes} secret bytes")
    assert holding.store(b"", "x", "r", {}).id == "24 secret bytes"


def test_a_client_is_refused_with_429_for_bytes_and_for_captures(holding):
    holding.store(b"x" * 50, "me", "r", {})
    assert status_of(holding, 11, "me") == 429
    holding.store(b"x" * 10, "me", "r", {})
    holding.store(b"", "me", "r", {})
    assert status_of(holding, 0, "me") == 429
    holding.store(b"x" * 40, "you", "r", {})


def test_everybody_is_refused_with_507_for_bytes_and_for_captures(holding):
    for client in "ab":
        holding.store(b"x" * 50, client, "r", {})
    assert status_of(holding, 1, "c") == 507
    with pytest.raises(HttpError, match="100 bytes of captures"):
        holding.reserve("c", 1)
    holding.close()
    for nth in range(5):
        holding.store(b"", str(nth), "r", {})
    assert status_of(holding, 0, "new") == 507


def test_rows_that_were_refused_meanwhile_leave_no_file_open(holding, monkeypatch):
    from midstream.server.cached_rows import capture_cache as held

    make = held.file_of

    def slow(data):
        # Another request of the client is quicker.
        monkeypatch.setattr(held, "file_of", make)
        holding.store(b"x" * 60, "me", "r", {})
        return make(data)

    monkeypatch.setattr(held, "file_of", slow)
    before = open_files()
    assert status_of(holding, 60, "me") == 429
    assert len(open_files() - before) == 1
    assert holding.nbytes == 60


def test_rows_expire_and_their_room_is_there_again(holding, clock):
    held = holding.store(b"x" * 60, "me", "r", {})
    assert held.expires_at == 10
    clock.now = 9.9
    assert read(holding, held.id) == b"x" * 60
    before = open_files()
    clock.now = 10
    assert read(holding, held.id) is None
    assert holding.of_client("me") == []
    assert not holding.delete(held.id)
    assert len(before - open_files()) == 1
    holding.reserve("me", 1)


def test_whoever_reads_has_the_same_rows_though_they_expire_and_the_number_is_used_again(
    holding, clock
):
    held = holding.store(b"mine", "me", "r", {})
    number = file_of(holding, held)
    entry, file = holding.open(held.id, "me")
    clock.now = 10
    others = [holding.store(b"theirs", "you", "r", {}) for _ in range(3)]
    assert number in {file_of(holding, one) for one in others}
    assert os.pread(file, 100, 0) == b"mine"
    holding.end_read(entry, file)


def test_rows_that_are_deleted_while_they_are_read_count_until_they_were(clock):
    holding = CaptureCache(HttpSettings(client_bytes=100, held_bytes=100), clock)
    held = holding.store(b"x" * 60, "me", "r", {})
    readers = [holding.open(held.id, "me") for _ in range(2)]
    assert holding.delete(held.id)
    for entry, file in readers:
        with pytest.raises(HttpError) as caught:
            holding.store(b"y" * 60, "me", "r", {})
        assert caught.value.status == 429
        with pytest.raises(HttpError) as caught:
            holding.store(b"y" * 60, "you", "r", {})
        assert caught.value.status == 507
        holding.end_read(entry, file)
    holding.store(b"y" * 60, "me", "r", {})
    holding.close()


def test_a_reader_without_a_descriptor_left_is_refused_and_counts_for_nothing(holding, monkeypatch):
    held = holding.store(b"rows", "a", "r", {})

    def full(file):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(os, "dup", full)
        with pytest.raises(HttpError) as caught:
            holding.open(held.id, "me")
    assert caught.value.status == 507
    assert holding.delete(held.id)
    # Its bytes are the client's again.
    holding.store(b"x" * 60, "a", "r", {})


def test_threads_that_hold_and_delete_at_once_leave_nothing_and_pass_no_limit(clock):
    holding = CaptureCache(HttpSettings(held_bytes=64, client_bytes=64), clock)
    before, most, wrong = open_files(), [], []

    def work(nth: int) -> None:
        data = bytes([nth]) * 8
        for _ in range(200):
            try:
                held = holding.store(data, str(nth), "r", {})
            except HttpError:
                continue
            most.append(holding.nbytes)
            if read(holding, held.id) != data:
                wrong.append(nth)
            holding.delete(held.id)

    threads = [threading.Thread(target=work, args=(nth,)) for nth in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert 8 <= max(most) <= 64
    assert (len(holding), open_files() - before) == (0, set())


class HoldingMachine(RuleBasedStateMachine):
    """Held against a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.holding = CaptureCache(LIMITS, self.clock)
        self.expected: dict[str, tuple[bytes, str, float]] = {}

    @rule(data=st.binary(max_size=60), client=st.sampled_from("abc"))
    def hold(self, data: bytes, client: str) -> None:
        mine = [one for one in self.expected.values() if one[1] == client]
        total = sum(len(one[0]) for one in self.expected.values())
        status = 0
        if len(mine) >= 3 or sum(len(one[0]) for one in mine) + len(data) > 60:
            status = 429
        elif len(self.expected) >= 5 or total + len(data) > 100:
            status = 507
        try:
            held = self.holding.store(data, client, "r", {})
        except HttpError as refusal:
            found = refusal.status
        else:
            found = 0
            self.expected[held.id] = (data, client, held.expires_at)
        assert found == status

    @rule(nth=st.integers(0, 5))
    def delete(self, nth: int) -> None:
        if nth < len(self.expected):
            name = list(self.expected)[nth]
            del self.expected[name]
            assert self.holding.delete(name)

    @rule(seconds=st.integers(1, 12))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds
        self.expected = {
            name: one for name, one in self.expected.items() if one[2] > self.clock.now
        }

    @invariant()
    def is_as_expected(self) -> None:
        assert len(self.holding) == len(self.expected)
        for name, (data, _, _) in self.expected.items():
            assert read(self.holding, name) == data
        for client in "abc":
            ids = [name for name, one in self.expected.items() if one[1] == client]
            assert [held.id for held in self.holding.of_client(client)] == ids

    def teardown(self) -> None:
        self.holding.close()


TestHolding = HoldingMachine.TestCase
TestHolding.settings = settings(max_examples=30, stateful_step_count=25)
