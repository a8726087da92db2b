"""Pairs of texts and questions of files, read strictly: errors name the file and the line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

from midstream.errors import SpecError
from midstream.lab.data.text_files import (
    JSON_SUFFIXES,
    Item,
    decoded,
    json_values,
    lines,
    plain_lines,
)
from midstream.validation import check_regular, kind, read_fields, read_json

LEAST_PAIRS = 2
MOST_BYTES = 64 << 20


class Pair(NamedTuple):
    """Two texts that differ in what the direction is to find, which points to `positive`."""

    positive: str
    negative: str


def read_pairs(path: Path) -> list[Pair]:
    """Read JSON lines, or an array: `{"positive": "…", "negative": "…"}` on each line."""
    pairs = []
    for item in _items(path, json_values):
        place = f"{path}:{item.number}"
        try:
            fields = read_fields(read_json(decoded(item)), ("positive", "negative"))
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
    files = [[_text(path, item) for item in _items(path, lines)] for path in (positive, negative)]
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
    """Read a file with one question a line that is not empty; or texts as JSON (.json, .jsonl)."""
    if path.suffix.lower() in JSON_SUFFIXES:
        questions = [_question(path, item) for item in _items(path, json_values)]
    else:
        questions = [_text(path, item).strip() for item in _items(path, plain_lines)]
    if not questions:
        raise SpecError(str(path), "expected one question a line, got none")
    return questions


def _question(path: Path, item: Item) -> str:
    text = read_json(_text(path, item))
    if not isinstance(text, str) or not text.strip():
        raise SpecError(f"{path}:{item.number}", f"expected a text, got {kind(text)}")
    return text.strip()


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


def _items(path: Path, read: Callable[[IO[bytes], str], Iterator[Item]]) -> Iterator[Item]:
    """Read a file's items."""
    try:
        size = check_regular(path).st_size
        if size > MOST_BYTES:
            raise SpecError(str(path), f"{size} bytes, and at most {MOST_BYTES} are read")
        with open(path, "rb") as file:
            yield from read(file, str(path))
    except OSError as error:
        raise SpecError(str(path), f"cannot be read: {error.strerror}") from None


def _text(path: Path, item: Item) -> str:
    try:
        return decoded(item)
    except SpecError as error:
        raise SpecError(f"{path}:{item.number}", error.problem) from None
