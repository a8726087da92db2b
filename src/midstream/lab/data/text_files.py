"""Readers of text files: lines, JSON lines or an array, and tables of values with separators.

All read UTF-8, skip a byte order mark, and hold no more than one item of a file in memory.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from typing import IO, Any, NamedTuple

from midstream.errors import SpecError
from midstream.validation import BYTE_ORDER_MARK

JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
MOST_CHARS = 64 << 20  # of an element of an array, or a field of a table
_READ_BYTES = 1 << 20
_MARK = BYTE_ORDER_MARK.encode("utf-8")
# Longest first: the mark of UTF-32 begins with that of UTF-16.
_OTHER_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
# The start of an object or an array of JSON.
_JSON = re.compile(rb'\s*(\{\s*("|$)|\[\s*(["{\[]|$))')
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()
# Characters before the end of a part of a text in which an error may be that the part ends there.
_CUT_CHARS = 16


class Item(NamedTuple):
    """A line, an element of an array or a row of a table."""

    number: int  # from 1: the line of the file, or the index of the element
    text: bytes
    problem: str = ""  # why it has no text


class Row(NamedTuple):
    """A row of a table of text."""

    number: int  # line of the file on which it begins, from 1
    values: tuple[str, ...]  # as many as the header has
    problem: str = ""  # why it has no values


def lines(file: IO[bytes], name: str) -> Iterator[Item]:
    """Yield the lines, without their ends; only a line feed ends one.

    Raises:
        SpecError: the file begins with the mark of another encoding.
    """
    yield from _numbered(chain([_without_mark(file.readline(), name)], file), 1)


def text_lines(file: IO[bytes], name: str) -> Iterator[Item]:
    """Yield the lines that are not blank; see `lines`."""
    return (item for item in lines(file, name) if item.text and not item.text.isspace())


def plain_lines(file: IO[bytes], name: str) -> Iterator[Item]:
    """Yield the lines that are not blank of a file whose name says that it is text.

    Raises:
        SpecError: see `lines`; or the first one is JSON, and so no text.
    """
    for index, item in enumerate(text_lines(file, name)):
        if not index and _JSON.match(item.text):
            raise SpecError(
                "data",
                f"{name}:{item.number}: expected text, a prompt on each line, and this is JSON; "
                "give the file a name that ends in .jsonl or .json",
            )
        yield item


def json_values(file: IO[bytes], name: str) -> Iterator[Item]:
    """Yield the JSON texts of JSON lines, or of the elements of one array.

    A file whose first character is `[` is an array. Of an array that is malformed the last item
    has a problem, and nothing behind it is read.

    Raises:
        SpecError: see `lines`.
    """
    number, start = 1, file.readline(_READ_BYTES)
    text = _without_mark(start, name).lstrip()
    while start and not text:
        number += start.endswith(b"\n")
        start = file.readline(_READ_BYTES)
        text = start.lstrip()
    if text.startswith(b"["):
        yield from _elements(chain([text], iter(partial(file.read, _READ_BYTES), b"")))
    else:
        text += b"" if start.endswith(b"\n") else file.readline()
        items = _numbered(chain([text], file), number)
        yield from (item for item in items if item.text and not item.text.isspace())


def _numbered(parts: Iterable[bytes], first: int) -> Iterator[Item]:
    for number, line in enumerate(parts, first):
        # Of an empty file the only part is none.
        if line or number > 1:
            yield Item(number, line.removesuffix(b"\n").removesuffix(b"\r"))


def decoded(item: Item) -> str:
    """Return the text of an item; raise SpecError if it is not UTF-8 or has a problem."""
    if item.problem:
        raise SpecError("", item.problem)
    try:
        return item.text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError("", f"expected UTF-8: {error.reason}") from None


def table_rows(file: IO[bytes], name: str, delimiter: str) -> Iterator[Row]:
    """Yield the header and then the rows of a table whose values are separated, as RFC 4180 has it.

    Values in quotes may have line feeds. Blank lines are skipped.

    Raises:
        SpecError: see `lines`; or the header is malformed.
    """
    csv.field_size_limit(MOST_CHARS)
    # Bytes that are not UTF-8 fail their row alone.
    marked = io.BufferedReader(_Marked(file, name), _READ_BYTES)
    text = io.TextIOWrapper(marked, "utf-8", "surrogateescape", newline="")
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    header: tuple[str, ...] = ()
    while True:
        number = reader.line_num + 1
        try:
            values = next(reader, None)
        except csv.Error as error:
            if not header:
                raise SpecError(name, f"line {number}: the header: {error}") from None
            yield Row(number, (), f"expected values separated by {delimiter!r}: {error}")
            continue
        if values is None:
            return
        if not values:
            continue
        row = tuple(values)
        if any(not _is_text(value) for value in row):
            if not header:
                raise SpecError(name, f"line {number}: the header: expected UTF-8")
            yield Row(number, (), "expected UTF-8")
        elif header and len(row) != len(header):
            yield Row(number, (), f"expected {len(header)} values, as the header, got {len(row)}")
        else:
            header = header or row
            yield Row(number, row)


class _Marked(io.RawIOBase):
    """A file of bytes without the byte order mark that it may begin with."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file = file
        self._start = _without_mark(file.read(4), name)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        data = self._start[: len(buffer)] or self._file.read(len(buffer))
        self._start = self._start[len(data) :]
        buffer[: len(data)] = data
        return len(data)


