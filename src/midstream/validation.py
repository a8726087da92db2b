"""Strict readers of single values, whose errors have paths in what the caller wrote."""

from __future__ import annotations

import codecs
import difflib
import errno
import json
import math
import numbers
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from struct import pack, unpack
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NoReturn,
    TypeGuard,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from midstream.errors import ConfigError, SpecError

if TYPE_CHECKING:
    from msgspec import Struct

# Limits on the memory that one request can take; far above practical use.
MAX_ITEMS = 4096  # layers or positions in one list
MAX_PARTS = 1024  # captures, or edits, in one plan
# Values in one JSON text that a client sends. Nothing else runs in the process while a list of
# numbers is parsed, some 30 ms for so many. `{"f32": base64}` is one value.
MAX_VALUES = 1 << 18
INT_LIMIT = 2**31
BYTE_ORDER_MARK = "\ufeff"
FLOAT32_MAX = (2 - 2**-23) * 2.0**127

_SHOWN = 60
_PART = 1 << 20  # of a text that is searched at once
_HINTED = 600_000
_PROBLEM = 400
# What is before the first name of an object, between a name and its value, between a value and the
# next name, and behind the last value.
_FIRST, _COLON, _NEXT, _LAST = (
    re.compile(text.replace("_", r"[ \t\n\r]*"))
    for text in (r'_\{_(?=")', "_:_", r'_,_(?=")', r"_\}_")
)
# The end of msgspec's messages: "… - at `$.edits[0].site`".
_PLACE = re.compile(r"(.*) - at `\$\.?(.*)`", re.DOTALL)

T = TypeVar("T")
D = TypeVar("D")
C = TypeVar("C")
S = TypeVar("S", bound="Struct")


