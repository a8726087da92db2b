"""What one request asks for, as written; `resolve` makes it concrete."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from midstream.errors import SpecError
from midstream.spec.binding import Lookup
from midstream.spec.capture import Capture
from midstream.spec.consumers import names_consumers, read_consumers
from midstream.spec.fields import MAX_PARTS, at, kind, read_fields, read_json
from midstream.spec.operations import Edit, parse_edit
from midstream.spec.probe import Probe

T = TypeVar("T")

_NOTHING = "asks for nothing: give `capture`, `edits` or `probes`"


@dataclass(frozen=True, slots=True)
class Plan:
    """The captures, edits and probes of one request.

    Attributes:
        captures: what to read; where two overlap, the row is captured once.
        edits: what to change; edits of one token at one site apply in this order.
        probes: what to score, each under a name of its own, once the edits there are done.
        origins: after `bind`, for each edit the index that it had before; empty: its own.

    Raises:
        SpecError: all are empty, a capture is there twice, two captures that go to one place have
            other metadata, or two probes have one name.
    """

    captures: tuple[Capture, ...] = ()
    edits: tuple[Edit, ...] = ()
    probes: tuple[Probe, ...] = ()
    origins: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, parts, form, shown in (
            ("capture", self.captures, Capture, "`Capture`"),
            ("edits", self.edits, Edit, "edits"),
            ("probes", self.probes, Probe, "`Probe`"),
        ):
            if not isinstance(parts, tuple) or not all(isinstance(part, form) for part in parts):
                raise SpecError(name, f"expected a tuple of {shown}; see Plan.make")
            if len(parts) > MAX_PARTS:
                raise SpecError(name, f"at most {MAX_PARTS} can be listed, got {len(parts)}")
        if not (self.captures or self.edits or self.probes):
            raise SpecError("", _NOTHING)
        first: dict[Capture, int] = {}
        for index, capture in enumerate(self.captures):
            if first.setdefault(capture, index) != index:
                raise SpecError(f"capture[{index}]", f"the same as capture[{first[capture]}]")
        described: dict[tuple[str, str, str], int] = {}
        for index, capture in enumerate(self.captures):
            if capture.metadata:
                other = described.setdefault(capture.place, index)
                if self.captures[other].metadata != capture.metadata:
                    raise SpecError(
                        f"capture[{index}].metadata",
                        f"not that of capture[{other}], whose rows go to the same place",
                    )
        owner: dict[str, int] = {}
        for index, probe in enumerate(self.probes):
            if owner.setdefault(probe.name, index) != index:
                raise SpecError(
                    f"probes[{index}].name",
                    f"`{probe.name}` is the name of probes[{owner[probe.name]}]; give another",
                )

    def __deepcopy__(self, _memo: dict[int, object]) -> Plan:
        # vLLM copies a request's parameters for each prompt; what cannot change is shared.
        return self

    @staticmethod
    def parse(value: object) -> Plan:
        """A plan from its JSON form: a dict, or its text as `str` or UTF-8 `bytes`.

        The form is `{"capture": {…} | [{…}], "edits": {"op": "steer", …} | [{…}], "probes":
        {…} | [{…}]}`; what is not asked for is left out.

        Raises:
            SpecError: anything unknown, missing, malformed or empty.
        """
        if isinstance(value, Plan):
            return value
        if isinstance(value, (str, bytes)):
            value = read_json(value)
        given = read_fields(value, required=(), optional=("capture", "edits", "probes"))
        for name, part in given.items():
            if part is None:
                raise SpecError(name, f"expected a dict or a list, got {kind(part)}")
        plan = Plan.make(**given)
        if plan is None:
            raise SpecError("", _NOTHING)
        return plan

    @staticmethod
    def make(capture: object = None, edits: object = None, probes: object = None) -> Plan | None:
        """A plan from Python values; None if nothing is given.

        Args:
            capture: None, a Capture or dict, or a list or tuple of these; or by sink, as
                `read_consumers` has it.
            edits: None, an edit or a dict with `op`, or a list or tuple of these.
            probes: None, a Probe or dict, or a list or tuple of these.

        Raises:
            SpecError: as `parse`.
        """
        if names_consumers(capture):
            with at("capture"):
                capture = read_consumers(capture)
        if capture is None and edits is None and probes is None:
            return None
        return Plan(
            _read_parts("capture", capture, Capture.parse),
            _read_parts("edits", edits, parse_edit),
            _read_parts("probes", probes, Probe.parse),
        )

    def to_dict(self) -> dict[str, object]:
        """The JSON form, which `parse` reads back as an equal plan."""
        found: dict[str, object] = {}
        if self.captures:
            found["capture"] = [capture.to_dict() for capture in self.captures]
        if self.edits:
            found["edits"] = [edit.to_dict() for edit in self.edits]
        if self.probes:
            found["probes"] = [probe.to_dict() for probe in self.probes]
        return found

    def to_json(self) -> str:
        """The JSON form as text."""
        return json.dumps(self.to_dict(), allow_nan=False, separators=(",", ":"))

    def names(self) -> tuple[str, ...]:
        """The names of registered vectors that it uses, each once."""
        parts = (*self.edits, *self.probes)
        return tuple(dict.fromkeys(name for part in parts for name in part.names()))

    def origin(self, index: int) -> int:
        """The index that edit `index` had when it was written."""
        return self.origins[index] if self.origins else index

    @property
    def needs_prompt(self) -> bool:
        """Whether what is selected depends on more of the prompt than its length."""
        parts = (*self.captures, *self.edits, *self.probes)
        return any(part.positions.needs_prompt for part in parts)

    def without_places(self) -> Plan:
        """The plan without a word of where its rows go; itself, where nothing but that tells two
        of its captures apart.
        """
        bare = tuple(capture.without_place() for capture in self.captures)
        if bare == self.captures or len(set(bare)) < len(bare):
            return self
        return replace(self, captures=bare)

    def bind(self, lookup: Lookup, num_layers: int | None = None) -> Plan:
        """The plan with the registered vectors in the place of their names.

        An edit whose name has several taps becomes several edits, one after the other.

        Args:
            lookup: gives the vectors of a name, by (site, layer from 0), or one under None; raises
                SpecError for an unknown name.
            num_layers: of the model; None: a layer counted from the end is not found in a name.

        Raises:
            SpecError: a name is unknown, or has no vector where one is asked for. The path is that
                in this plan.
        """
        if not self.names():
            return self
        edits: list[Edit] = []
        origins: list[int] = []
        for index, edit in enumerate(self.edits):
            with at(f"edits[{index}]"):
                edits.extend(edit.bind(lookup, num_layers))
            origins += [self.origin(index)] * (len(edits) - len(origins))
        probes: list[Probe] = []
        for index, probe in enumerate(self.probes):
            with at(f"probes[{index}]"):
                probes.extend(probe.bind(lookup, num_layers))
        return Plan(self.captures, tuple(edits), tuple(probes), tuple(origins))


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
