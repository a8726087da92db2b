"""An engine at work on chunks: what is in the store when an outcome says so, and what is not."""

import threading

import pytest
from lab.jobs.checking import check_rows, lines_in
from lab.jobs.fakes import WIDE_ORIGIN, FakeEngine, job, prompts

from midstream.errors import StoreError
from midstream.lab.jobs.ray.chunks import ChunkAttempt
from midstream.lab.jobs.ray.worker import Worker
from midstream.lab.jobs.records import Record
from midstream.lab.jobs.request_ids import Identity

SINCE = "20200101T000000"


class Waiting(FakeEngine):
    """Ends nothing until it is let."""

    go = threading.Event()

    def step(self):
        if not self.go.wait(0.001):
            return []
        return super().step()


def lines_of(asked, texts, first=1):
    identity = Identity(asked)
    records = [Record(line, text) for line, text in enumerate(texts, first)]
    return tuple((identity.id(record), record) for record in records)


def texts(count):
    return [each["text"] for each in prompts(count)]


class Told:
    """What a worker says of itself."""

    def __init__(self):
        self.alone = []
        self.broken = []

    def worker(self, asked, start=FakeEngine):
        found = Worker(asked, start, lambda *what: self.alone.append(what), self.broken.append)
        found.wait()
        return found


def sorted_lines(outcome):
    return sorted(each.line for each in outcome.captured)


def test_chunks_that_come_together_end_each_with_all_their_lines_in_the_store(tmp_path):
    asked = job(tmp_path)
    worker = Told().worker(asked)
    every = lines_of(asked, texts(90))
    told = [worker.submit(n, ChunkAttempt(every[10 * n : 10 * n + 10])) for n in range(9)]
    for number, each in enumerate(told):
        outcome = each.result(timeout=30)
        assert sorted_lines(outcome) == list(range(10 * number + 1, 10 * number + 11))
        assert (outcome.chunk, outcome.failed, outcome.error) == (number, (), None)
        assert all((one.rows, one.nbytes) == (2, 64) for one in outcome.captured)
        assert set(lines_in(tmp_path / "acts")) >= set(sorted_lines(outcome))
    check_rows(tmp_path / "acts", dict(enumerate(texts(90), 1)))


class Wide(FakeEngine):
    origin = WIDE_ORIGIN


def test_rows_of_two_widths_count_as_many_bytes_now_as_when_an_earlier_try_stored_them(tmp_path):
    asked = job(tmp_path)
    every = lines_of(asked, texts(4))
    for attempt in (ChunkAttempt(every[:2]), ChunkAttempt(every, 2, SINCE)):
        outcome = Told().worker(asked, Wide).submit(0, attempt).result(timeout=20)
        counted = {(one.rows, one.nbytes) for one in outcome.captured}
        assert counted == {(2, 4 * 8 + 4 * 12)}
    assert sorted_lines(outcome) == [1, 2, 3, 4]


def test_nobody_waits_for_a_shard_when_the_engine_has_nothing_else_to_do(tmp_path):
    """The job's own patience is a minute."""
    asked = job(tmp_path, flush_seconds=3600.0)
    worker = Told().worker(asked)
    outcome = worker.submit(0, ChunkAttempt(lines_of(asked, texts(3)))).result(timeout=20)
    assert sorted_lines(outcome) == [1, 2, 3]


def test_lines_that_fail_are_in_their_chunks_outcome(tmp_path):
    asked = job(tmp_path)
    worker = Told().worker(asked)
    turn = ChunkAttempt(lines_of(asked, ["fine", "too long", "it breaks"]))
    outcome = worker.submit(0, turn).result(timeout=20)
    assert sorted_lines(outcome) == [1]
    assert {each.line: each.reason for each in outcome.failed} == {
        2: "the prompt is too long",
        3: "edits were not applied",
    }


