"""Sources of prompts, read lazily: files, Hugging Face datasets and standard input."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import filterfalse, islice
from typing import IO, Any, Protocol

from midstream.errors import SpecError, UnsupportedError
from midstream.lab.jobs.job import SPLIT, Job
from midstream.lab.jobs.records import Failed, Record, read_text, read_value
from midstream.validation import BYTE_ORDER_MARK, hint, show

STDIN = "-"
_ROWS_AT_ONCE = 1024
_CHECKED = 100  # lines of a file before the engine starts
# Name of a Hugging Face dataset.
_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_OTHERS = (".csv", ".tsv", ".arrow", ".gz", ".zst", ".xz", ".bz2", ".zip")
_FILES = (".jsonl", ".json", ".ndjson", ".txt", ".parquet", *_OTHERS)


class Source(Protocol):
    """A source of lines."""

    @property
    def can_be_read_again(self) -> bool:
        """Whether a second iteration gives the same lines."""
        ...

    def count(self) -> int | None:
        """Return the number of lines; None if it is not known in advance."""
        ...

    def __iter__(self) -> Iterator[Record | Failed]:
        """Iterate over the lines in order, without empty ones."""
        ...


def open_source(job: Job) -> Source:
    """Open the source of a job's data and check that it is readable."""
    name = job.data
    if name == STDIN:
        _check_whole(job)
        return Limited(Lines(job, None), job.limit)
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        return Limited(HubRows(job, path), job.limit)
    if os.path.exists(path):
        if path.lower().endswith(_OTHERS):
            raise SpecError(
                "data",
                f"{show(name)}: expected JSON lines or a Parquet file; of a table, pandas writes "
                'both: read_csv(file).to_json("data.jsonl", orient="records", lines=True)',
            )
        _check_whole(job)
        is_table = path.lower().endswith(".parquet")
        return Limited(ParquetRows(job, path) if is_table else Lines(job, path), job.limit)
    if name.lower().endswith(_FILES) or not _NAME.fullmatch(name):
        raise SpecError("data", f"there is no file {show(name)}")
    return Limited(HubRows(job, name), job.limit)


def _check_whole(job: Job) -> None:
    """Check that no part of a file is asked for that only a Hugging Face dataset has."""
    for name, value, default in (("subset", job.subset, ""), ("split", job.split, SPLIT)):
        if value != default:
            raise SpecError(
                name, f"{show(job.data)} is a file, and only Hugging Face datasets have it; omit it"
            )


@dataclass(frozen=True, slots=True)
class Limited:
    """The first `limit` lines of a source; None: all lines."""

    source: Source
    limit: int | None

    @property
    def can_be_read_again(self) -> bool:
        return self.source.can_be_read_again

    def count(self) -> int | None:
        total = self.source.count()
        return total if total is None or self.limit is None else min(total, self.limit)

    def __iter__(self) -> Iterator[Record | Failed]:
        return islice(iter(self.source), self.limit)


class Lines:
    """JSON lines of a file or of standard input."""

    def __init__(self, job: Job, path: str | None) -> None:
        """Check that the file can be read; None: standard input."""
        self._form = job.column, job.chat, job.media_files
        self._path = path
        self._limit = job.limit
        if path is not None:
            _open(path).close()
        if self.can_be_read_again:
            self._check_first()

    def _check_first(self) -> None:
        """Check that one of the first lines is a prompt, before an engine starts. Lines after the
        first prompt are not read, as they may name large files.
        """
        failed: list[Failed] = []
        for line in islice(self, min(_CHECKED, self._limit or _CHECKED)):
            if not isinstance(line, Failed):
                return
            failed.append(line)
        if not failed and self._limit != 0:
            raise SpecError("data", f"{self._path}: it has no lines")
        if failed:
            raise SpecError(
                "data",
                f"{self._path}: no prompt in the first {len(failed)} lines; line {failed[0].line}: "
                f'{failed[0].reason}; expected JSON lines, each as {{"{self._form[0]}": …}}; '
                "--prompt-field (`column`) names another field",
            )

    @property
    def can_be_read_again(self) -> bool:
        # A named pipe cannot be read twice.
        return self._path is not None and os.path.isfile(self._path)

    def count(self) -> int | None:
        if not self.can_be_read_again:
            return None
        assert self._path is not None
        with _open(self._path) as file:
            # A file may be long, so no more than `limit` lines are read.
            lines = filterfalse(bytes.isspace, _without_mark(file))
            return sum(1 for _ in islice(lines, self._limit))

    def __iter__(self) -> Iterator[Record | Failed]:
        path = self._path
        with nullcontext(sys.stdin.buffer) if path is None else _open(path) as file:
            for number, line in enumerate(_without_mark(file), 1):
                if not line.isspace():
                    yield read_text(number, line.rstrip(b"\r\n"), *self._form)


class ParquetRows:
    """Rows of a Parquet file, of which only the prompt column is read."""

    can_be_read_again = True

    def __init__(self, job: Job, path: str) -> None:
        self._form = job.column, job.chat, job.media_files
        self._path = path
        file = self._open()
        with file:
            self._rows = int(file.metadata.num_rows)
            _check_column(job, file.schema_arrow.names)

    def count(self) -> int | None:
        return self._rows

    def __iter__(self) -> Iterator[Record | Failed]:
        with self._open() as file:
            number = 0
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=[self._form[0]]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    yield read_value(number, value, *self._form)

    def _open(self) -> Any:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            raise UnsupportedError(
                'data: Parquet files need pyarrow: pip install "midstream[arrow]"'
            ) from None
        try:
            return parquet.ParquetFile(self._path)
        except (OSError, pyarrow.ArrowException) as error:
            raise SpecError("data", f"{self._path}: {error}") from None


class HubRows:
    """Rows of a Hugging Face dataset, streamed."""

    can_be_read_again = True

    def __init__(self, job: Job, name: str) -> None:
        """Open the dataset, by its name or folder, and check its columns."""
        self._form = job.column, job.chat, job.media_files
        try:
            from datasets import load_dataset
            from datasets.exceptions import DatasetsError
        except ImportError:
            raise UnsupportedError(
                f"data: {show(name)} is not a file, and Hugging Face datasets need `datasets`: "
                "pip install datasets"
            ) from None
        try:
            self._rows = load_dataset(name, job.subset or None, split=job.split, streaming=True)
        except (DatasetsError, ValueError, OSError) as error:
            raise SpecError("data", f"dataset {show(name)}: {error}") from None
        if self._rows.column_names is not None:
            _check_column(job, self._rows.column_names)
        self._split = job.split

    def count(self) -> int | None:
        split_info = (self._rows.info.splits or {}).get(self._split)
        return split_info.num_examples or None if split_info is not None else None

    def __iter__(self) -> Iterator[Record | Failed]:
        for number, row in enumerate(self._rows, 1):
            yield read_value(number, row.get(self._form[0]), *self._form)


def _without_mark(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield lines, the first one without the byte order mark that it may begin with."""
    mark = BYTE_ORDER_MARK.encode("utf-8")
    for line in lines:
        yield line.removeprefix(mark)
        mark = b""


def _open(path: str) -> IO[bytes]:
    try:
        return open(path, "rb")
    except OSError as error:
        raise SpecError("data", f"{path}: {error.strerror}") from None


def _check_column(job: Job, names: list[str]) -> None:
    if job.column not in names:
        raise SpecError(
            "prompt_field",
            f"{job.data} has no column {show(job.column)}{hint(job.column, names)}; it has "
            f"{', '.join(names[:20])}",
        )
