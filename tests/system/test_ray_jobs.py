"""A dataset capture on a cluster of this machine, with engines that compute nothing: whoever is
killed, each line is stored once, or has failed with a reason.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from lab.jobs.checking import check_rows, lines_in
from lab.jobs.fakes import FakeEngine, job, prompts, texts, write_lines
from support.on_ray import Deadly, Hopeless, Refused, Slow, pids, start_ray

from midstream import EngineError, SpecError, StoreError
from midstream.lab.jobs import capture_dataset
from midstream.lab.jobs.ray import Placement, RayCaptureRun

# By day `lab/jobs/ray` has the coordinator and the workers, without Ray's processes.
pytestmark = pytest.mark.nightly
FEW = {"max_num_seqs": 4}  # so that chunks are on their way a few at a time


@pytest.fixture(scope="module", autouse=True)
def cluster(actors_find_the_tests: None) -> Iterator[None]:
    # Ray's processes have the environment that this one has now.
    start_ray()
    yield
    ray.shutdown()


class Killing:
    """Kills the process of one engine when so many lines are done."""

    def __init__(self, folder: Path, lines: int) -> None:
        self._folder, self._lines = folder, lines
        self.killed = 0

    def moved(self, counts) -> None:
        if counts.captured >= self._lines and not self.killed:
            self.killed = pids(self._folder)[0]
            os.kill(self.killed, signal.SIGKILL)

    def failed(self, failed) -> None:
        raise AssertionError(failed)


def spread(asked, start=FakeEngine, watch=None, stop=None, **fields):
    with RayCaptureRun(asked, Placement(**fields)) as spreading:
        return spreading.work(start, watch, stop)


def test_the_store_is_that_of_one_engine_alone(tmp_path):
    lines = [
        *prompts(150),
        b"no json",
        {"text": "much too long"},
        {"text": "it breaks"},
        "a string",
    ]
    for folder in ("one", "many"):
        (tmp_path / folder).mkdir()
        write_lines(tmp_path / folder, lines)
    asked = {"tag": "pile", "engine_args": FEW, "keep_prompts": True}
    one = capture_dataset(job(tmp_path / "one", **asked), FakeEngine)
    many = spread(job(tmp_path / "many", **asked))
    assert lines_in(tmp_path / "one/acts") == lines_in(tmp_path / "many/acts")
    check_rows(tmp_path / "many/acts", texts(150) | {154: "a string"})
    for field in ("total", "captured", "stored", "failed", "rows", "nbytes"):
        assert getattr(many.counts, field) == getattr(one.counts, field), field
    assert (many.status, many.interrupted) == (1, False)
    failed = [
        sorted(map(str, map(json.loads, Path(each.errors).read_text().splitlines())))
        for each in (one, many)
    ]
    assert failed[0] == failed[1]


def test_what_a_killed_engine_had_is_done_by_another_and_nothing_twice(tmp_path):
    write_lines(tmp_path, prompts(400))
    watch = Killing(tmp_path, 60)
    asked = job(tmp_path, engine_args=FEW, flush_seconds=0.05)
    summary = spread(asked, Slow, watch)
    assert watch.killed
    # A third engine starts in place of the killed one, unless the other is done before.
    assert len(set(pids(tmp_path))) >= 2
    assert (summary.status, summary.counts.captured, summary.counts.stored) == (0, 400, 400)
    assert summary.counts.rows == 800
    check_rows(tmp_path / "acts", texts(400))


def test_lines_that_end_each_engine_fail_by_name_and_the_others_are_captured(tmp_path):
    lines = prompts(60)
    lines[30] = {"text": "this one kills"}
    lines[50] = {"text": "it dies"}
    write_lines(tmp_path, lines)
    summary = spread(job(tmp_path, engine_args=FEW), Deadly)
    assert (summary.counts.stored, summary.counts.failed) == (58, 2)
    listed = map(json.loads, Path(summary.errors).read_text().splitlines())
    reasons = {each["line"]: each["reason"] for each in listed}
    assert set(reasons) == {31, 51}
    assert all("engines ended while they had this line" in each for each in reasons.values())
    assert "RuntimeError: the engine is dead" in reasons[51]
    check_rows(
        tmp_path / "acts", {line: text for line, text in texts(60).items() if line not in reasons}
    )


def test_engines_that_end_whatever_they_run_end_the_job(tmp_path):
    write_lines(tmp_path, prompts(8))
    with pytest.raises(EngineError, match="engines were started .* without capturing a line"):
        spread(job(tmp_path, engine_args=FEW), Hopeless, engines=1)


def test_what_engines_cannot_start_with_is_refused_by_name_before_it_begins(tmp_path):
    write_lines(tmp_path, prompts(8))
    with RayCaptureRun(job(tmp_path)) as spreading:
        with pytest.raises(SpecError, match="model: there is no folder 'some/model'"):
            spreading.work(Refused)
        assert not spreading.has_begun


def test_a_job_that_is_stopped_has_what_came_and_is_resumed_by_one_engine_alone(tmp_path):
    write_lines(tmp_path, prompts(500))
    stop = threading.Event()

    class Stopping:
        def moved(self, counts):
            if counts.captured > 40:
                stop.set()

        def failed(self, failed):
            raise AssertionError(failed)

    first = spread(job(tmp_path, engine_args=FEW), Slow, Stopping(), stop)
    there = lines_in(tmp_path / "acts")
    assert first.interrupted
    assert first.status == 1
    assert 40 < first.counts.stored == first.counts.captured == len(there) < 500
    with pytest.raises(StoreError, match="it is not empty"):
        RayCaptureRun(job(tmp_path))
    again = capture_dataset(job(tmp_path, resume=True, engine_args=FEW), FakeEngine)
    assert (again.status, again.counts.skipped) == (0, len(there))
    check_rows(tmp_path / "acts", texts(500))


def test_lines_are_read_as_engines_take_them(tmp_path):
    write_lines(tmp_path, prompts(3000))
    stop = threading.Event()
    read = []

    class Stopping:
        def moved(self, counts):
            if counts.captured > 300:
                stop.set()

        def failed(self, failed):
            raise AssertionError(failed)

    with RayCaptureRun(job(tmp_path, engine_args=FEW)) as spreading:
        source = iter(spreading._source)

        class Counting:
            can_be_read_again = False

            def __iter__(self):
                for record in source:
                    read.append(record.line)
                    yield record

        spreading._source = Counting()
        summary = spreading.work(Slow, Stopping(), stop)
    # Two engines, two chunks of at most 64 lines each.
    assert len(read) <= summary.counts.captured + 4 * 64


def test_more_engines_than_there_is_room_for_are_refused(tmp_path):
    write_lines(tmp_path, prompts(2))
    with (
        RayCaptureRun(job(tmp_path), Placement(engines=5)) as spreading,
        pytest.raises(SpecError, match=r"ray\.engines: expected at most 2, .* got 5"),
    ):
        spreading.work(FakeEngine)
