"""What one request asks for, as written; `resolve` makes it concrete."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from midstream.errors import SpecError
from midstream.spec.capture import Capture
from midstream.spec.fields import MAX_PARTS, at, kind, listed, read_fields, read_json, read_word
from midstream.spec.steer import OPS, Steer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plan:
    """The captures and edits of one request.

    Attributes:
        captures: what to read; where two overlap, the row is captured once.
        edits: what to change; edits of one token at one site apply in this order.

    Raises:
        SpecError: both are empty, or a capture is there twice.
    """

    captures: tuple[Capture, ...] = ()
    edits: tuple[Steer, ...] = ()

    def __post_init__(self) -> None:
        for name, parts, form in (
            ("capture", self.captures, Capture),
            ("edits", self.edits, Steer),
        ):
            if not isinstance(parts, tuple) or not all(isinstance(part, form) for part in parts):
                raise SpecError(name, f"expected a tuple of `{form.__name__}`; see Plan.make")
            if len(parts) > MAX_PARTS:
                raise SpecError(name, f"at most {MAX_PARTS} can be listed, got {len(parts)}")
        if not self.captures and not self.edits:
            raise SpecError("", "asks for nothing: give `capture`, `edits` or both")
        first: dict[Capture, int] = {}
        for index, capture in enumerate(self.captures):
            if first.setdefault(capture, index) != index:
                raise SpecError(f"capture[{index}]", f"the same as capture[{first[capture]}]")

    def __deepcopy__(self, _memo: dict[int, object]) -> Plan:
        # vLLM copies a request's parameters for each prompt; what cannot change is shared.
        return self

    @staticmethod
    def parse(value: object) -> Plan:
        """A plan from its JSON form: a dict, or its text as `str` or UTF-8 `bytes`.

        The form is `{"capture": {…} | [{…}], "edits": {"op": "steer", …} | [{…}]}`; one of the
        two may be missing.

        Raises:
            SpecError: anything unknown, missing, malformed or empty.
        """
        if isinstance(value, Plan):
            return value
        if isinstance(value, (str, bytes)):
            value = read_json(value)
        given = read_fields(value, required=(), optional=("capture", "edits"))
        for name, part in given.items():
            if part is None:
                raise SpecError(name, f"expected a dict or a list, got {kind(part)}")
        plan = Plan.make(**given)
        if plan is None:
            raise SpecError("", "asks for nothing: give `capture`, `edits` or both")
        return plan

    @staticmethod
    def make(capture: object = None, edits: object = None) -> Plan | None:
        """A plan from Python values; None if nothing is given.

        Args:
            capture: None, a Capture or dict, or a list or tuple of these.
            edits: None, a Steer or dict with `op`, or a list or tuple of these.

        Raises:
            SpecError: as `parse`.
        """
        if capture is None and edits is None:
            return None
        return Plan(
            _read_parts("capture", capture, Capture.parse), _read_parts("edits", edits, _read_edit)
        )

    def to_dict(self) -> dict[str, object]:
        """The JSON form, which `parse` reads back as an equal plan."""
        found: dict[str, object] = {}
        if self.captures:
            found["capture"] = [capture.to_dict() for capture in self.captures]
        if self.edits:
            found["edits"] = [edit.to_dict() for edit in self.edits]
        return found

    def to_json(self) -> str:
        """The JSON form as text."""
        return json.dumps(self.to_dict(), allow_nan=False, separators=(",", ":"))


def _read_edit(value: object) -> Steer:
    if isinstance(value, Mapping):
        if "op" not in value:
            raise SpecError("", f"missing field `op`; known: {listed(OPS)}")
        # Before the other fields, as they depend on it.
        with at("op"):
            read_word(value["op"], OPS)
    return Steer.parse(value)


def _read_parts(name: str, value: object, read: Callable[[object], T]) -> tuple[T, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        with at(name):
            return (read(value),)
    if not value:
        raise SpecError(name, "the list is empty; leave it out to ask for none")
    if len(value) > MAX_PARTS:
        raise SpecError(name, f"at most {MAX_PARTS} can be listed, got {len(value)}")
    found = []
    for index, part in enumerate(value):
        with at(f"{name}[{index}]"):
            found.append(read(part))
    return tuple(found)