def test_what_an_earlier_try_has_stored_is_found_and_not_captured_again(tmp_path):
    asked = job(tmp_path)
    every = lines_of(asked, texts(10))
    Told().worker(asked).submit(0, ChunkAttempt(every[:6])).result(timeout=20)
    engine = FakeEngine(asked)
    again = (
        Told()
        .worker(asked, lambda _: engine)
        .submit(0, ChunkAttempt(every, 2, SINCE))
        .result(timeout=20)
    )
    assert sorted_lines(again) == list(range(1, 11))
    assert sorted((each.rows, each.nbytes) for each in again.captured) == [(2, 64)] * 10
    assert sorted(engine.added) == [7, 8, 9, 10]
    check_rows(tmp_path / "acts", dict(enumerate(texts(10), 1)))


@pytest.mark.parametrize("attempt", [3, 4])
def test_from_the_third_try_on_each_line_is_alone_in_the_engine_and_announced(tmp_path, attempt):
    asked = job(tmp_path)
    told, engine = Told(), FakeEngine(asked)
    worker = told.worker(asked, lambda _: engine)
    turn = ChunkAttempt(lines_of(asked, texts(5)), attempt, SINCE, {2: "it is a bad one"})
    outcome = worker.submit(7, turn).result(timeout=20)
    assert sorted_lines(outcome) == [1, 3, 4, 5]
    assert [(each.line, each.reason) for each in outcome.failed] == [(2, "it is a bad one")]
    assert engine.most == 1
    assert [one for one in told.alone if one[1] is not None] == [(7, 1), (7, 3), (7, 4), (7, 5)]


def test_a_chunk_that_comes_twice_is_run_once(tmp_path):
    asked = job(tmp_path)
    Waiting.go.clear()
    worker = Told().worker(asked, Waiting)
    turn = ChunkAttempt(lines_of(asked, texts(3)))
    first, second = worker.submit(0, turn), worker.submit(0, turn)
    Waiting.go.set()
    assert first.result(timeout=20) == second.result(timeout=20)
    check_rows(tmp_path / "acts", dict(enumerate(texts(3), 1)))


def test_an_engine_that_breaks_is_told_of_after_what_came_is_in_the_store(tmp_path):
    asked = job(tmp_path, flush_seconds=3600.0)
    told = Told()
    worker = told.worker(asked)
    outcome = worker.submit(0, ChunkAttempt(lines_of(asked, [*texts(4), "it dies"]))).result(
        timeout=20
    )
    assert [str(error) for error in told.broken] == ["the engine is dead"]
    assert set(lines_in(tmp_path / "acts")) == set(sorted_lines(outcome))
    assert "RuntimeError: the engine is dead" in str(outcome.error)
    after = worker.submit(1, ChunkAttempt(lines_of(asked, texts(1), 9))).result(timeout=20)
    assert after.captured == ()
    assert after.error is outcome.error


def test_a_store_that_cannot_be_written_ends_the_job_and_not_the_engine(tmp_path, monkeypatch):
    from midstream.store.backends.local import LocalFolder

    def full(self, name, pieces):
        raise StoreError(f"{self.root}: the disk is full")

    asked = job(tmp_path)
    told = Told()
    worker = told.worker(asked)
    monkeypatch.setattr(LocalFolder, "put", full)
    outcome = worker.submit(0, ChunkAttempt(lines_of(asked, texts(4)))).result(timeout=20)
    assert outcome.captured == ()
    assert isinstance(outcome.error, StoreError)
    assert "the disk is full" in str(outcome.error)
    assert told.broken == []


def test_a_worker_that_is_halted_gives_back_what_is_in_the_store(tmp_path):
    asked = job(tmp_path, flush_seconds=3600.0)
    Waiting.go.clear()
    worker = Told().worker(asked, Waiting)
    told = worker.submit(0, ChunkAttempt(lines_of(asked, texts(30))))
    worker.halt()
    outcome = told.result(timeout=20)
    assert (outcome.captured, outcome.failed, outcome.error) == ((), (), None)
    assert (
        worker.submit(1, ChunkAttempt(lines_of(asked, texts(1)))).result(timeout=20).captured == ()
    )


def test_an_engine_that_does_not_start_says_why(tmp_path):
    def start(asked):
        raise RuntimeError("no such model")

    with pytest.raises(RuntimeError, match="no such model"):
        Told().worker(job(tmp_path), start)
