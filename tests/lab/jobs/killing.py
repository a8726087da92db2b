"""Jobs in a process of their own, which is killed, and what must be true of the store then."""

import contextlib
import multiprocessing
import os
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

from lab.jobs.checking import check_rows, lines_in
from lab.jobs.fakes import FakeEngine, job, prompts, write_lines

from midstream.lab.jobs import Counts, capture_dataset
from midstream.lab.jobs.records import Failed
from midstream.store import verify

LINES = 300
_CONTEXT = multiprocessing.get_context("fork")


class Slow(FakeEngine):
    """Takes its time, so that there is an instant to be killed at."""

    def step(self):
        time.sleep(0.001)
        return super().step()


class Telling:
    """Tells through a pipe which of the lines are acknowledged."""

    def __init__(self, told: Connection) -> None:
        self._told = told

    def moved(self, counts: Counts) -> None:
        self._told.send(counts.skipped + counts.stored)

    def failed(self, failed: Failed) -> None:
        raise AssertionError(failed)


def run(folder: Path, told: Connection) -> None:
    """One job, which goes on from where the last one was killed."""
    asked = job(folder, resume=True, flush_seconds=0.004, keep_prompts=True)
    seed = random.randrange(1 << 30)
    capture_dataset(asked, lambda job: Slow(job, seed=seed), Telling(told))


class Killed:
    """A data set captured by jobs that are killed: `texts` by line; so many are `acknowledged`."""

    def __init__(self, folder: Path) -> None:
        self.texts = {number: each["text"] for number, each in enumerate(prompts(LINES), 1)}
        self.acknowledged = 0
        self._folder = folder
        self._root = folder / "acts"
        write_lines(folder, prompts(LINES))

    def start_and_kill(self, after_s: float) -> bool:
        """Starts a job, and kills it some time after it began."""
        hear, tell = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=run, args=(self._folder, tell))
        process.start()
        tell.close()
        before = self.acknowledged
        hear.poll(30)
        time.sleep(after_s)
        os.kill(process.pid, signal.SIGKILL)
        # A store that another job has read before counts as acknowledged what it found there.
        with contextlib.suppress(EOFError):
            while True:
                self.acknowledged = max(before, hear.recv())
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        return process.exitcode == 0

    def check(self) -> None:
        """What must be true whenever the job ended."""
        found = verify(self._root)
        assert found.ok, str(found)
        there = lines_in(self._root)
        assert len(there) >= self.acknowledged
        check_rows(self._root, {line: self.texts[line] for line in there})
