"""Pairs of texts and questions of files, read strictly: errors name the file and the line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from midstream.errors import SpecError
from midstream.validation import BYTE_ORDER_MARK, check_regular, kind, read_fields, read_json

LEAST_PAIRS = 2
MOST_BYTES = 64 << 20


class Pair(NamedTuple):
    """Two texts that differ in what the direction is to find, which points to `positive`."""

    positive: str
    negative: str


def read_pairs(path: Path) -> list[Pair]:
    """Read a JSONL file: `{"positive": "…", "negative": "…"}` on each line that is not empty."""
    pairs = []
    for place, line in _lines(path):
        try:
            fields = read_fields(read_json(line), ("positive", "negative"))
        except SpecError as error:
            problem = f"{error.path}: {error.problem}" if error.path else error.problem
            raise SpecError(place, problem) from None
        for name, text in fields.items():
            if not isinstance(text, str):
                raise SpecError(place, f"`{name}`: expected `str`, got {kind(text)}")
        pairs.append(_checked(place, Pair(fields["positive"], fields["negative"])))
    return _enough(path, pairs)


def read_two_files(positive: Path, negative: Path) -> list[Pair]:
    """Read two files with one text a line; line n of one and of the other are a pair."""
    files = [_all_lines(path) for path in (positive, negative)]
    if len(files[0]) != len(files[1]):
        raise SpecError(
            str(negative),
            f"expected {len(files[0])} lines, as {positive} has, got {len(files[1])}: "
            "line n of both files is a pair",
        )
    pairs = [
        _checked(f"{positive}:{number} and {negative}:{number}", Pair(*texts))
        for number, texts in enumerate(zip(*files, strict=True), 1)
    ]
    return _enough(positive, pairs)


def read_questions(path: Path) -> list[str]:
    """Read a file with one question a line; empty lines are skipped."""
    questions = [line.strip() for _, line in _lines(path)]
    if not questions:
        raise SpecError(str(path), "expected one question a line, got none")
    return questions


def _checked(place: str, pair: Pair) -> Pair:
    for name, text in pair._asdict().items():
        if not text.strip():
            raise SpecError(place, f"`{name}` is empty")
    if pair.positive == pair.negative:
        raise SpecError(
            place, "`positive` and `negative` are equal, so the pair shows no direction"
        )
    return pair


def _enough(path: Path, pairs: list[Pair]) -> list[Pair]:
    if len(pairs) < LEAST_PAIRS:
        raise SpecError(str(path), f"expected {LEAST_PAIRS} or more pairs, got {len(pairs)}")
    return pairs


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each line that is not empty."""
    for number, line in enumerate(_all_lines(path), 1):
        if line.strip():
            yield f"{path}:{number}", line


def _all_lines(path: Path) -> Sequence[str]:
    """Return the lines of a file of UTF-8; only a line feed ends one."""
    try:
        size = check_regular(path).st_size
        if size > MOST_BYTES:
            raise SpecError(str(path), f"{size} bytes, and at most {MOST_BYTES} are read")
        data = path.read_bytes()
    except OSError as error:
        raise SpecError(str(path), f"cannot be read: {error.strerror}") from None
    lines = data.removeprefix(BYTE_ORDER_MARK.encode("utf-8")).split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    texts = []
    for number, line in enumerate(lines, 1):
        try:
            texts.append(line.removesuffix(b"\r").decode("utf-8"))
        except UnicodeDecodeError as error:
            raise SpecError(f"{path}:{number}", f"expected UTF-8: {error.reason}") from None
    return texts
