"""Prompts of a job: its lines, cut and packed as it says, and checked before an engine starts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from midstream.errors import SpecError
from midstream.lab.jobs.documents import Document, DocumentReader
from midstream.lab.jobs.job import FIRST, Job
from midstream.lab.jobs.packs import Packer
from midstream.lab.jobs.prompt_tokens import PromptTokens
from midstream.lab.jobs.records import Failed, Record
from midstream.lab.jobs.sources import Source, open_source

# Lines that are read before an engine starts, of a file of this many bytes all; for so long at
# most, a line that has begun to be read excepted.
CHECKED_LINES, SMALL_BYTES, CHECK_SECONDS = 1000, 16 << 20, 5.0


@dataclass(frozen=True, slots=True)
class DataCheck:
    """What the first lines of the data are; `is_whole`: all of them were read."""

    lines: int
    failed: int
    problem: str  # of the first that failed; empty: none did
    is_whole: bool

    def __str__(self) -> str:
        lines = f"{self.lines:,} lines" if self.is_whole else f"the first {self.lines:,} lines"
        return f"of {lines} {self.failed:,} will fail, the first one is {self.problem}"


def open_prompts(job: Job) -> tuple[Source, DataCheck | None]:
    """Open a job's data and check its first lines; standard input and pipes are not checked.

    Raises:
        SpecError: the data cannot be read, there are none, or all lines that were read are wrong.
    """
    lines = open_source(job)
    source = TokenisedLines(job, lines) if job.is_tokenised else lines
    if not source.can_be_read_again:
        return source, None
    rows = source.documents(lines) if isinstance(source, TokenisedLines) else iter(lines)
    return source, _check_first(job, rows)


class TokenisedLines:
    """A source whose lines are token ids, cut and packed."""

    def __init__(self, job: Job, lines: Source) -> None:
        """Load the tokenizer; see `PromptTokenizer`."""
        self._job, self._lines = job, lines
        self._reader = DocumentReader(job)
        if job.pack is not None:
            _ = self._reader.separator

    @property
    def can_be_read_again(self) -> bool:
        return self._lines.can_be_read_again

    def count(self) -> int | None:
        return self._lines.count() if self._job.pack is None else None

    def __iter__(self) -> Iterator[Record | Failed]:
        return self.prompts(self._lines)

    def documents(self, records: Iterable[Record | Failed]) -> Iterator[Document | Failed]:
        """Tokenise lines."""
        for record in records:
            try:
                yield record if isinstance(record, Failed) else self._reader.read(record)
            except SpecError as error:
                yield Failed(record.line, str(error))

    def prompts(self, records: Iterable[Record | Failed]) -> Iterator[Record | Failed]:
        """Make prompts of lines, which are numbered by their line, or if packed from 1."""
        documents = self.documents(records)
        return self._each(documents) if self._job.pack is None else self._packed(documents)

    def _each(self, documents: Iterable[Document | Failed]) -> Iterator[Record | Failed]:
        for document in documents:
            if isinstance(document, Failed):
                yield document
            else:
                yield self._record(document.line, document.prompt)

    def _packed(self, documents: Iterable[Document | Failed]) -> Iterator[Record | Failed]:
        job = self._job
        assert job.pack is not None
        packer = Packer(job.pack, self._reader.separator, job.exclude == FIRST)
        number = 0
        for document in documents:
            if isinstance(document, Failed):
                yield document
                continue
            for prompt in packer.add(document):
                number += 1
                if prompt.positions:
                    yield self._record(number, prompt)
        last = packer.rest()
        if last.positions:
            yield self._record(number + 1, last)

    def _record(self, number: int, prompt: PromptTokens) -> Record:
        return Record(number, replace(prompt, text=self._reader.text(prompt.token_ids)))


def _check_first(job: Job, rows: Iterator[Record | Document | Failed]) -> DataCheck:
    path = os.path.expanduser(job.data)
    is_small = os.path.isfile(path) and os.path.getsize(path) <= SMALL_BYTES
    give_up = time.monotonic() + CHECK_SECONDS
    lines, failed, is_whole = 0, list[Failed](), False
    first = islice(rows, None if is_small else CHECKED_LINES)
    while time.monotonic() < give_up or not lines:
        row = next(first, None)
        if row is None:
            is_whole = is_small or lines < CHECKED_LINES
            break
        lines += 1
        if isinstance(row, Failed):
            failed.append(row)
    if not lines:
        raise SpecError("data", f"{job.data}: it has no lines")
    problem = f"line {failed[0].line}: {failed[0].reason}" if failed else ""
    if len(failed) == lines:
        raise SpecError(
            "data",
            f"{job.data}: no prompt in the first {lines} lines; {problem}; --prompt-field "
            f"(`column`) names another field than {job.column!r}, --format another format",
        )
    return DataCheck(lines, len(failed), problem, is_whole)
