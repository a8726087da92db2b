"""Seams as lines of text; `seams.txt` has them, and says how a line is written."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

# Which process, engine or model runner needs the seams below a heading.
HEADINGS = ("process", "offline", "async", "server", "model", "v1", "v2")

_EXPECTED = (
    "expected [heading], `module:function(argument, ...)  # why` or"
    " `module:Class{attribute, ...}  # why`"
)
_NAME = r"[A-Za-z_]\w*"
_MODULE = rf"(?P<module>{_NAME}(?:\.{_NAME})*):"
# An argument, and what separates it from the next one or from the end.
_ARGUMENT = rf"{_NAME}(?:, (?!\))|(?=\)))"
_RUNNER = rf"(?P<runner> @runner(?P<path>(?:\.{_NAME})*))?"
_WHY = r"  # (?P<why>\S(?:.*\S)?)"
_FUNCTION = re.compile(
    rf"{_MODULE}(?P<name>(?:{_NAME}\.)?(?P<last>{_NAME}))"
    rf"\((?P<parameters>(?:{_ARGUMENT})*)(?:\*, (?P<named>(?:{_ARGUMENT})+))?(?P<open>\.\.\.)?\)"
    rf"{_RUNNER}{_WHY}",
    re.ASCII,
)
_ATTRIBUTES = re.compile(
    rf"{_MODULE}(?P<owner>(?:{_NAME})?)\{{(?P<names>{_NAME}(?:, {_NAME})*)\}}{_RUNNER}"
    rf"(?: since (?P<since>\d+\.\d+))?(?: until (?P<until>\d+\.\d+))?{_WHY}",
    re.ASCII,
)
_HEADING = re.compile(r"\[(?P<group>\w+)\](?:  # .+)?")


@dataclass(frozen=True, slots=True)
class Seam:
    """A function of vLLM that midstream wraps or calls."""

    module: str
    name: str  # `Class.method` for a method
    parameters: tuple[str, ...]  # the leading ones after `self`
    why: str
    named: tuple[str, ...] = ()  # parameters that midstream passes by name
    at: str = ""  # path of the method on a model runner; "" for other functions
    # Called by midstream with these parameters alone, so that it may require no others; else
    # midstream passes on what it is given.
    called: bool = False


@dataclass(frozen=True, slots=True)
class Fields:
    """Attributes of a class or a module of vLLM."""

    module: str
    owner: str  # a class; empty: the module
    names: tuple[str, ...]  # declared in the class or a base, or set on its objects by a method
    why: str
    at: str | None = None  # path of the object on a model runner; None: it is not on one
    since: str = ""  # first and last release with these attributes, such as "0.30"; "" for all
    until: str = ""

    def is_in(self, version: str) -> bool:
        """Return whether a release has these attributes, as far as known."""
        now = _release(version)
        begun = not self.since or _release(self.since) <= now
        return begun and (not self.until or now <= _release(self.until))


class SeamGroup(NamedTuple):
    """The seams that one kind of process, engine or model runner needs, in the text's order."""

    functions: tuple[Seam, ...]
    fields: tuple[Fields, ...]

    @classmethod
    def of(cls, seams: list[Seam | Fields]) -> SeamGroup:
        functions = tuple(seam for seam in seams if isinstance(seam, Seam))
        return cls(functions, tuple(seam for seam in seams if isinstance(seam, Fields)))


def parse(text: str) -> dict[str, SeamGroup]:
    groups: dict[str, list[Seam | Fields]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            if heading := _HEADING.fullmatch(line):
                groups[_new_group(heading["group"], groups)] = []
            elif line and not line.startswith("#"):
                seam = _seam(line)
                if not groups:
                    raise ValueError(f"expected a heading above it, such as [{HEADINGS[0]}]")
                list(groups.values())[-1].append(seam)
        except ValueError as error:
            raise ValueError(f"seams, line {number}: {line!r}: {error}") from None
    absent = [name for name in HEADINGS if name not in groups]
    if absent:
        raise ValueError(f"seams: expected the headings [{'], ['.join(absent)}] as well")
    return {name: SeamGroup.of(seams) for name, seams in groups.items()}


def _new_group(name: str, known: Iterable[str]) -> str:
    expected = [group for group in HEADINGS if group not in known]
    if name not in expected:
        raise ValueError(f"expected a heading of {', '.join(expected) or 'nothing more'}")
    return name


def _seam(line: str) -> Seam | Fields:
    parts = _FUNCTION.fullmatch(line) or _ATTRIBUTES.fullmatch(line)
    if parts is None:
        raise ValueError(_EXPECTED)
    return _function(parts) if parts.re is _FUNCTION else _fields(parts)


def _function(parts: re.Match[str]) -> Seam:
    parameters, named = (_names(parts[key] or "") for key in ("parameters", "named"))
    _check_once(*parameters, *named)
    at = f"{parts['path']}.{parts['last']}".lstrip(".") if parts["runner"] else ""
    return Seam(
        parts["module"], parts["name"], parameters, parts["why"], named, at, not parts["open"]
    )


def _fields(parts: re.Match[str]) -> Fields:
    names = _names(parts["names"])
    _check_once(*names)
    since, until = parts["since"] or "", parts["until"] or ""
    if since and until and _release(since) > _release(until):
        raise ValueError(f"expected `until` to be {since} or later")
    at = parts["path"].lstrip(".") if parts["runner"] else None
    return Fields(parts["module"], parts["owner"], names, parts["why"], at, since, until)


def _names(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", text))


def _check_once(*names: str) -> None:
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise ValueError(f"expected {', '.join(sorted(repeated))} once")


def _release(version: str) -> tuple[int, int]:
    number = re.match(r"(\d+)\.(\d+)", version)
    # A version without a number was built from newer sources than any release.
    return (int(number[1]), int(number[2])) if number else (10**6, 0)
