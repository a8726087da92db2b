"""A dataset capture on a cluster of this machine, with engines that compute nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from lab.jobs.checking import check_rows
from lab.jobs.fakes import job, prompts, texts, write_lines
from support.on_ray import Deadly, Slow, start_ray

from midstream.lab.jobs.ray import Placement, RayCaptureRun

# `lab/jobs/ray` has the coordinator and the workers without Ray's processes, and
# `nightly/test_ray.py` kills engines and jobs on SmolLM2.
pytestmark = pytest.mark.nightly
FEW = {"max_num_seqs": 4}  # so that chunks are on their way a few at a time


@pytest.fixture(scope="module", autouse=True)
def cluster(actors_find_the_tests: None) -> Iterator[None]:
    # Ray's processes have the environment that this one has now.
    start_ray()
    yield
    ray.shutdown()


def test_lines_that_end_each_engine_fail_by_name_and_the_others_are_captured(tmp_path):
    lines = prompts(60)
    lines[30] = {"text": "this one kills"}
    lines[50] = {"text": "it dies"}
    write_lines(tmp_path, lines)
    with RayCaptureRun(job(tmp_path, engine_args=FEW), Placement()) as spreading:
        summary = spreading.work(Deadly, None, None)
    assert (summary.counts.stored, summary.counts.failed) == (58, 2)
    listed = map(json.loads, Path(summary.errors).read_text().splitlines())
    reasons = {each["line"]: each["reason"] for each in listed}
    assert set(reasons) == {31, 51}
    assert all("engines ended while they had this line" in each for each in reasons.values())
    assert "RuntimeError: the engine is dead" in reasons[51]
    check_rows(
        tmp_path / "acts", {line: text for line, text in texts(60).items() if line not in reasons}
    )


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
