"""Jobs in a process of their own, which is killed, and what must be true of the store then."""

import contextlib
import multiprocessing
import os
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

from lab.jobs import packing
from lab.jobs.checking import check_rows, lines_in
from lab.jobs.fakes import LAYERS, FakeEngine, job, prompts, write_lines

from midstream.lab.jobs import Counts, Job, capture_dataset
from midstream.lab.jobs.documents import PromptTokenizer
from midstream.lab.jobs.records import Failed
from midstream.plan import Capture
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


class Killed:
    """A data set captured by jobs that are killed: lines, each a prompt, one by one."""

    total = LINES

    def __init__(self, folder: Path) -> None:
        self.acknowledged = 0
        self.folder, self.root = folder, folder / "acts"
        self.write()

    def write(self) -> None:
        """Writes the data."""
        self._texts = {number: each["text"] for number, each in enumerate(prompts(LINES), 1)}
        write_lines(self.folder, prompts(LINES))

    def job(self) -> Job:
        """One job, which goes on from where the last one was killed."""
        return job(self.folder, resume=True, flush_seconds=0.004, keep_prompts=True)

    def run(self, told: Connection) -> None:
        """Works on it, in a process of its own."""
        seed = random.randrange(1 << 30)
        capture_dataset(self.job(), lambda job: Slow(job, seed=seed), Telling(told))

    def start_and_kill(self, after_s: float) -> bool:
        """Starts a job, and kills it some time after it began; says whether it had ended."""
        hear, tell = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=self.run, args=(tell,))
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
        found = verify(self.root)
        assert found.ok, str(found)
        there = lines_in(self.root)
        assert len(there) >= self.acknowledged
        self.check_rows(set(there))

    def check_rows(self, there: set[int]) -> None:
        """Whether the rows of these prompts are right."""
        check_rows(self.root, {line: self._texts[line] for line in there})


class KilledPacks(Killed):
    """Conversations that are packed, without the first token of each, with masks."""

    length = 50

    def __init__(self, folder: Path, model: str) -> None:
        self._model = model
        # What a job imports for that takes seconds, and the jobs' processes are forked.
        PromptTokenizer(job(folder, model=model))
        super().__init__(folder)

    def write(self) -> None:
        chance = random.Random(4)
        talks = [
            [{"role": role, "content": "".join(chance.choices("abcxyz.?", k=chance.randint(1, 40)))}
             for role in ("user", "assistant") * chance.randint(1, 2)]
            for _ in range(90)
        ]  # fmt: skip
        write_lines(self.folder, [{"messages": talk} for talk in talks])
        documents = [packing.chat_tokens(line, talk) for line, talk in enumerate(talks, 1)]
        self._packs = packing.stream(documents, packing.END, self.length)
        self.total = len(self._packs)

    def job(self) -> Job:
        return job(
            self.folder, model=self._model, capture=Capture(LAYERS, positions="prompt"), chat=True,
            roles=True, pack=self.length, exclude="first", resume=True, flush_seconds=0.004,
        )  # fmt: skip

    def check_rows(self, there: set[int]) -> None:
        is_whole = len(there) == len(self._packs)
        rows = packing.check_packed(self.root, self._packs, is_whole, without_first=True)
        if is_whole:
            tokens = [token for pack in self._packs for token in pack[1:] if token.offset]
            assert rows == len(tokens)