def check_regular(path: str | os.PathLike[str]) -> os.stat_result:
    """Return a regular file's status before it is read: a pipe or a device may not end."""
    file_stat = os.stat(path)
    if stat.S_ISDIR(file_stat.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(file_stat.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return file_stat


def check_suffix(path: str | os.PathLike[str], *suffixes: str, instead: str = "") -> str:
    """Return the path of a file to write, whose name must say its format."""
    name = os.fspath(path)
    if os.path.splitext(name)[1].lower() not in suffixes:
        known = " or ".join(part for part in (", ".join(suffixes[:-1]), suffixes[-1]) if part)
        raise SpecError(
            "path",
            f"expected a name that ends in {known}, got {show(os.path.basename(name))}{instead}",
        )
    return name


@contextmanager
def at(prefix: str) -> Iterator[None]:
    """Prepend `prefix` to the path of every SpecError raised in the `with` block."""
    try:
        yield
    except SpecError as error:
        raise error.under(prefix) from None


@contextmanager
def setting(path: str) -> Iterator[None]:
    """Raise a ConfigError of the setting at `path` for every SpecError of the block or function."""
    try:
        yield
    except SpecError as error:
        raise ConfigError(str(error.under(path))) from None


def kind(value: object) -> str:
    """Return the type of a value, for messages."""
    return "`None`" if value is None else f"`{type(value).__name__}`"


def check_text(text: str) -> None:
    """Check that text has a UTF-8 form: JSON allows unpaired surrogates; tokenizers do not."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise SpecError("", f"{show(text)} contains an unpaired surrogate") from None


def show(value: object) -> str:
    """Return a value for messages, shortened to a bounded length."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def listed(names: Iterable[str]) -> str:
    """Return names in backticks, separated by commas, for messages."""
    return ", ".join(f"`{name}`" for name in names)


def closest(name: str, known: Iterable[str], least: float = 0.6) -> str:
    """Return the most similar of the known names; "" if none is, or a search would take seconds.
    `least`: how similar it must be, up to 1.
    """
    names = list(known)
    is_quick = len(name) * len(names) <= _HINTED
    return next(iter(difflib.get_close_matches(name, names, 1, least)), "") if is_quick else ""


def hint(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean …?)` with the closest of the known names; "" if there is none."""
    close = closest(name, known)
    return f" (did you mean `{close}`?)" if close else ""


def not_a_chat(text: str, instead: str) -> SpecError:
    """Return the error of a text that is given as the messages of a chat."""
    message = json.dumps(text[:_SHOWN], ensure_ascii=False)
    return SpecError(
        "messages",
        f'expected a list of messages, got a text; write [{{"role": "user", "content": {message}}}]'
        f", or {instead}",
    )


def no_attribute(owner: object, name: str, instead: Mapping[str, str]) -> AttributeError:
    """Return the error of an attribute that there is not; `instead` says what to write for some."""
    problem = f"{type(owner).__name__!r} object has no attribute {name!r}"
    if name in instead:
        problem += f": {instead[name]}"
    return AttributeError(problem, name=name, obj=owner)


def suggests(instead: Mapping[str, str]) -> Callable[[type[C]], type[C]]:
    """Return the decorator of a class whose unknown attributes raise `no_attribute`. Type checkers
    do not see it, so that they report these too.
    """

    def decorate(cls: type[C]) -> type[C]:
        def refuse(self: object, name: str) -> NoReturn:
            raise no_attribute(self, name, instead)

        cls.__getattr__ = refuse  # type: ignore[attr-defined]
        return cls

    return decorate


def as_number(value: object) -> object:
    """Return an array or tensor of one element, of any library, as a Python number."""
    shape = getattr(value, "shape", None)
    if shape is None or not hasattr(value, "item") or tuple(shape) not in ((), (1,)):
        return value
    try:
        return value.item()
    except (RuntimeError, TypeError, ValueError):
        return value


def as_list(value: object) -> object:
    """Return a 1-D array, tensor or series as a list, one without dimensions as a number."""
    shape = getattr(value, "shape", None)
    if shape is None or not hasattr(value, "tolist") or len(shape) > 1:
        return value
    try:
        values: object = value.tolist()
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return value
    return values


def is_int(value: object) -> TypeGuard[numbers.Integral]:
    """Return whether `value` is a Python or numpy integer. A bool is not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def read_int(value: object) -> int:
    """Read an integer within ±2**31: Python's, numpy's, or an array or tensor of one element."""
    value = as_number(value)
    if not is_int(value):
        raise SpecError("", f"expected `int`, got {kind(value)}")
    number = int(value)
    if abs(number) > INT_LIMIT:
        raise SpecError("", f"expected an `int` within ±2**31, got {show(number)}")
    return number


def read_count(value: object, least: int = 1) -> int:
    """Read an integer of any length, of at least `least`."""
    if not is_int(value):
        raise SpecError("", f"expected `int`, got {kind(value)}")
    if value < least:
        raise SpecError("", f"expected at least {least}, got {show(int(value))}")
    return int(value)


def float32(value: float) -> float:
    """Return the nearest float32 as a Python float."""
    return float(unpack("<f", pack("<f", value))[0])


def read_float32(value: object) -> float:
    """Read a number, or an array or tensor of one element, finite and within float32's range."""
    if not isinstance(value, (int, float)):
        value = as_number(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise SpecError("", f"expected a number, got {kind(value)}")
    try:
        number = float(value)
    except OverflowError:
        raise SpecError("", "the number overflows float32") from None
    if not math.isfinite(number):
        raise SpecError("", f"expected a finite number, got {number}")
    if abs(number) > FLOAT32_MAX:
        raise SpecError("", f"{number!r} overflows float32")
    return number


def read_word(value: object, known: Sequence[str]) -> str:
    """Read one of the known words."""
    if not isinstance(value, str):
        raise SpecError("", f"expected one of {listed(known)}, got {kind(value)}")
    if value not in known:
        raise SpecError(
            "", f"expected one of {listed(known)}, got {show(value)}{hint(value, known)}"
        )
    return known[known.index(value)]


def read_mapping(value: object, expected: str) -> Mapping[Any, Any]:
    """Return a dict unchanged; `expected` is what would be right, for the error."""
    if not isinstance(value, Mapping):
        raise SpecError("", f"expected {expected}, got {show(value)}")
    return value


def read_fields(
    value: object, required: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, Any]:
    known = (*required, *optional)
    if not isinstance(value, Mapping):
        raise SpecError("", f"expected a dict of {listed(known)}, got {kind(value)}")
    for name in value:
        if not isinstance(name, str):
            raise SpecError("", f"field names must be `str`, got {kind(name)}")
        if name not in known:
            raise SpecError(
                "", f"unknown field {show(name)}{hint(name, known)}; known: {listed(known)}"
            )
    for name in required:
        if name not in value:
            raise SpecError("", f"missing field `{name}`")
    return dict(value)


def read_json(text: str | bytes) -> object:
    """Parse a JSON text; `bytes` must be UTF-8. A byte order mark in front is skipped."""
    try:
        value: object = _DECODER.decode(_text_of(text))
    except (RecursionError, ValueError) as error:
        raise _json_error(error) from None
    return value


def read_json_members(data: bytes) -> tuple[object, str, Mapping[str, tuple[int, int]]]:
    """Parse as `read_json`, member by member, as threads run; return value, text and places."""
    try:
        text = _text_of(data)
        members, places = _members(text)
        # Without members: an empty object, another value, or malformed, which this tells.
        return (members if places else _DECODER.decode(text)), text, places
    except (RecursionError, ValueError) as error:
        raise _json_error(error) from None


def _members(text: str) -> tuple[dict[str, object], dict[str, tuple[int, int]]]:
    """Return the members of an object, and where in its text their values are; else nothing."""
    members: dict[str, object] = {}
    places: dict[str, tuple[int, int]] = {}
    mark = _FIRST.match(text)
    while mark is not None:
        name, at = _DECODER.raw_decode(text, mark.end())
        colon = _COLON.match(text, at)
        if colon is None or name in members:
            break
        members[name], at = _DECODER.raw_decode(text, colon.end())
        places[name] = colon.end(), at
        if _LAST.fullmatch(text, at):
            return members, places
        mark = _NEXT.match(text, at)
    return {}, {}


def encoded(text: str, start: int, stop: int) -> Iterator[bytes]:
    """Yield a part of a text as UTF-8, piece by piece: other threads run between them."""
    for at in range(start, stop, _PART):
        yield text[at : min(at + _PART, stop)].encode("utf-8")


def _text_of(data: str | bytes) -> str:
    """Return the text of JSON without a byte order mark. Other threads run while it is decoded."""
    if isinstance(data, bytes) and len(data) <= _PART:
        data = data.decode("utf-8")
    elif isinstance(data, bytes):
        decoder = codecs.getincrementaldecoder("utf-8")()
        starts = range(0, len(data), _PART)
        parts = [decoder.decode(data[start : start + _PART]) for start in starts]
        data = "".join([*parts, decoder.decode(b"", final=True)])
    return data.removeprefix(BYTE_ORDER_MARK)


def _json_error(error: Exception) -> SpecError:
    if isinstance(error, SpecError):
        return error
    if isinstance(error, RecursionError):
        return SpecError("", "the JSON is nested too deeply")
    return SpecError("", f"expected JSON: {error}")


def read_json_text(text: str) -> object:
    """Parse a JSON text that is a value in the JSON of a request."""
    if has_more_values(text):
        raise SpecError("", f"the JSON has more than {MAX_VALUES} values")
    return read_json(text)


def has_more_values(text: str | bytes) -> bool:
    """Return whether a JSON text has more than MAX_VALUES values. Other threads run meanwhile."""
    count, comma = 0, "," if isinstance(text, str) else b","
    for start in range(0, len(text) if len(text) > MAX_VALUES else 0, _PART):
        count += text.count(comma, start, start + _PART)  # type: ignore[arg-type]
        if count > MAX_VALUES:
            return True
    return False


def read_message(read: Callable[[D], T], data: D) -> T:
    """Read a message with one of msgspec's typed decoders."""
    import msgspec  # here, as `import midstream` loads the standard library alone

    try:
        return read(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        text = str(error)
    match = _PLACE.fullmatch(text)
    problem, path = match.groups() if match else (text, "")
    raise SpecError(path[:_SHOWN], (problem[:1].lower() + problem[1:])[:_PROBLEM])


@cache
def _hints_of(struct: type[S]) -> dict[str, Any]:
    return get_type_hints(struct)


def read_struct(struct: type[S], value: object) -> S:
    """Read a dict as a msgspec Struct, all of whose fields have defaults."""
    import msgspec

    names = dict(zip(struct.__struct_encode_fields__, struct.__struct_fields__, strict=True))
    fields = read_fields(value, (), tuple(names))
    annotations = _hints_of(struct)
    for name in fields:
        annotation = annotations[names[name]]
        if get_origin(annotation) is Literal:  # msgspec's error would not name the words
            with at(name):
                read_word(fields[name], get_args(annotation))
    try:
        made: S = read_message(partial(msgspec.convert, type=struct), fields)
    except SpecError as error:
        if error.path not in fields:
            raise
        expected = error.problem.partition(", got ")[0]
        raise SpecError(error.path, f"{expected}, got {show(fields[error.path])}") from None
    return made


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields: dict[str, object] = {}
    for name, value in pairs:
        if name in fields:
            raise SpecError("", f"duplicate JSON field {show(name)} in one object")
        fields[name] = value
    return fields


def _reject_constant(name: str) -> object:
    raise SpecError("", f"{name} is not a JSON number")


# Created once: a store has a line of JSON for each of millions of requests.
_DECODER = json.JSONDecoder(object_pairs_hook=_distinct, parse_constant=_reject_constant)