def _without_mark(start: bytes, name: str) -> bytes:
    for mark, encoding in _OTHER_MARKS:
        if start.startswith(mark):
            raise SpecError("data", f"{name}: it is {encoding}; expected UTF-8, so convert it")
    return start.removeprefix(_MARK)


def _is_text(value: str) -> bool:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _elements(parts: Iterable[bytes]) -> Iterator[Item]:
    """Yield the elements of an array."""
    text = _Buffer(parts)
    number = 1
    try:
        text.take("[")
        while text.next() != "]":
            if number > 1:
                text.take(",")
            value = text.value()
            yield (
                Item(number, value.encode("utf-8"))
                if _is_text(value)
                else Item(number, b"", "expected UTF-8")
            )
            number += 1
        text.take("]")
        if text.next():
            raise ValueError("expected nothing behind it")
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        yield Item(number, b"", f"the JSON array: {reason}; nothing from here on is read")


class _Buffer:
    """The part of a long JSON text that is being read."""

    def __init__(self, parts: Iterable[bytes]) -> None:
        self._parts = iter(parts)
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._text, self._at = "", 0
        self._ended = False

    def next(self) -> str:
        """Return the next character that is no space, without taking it; "" at the end."""
        while True:
            space = _SPACE.match(self._text, self._at)
            assert space is not None
            self._at = space.end()
            if self._at < len(self._text) or not self._read():
                return self._text[self._at : self._at + 1]

    def take(self, character: str) -> None:
        if self.next() != character:
            got = repr(self.next()) if self.next() else "the end of the file"
            raise ValueError(f"expected {character!r}, got {got}")
        self._at += 1

    def value(self) -> str:
        """Take a value and return its text."""
        self.next()
        while True:
            try:
                _, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated") or (
                    error.pos >= len(self._text) - _CUT_CHARS
                )
                if len(self._text) - self._at > MOST_CHARS:
                    raise ValueError(
                        f"an element of more than {MOST_CHARS >> 20} Mi characters"
                    ) from None
                if not is_cut or not self._read():
                    raise ValueError(error.msg) from None
            else:
                # The digits of a number may go on.
                if end < len(self._text) or not self._read():
                    value, self._at = self._text[self._at : end], end
                    return value

    def _read(self) -> bool:
        """Read at least as much as there is; return False at the end."""
        if self._ended:
            return False
        parts = [self._text[self._at :]]
        wanted, size = max(len(parts[0]), 1 << 16), 0
        while size < wanted and not self._ended:
            part = next(self._parts, None)
            self._ended = part is None
            parts.append(self._decoder.decode(part or b"", final=self._ended))
            size += len(parts[-1])
        self._text, self._at = "".join(parts), 0
        return size > 0
