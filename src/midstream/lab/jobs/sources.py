"""Sources of prompts, read lazily: files, Hugging Face datasets and standard input."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import IO, Any, Protocol

from midstream.errors import SpecError, UnsupportedError
from midstream.lab.data.text_files import (
    JSON_SUFFIXES,
    Item,
    decoded,
    json_values,
    plain_lines,
    table_rows,
    text_lines,
)
from midstream.lab.jobs.job import SPLIT, Job
from midstream.lab.jobs.records import Failed, Record, read_prompt, read_text, read_value
from midstream.validation import BYTE_ORDER_MARK, hint, listed, show

STDIN = "-"
_ROWS_AT_ONCE = 1024
# Name of a Hugging Face dataset.
_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_OTHERS = (".arrow", ".gz", ".zst", ".xz", ".bz2", ".zip")
_FORMATS = {".txt": "text", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
_FILES = (*JSON_SUFFIXES, *_FORMATS, *_OTHERS)
_DELIMITERS = {"csv": ",", "tsv": "\t"}
# Files in a folder that `save_to_disk` of `datasets` has written.
_SAVED = ("state.json", "dataset_dict.json")


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
        if job.format == "parquet":
            raise SpecError("format", "a Parquet file cannot be read from standard input")
        return Limited(TextFile(job, None, job.format or "jsonl"), job.limit)
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        _check_no_format(job)
        return Limited(HubRows(job, path), job.limit)
    if os.path.exists(path):
        _check_whole(job)
        form = job.format or _format_of(path)
        rows = ParquetRows(job, path) if form == "parquet" else TextFile(job, path, form)
        return Limited(rows, job.limit)
    if name.lower().endswith(_FILES) or not _NAME.fullmatch(name):
        raise SpecError("data", f"there is no file {show(name)}")
    _check_no_format(job)
    return Limited(HubRows(job, name), job.limit)


def _format_of(path: str) -> str:
    """Return the format of a file by its name; JSON lines unless the name says another."""
    suffix = os.path.splitext(path)[1].lower()
    if suffix in _OTHERS:
        raise SpecError(
            "data",
            f"{show(path)}: expected JSON lines, a JSON array, text, CSV, TSV or Parquet; "
            "decompress or convert it",
        )
    return _FORMATS.get(suffix, "jsonl")


def _check_no_format(job: Job) -> None:
    if job.format:
        raise SpecError("format", f"{show(job.data)} is no file, and only files have it; omit it")


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


class TextFile:
    """Lines, elements or rows of a file of text, or of standard input."""

    def __init__(self, job: Job, path: str | None, format: str) -> None:
        """Check that the file can be opened; None: standard input."""
        self._job = job
        self._path, self._format = path, format
        self._name = "standard input" if path is None else path
        if path is not None:
            _open(path).close()

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
            return sum(1 for _ in islice(self._numbers(file), self._job.limit))

    def __iter__(self) -> Iterator[Record | Failed]:
        path = self._path
        with nullcontext(sys.stdin.buffer) if path is None else _open(path) as file:
            if self._format in _DELIMITERS:
                yield from self._rows(file)
            else:
                read = self._text if self._format == "text" else self._json
                yield from map(read, self._items(file))

    def _items(self, file: IO[bytes]) -> Iterator[Item]:
        read = plain_lines if self._format == "text" else json_values
        if self._job.format == "text":
            read = text_lines
        return read(file, self._name)

    def _numbers(self, file: IO[bytes]) -> Iterator[int]:
        if self._format in _DELIMITERS:
            rows = table_rows(file, self._name, _DELIMITERS[self._format])
            return (row.number for row in islice(rows, 1, None))
        return (item.number for item in self._items(file))

    def _json(self, item: Item) -> Record | Failed:
        if item.problem:
            return Failed(item.number, item.problem)
        return read_text(item.number, item.text, *_form(self._job))

    def _text(self, item: Item) -> Record | Failed:
        try:
            prompt = read_prompt(decoded(item), self._job.chat, self._job.media_files)
        except SpecError as error:
            return Failed(item.number, str(error))
        return Record(item.number, prompt)

    def _rows(self, file: IO[bytes]) -> Iterator[Record | Failed]:
        rows = table_rows(file, self._name, _DELIMITERS[self._format])
        header = next(rows, None)
        if header is None:
            return
        _check_column(self._job, list(header.values))
        column = header.values.index(self._job.column)
        for row in rows:
            if row.problem:
                yield Failed(row.number, row.problem)
            else:
                yield read_value(row.number, row.values[column], *_form(self._job))


class ParquetRows:
    """Rows of a Parquet file, of which only the prompt column is read."""

    can_be_read_again = True

    def __init__(self, job: Job, path: str) -> None:
        self._form = _form(job)
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
        self._job, self._name = job, name
        self._is_folder = os.path.isdir(name)
        try:
            import datasets
        except ImportError:
            raise UnsupportedError(
                f"data: {show(name)} is not a file, and Hugging Face datasets need `datasets`: "
                'pip install "midstream[datasets]"'
            ) from None
        with self._named_errors():
            if any(os.path.isfile(os.path.join(name, mark)) for mark in _SAVED):
                self._rows: Any = _split_of(datasets.load_from_disk(name), job)
            else:
                subset = job.subset or None
                self._rows = datasets.load_dataset(name, subset, split=job.split, streaming=True)
            names = self._rows.column_names
            if names is None:
                # Of files whose columns are known when one is read.
                names = next(iter(self._rows), None)
        if names is not None:
            _check_column(job, list(names))

    def count(self) -> int | None:
        if hasattr(self._rows, "__len__"):
            return len(self._rows)
        split_info = (self._rows.info.splits or {}).get(self._job.split)
        return split_info.num_examples or None if split_info is not None else None

    def __iter__(self) -> Iterator[Record | Failed]:
        rows = enumerate(self._rows, 1)
        while True:
            with self._named_errors():
                number, row = next(rows, (0, None))
            if row is None:
                return
            value = row.get(self._job.column)
            if self._is_folder and isinstance(value, str):
                # Its reader of text files leaves the mark in the first line of each.
                value = value.removeprefix(BYTE_ORDER_MARK)
            yield read_value(number, value, *_form(self._job))

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        from datasets.exceptions import DatasetsError

        try:
            yield
        except SpecError:
            raise
        except (DatasetsError, ValueError, OSError) as error:
            raise SpecError("data", f"dataset {show(self._name)}: {error}") from None


def _split_of(dataset: Any, job: Job) -> Any:
    """Return the split of a dataset that `save_to_disk` wrote, which may have one alone."""
    if job.subset:
        raise SpecError("subset", f"{show(job.data)} has none; omit it")
    if not isinstance(dataset, dict):
        if job.split not in (SPLIT, str(dataset.split)):
            raise SpecError("split", f"{show(job.data)} is the split {dataset.split}; omit it")
        return dataset
    if job.split not in dataset:
        raise SpecError("split", f"expected {listed(dataset)}, got {show(job.split)}")
    return dataset[job.split]


def _form(job: Job) -> tuple[str, bool, str]:
    return job.column, job.chat, job.media_files


def _open(path: str) -> IO[bytes]:
    try:
        return open(path, "rb")
    except OSError as error:
        raise SpecError("data", f"{path}: {error.strerror}") from None


def _check_column(job: Job, names: list[str]) -> None:
    count = names.count(job.column)
    if count > 1:
        raise SpecError("prompt_field", f"{job.data} has {count} columns {show(job.column)}")
    if not count:
        raise SpecError(
            "prompt_field",
            f"{job.data} has no column {show(job.column)}{hint(job.column, names)}; it has "
            f"{', '.join(names[:20])}",
        )
