"""`Plan`: the captures, edits and probes of one request, and its controller, as given."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from midstream.errors import SpecError
from midstream.plan.argument_names import only_set, read_each
from midstream.plan.captured_rows import OpenRows
from midstream.plan.consumers import names_consumers, read_consumers
from midstream.plan.control.act import Flag, Switch
from midstream.plan.control.controller import Controller
from midstream.plan.operations import (
    Bias,
    Edit,
    Gate,
    Steer,
    bind_edit,
    expand_edits,
    fill_edit,
    is_placed_vector,
    parse_edit,
)
from midstream.plan.positions.positions import Positions
from midstream.plan.probe import Probe
from midstream.plan.readouts import Capture, ReadOut, parse_readout
from midstream.plan.readouts.capture import read_short_capture
from midstream.plan.shape import ModelShape
from midstream.plan.vectors.named_lookup import Lookup
from midstream.validation import MAX_PARTS, at, kind, listed, read_fields, read_json, show

T = TypeVar("T")

# What applies to every request of an engine, before what it asks for itself.
ServerWide = Edit | Probe
_ALL = Positions("all")

_MOST_BOUND = 256  # plans
_EMPTY = "the plan is empty: give `capture`, `edits` or `probes`, or `edits=[]` to update it later"


@dataclass(frozen=True, slots=True)
class Plan:
    """The captures, edits and probes of one request. One without any asks for nothing yet: the
    request has a receipt, and can be updated while it runs.

    Attributes:
        captures: activations to record; where captures overlap, a row is captured once.
        edits: interventions; edits of one token at one site apply in this order.
        probes: scores to compute after the edits at the same site; names are unique.
        origins: after `bind`, each edit's index before binding; empty: unchanged.
        coming_from: (field, tool) of each field of another tool that was translated into the plan.
        controller: changes its edits by the scores of its probes in the engine core; None: nothing
            does.
        searched: positions with marks of the edits of other versions: it looks for these marks too.

    Raises:
        SpecError: a capture is given twice, two captures with the same destination
            have different metadata, two probes have the same name, or the controller has nothing
            to read.
    """

    captures: tuple[ReadOut, ...] = ()
    edits: tuple[Edit, ...] = ()
    probes: tuple[Probe, ...] = ()
    origins: tuple[int, ...] = ()
    coming_from: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    controller: Controller | None = None
    searched: tuple[Positions, ...] = ()
    _names: tuple[str, ...] | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, parts, form, shown in (
            ("capture", self.captures, ReadOut, "`Capture`"),
            ("edits", self.edits, Edit, "edits"),
            ("probes", self.probes, Probe, "`Probe`"),
        ):
            if not isinstance(parts, tuple) or not all(isinstance(part, form) for part in parts):
                raise SpecError(name, f"expected a tuple of {shown}; see Plan.make")
            if len(parts) > MAX_PARTS:
                raise SpecError(name, f"expected at most {MAX_PARTS}, got {len(parts)}")
        if self.controller is not None:
            names = [probe.name for probe in self.probes]
            if not names:
                raise SpecError("controller", "it reads scores: give the request `probes`")
            check_law(self, self.controller)
            if self.switches:
                raise SpecError(
                    "controller", "the probes of the request switch its edits (Switch) already"
                )
            law = self.controller.law
            if law is not None and law.probe not in names:
                raise SpecError(
                    f"controller.{law.word}.probe",
                    f"the request has no probe {show(law.probe)}; it has {listed(names)}",
                )
        first: dict[ReadOut, int] = {}
        for index, capture in enumerate(self.captures):
            if first.setdefault(capture, index) != index:
                raise SpecError(f"capture[{index}]", f"duplicate of capture[{first[capture]}]")
        described: dict[tuple[str, ...], int] = {}
        for index, capture in enumerate(self.captures):
            for name in ("metadata", "layout") if capture.metadata else ("layout",):
                other = described.setdefault((name, *capture.place), index)
                if getattr(self.captures[other], name) != getattr(capture, name):
                    raise SpecError(
                        f"capture[{index}].{name}",
                        f"differs from the {name} of capture[{other}], which has the same sink, "
                        "tag and request_id",
                    )
        owner: dict[str, int] = {}
        for index, probe in enumerate(self.probes):
            if owner.setdefault(probe.name, index) != index:
                raise SpecError(
                    f"probes[{index}].name",
                    f"`{probe.name}` is already the name of probes[{owner[probe.name]}]; use "
                    "another name",
                )

    def __deepcopy__(self, _memo: dict[int, object]) -> Plan:
        # vLLM copies a request's parameters for each prompt; an immutable plan can be shared.
        return self

    @staticmethod
    def parse(value: object) -> Plan:
        """Read a plan from its JSON form: a dict, or JSON text as `str` or UTF-8 `bytes`."""
        if isinstance(value, Plan):
            return value
        if isinstance(value, (str, bytes)):
            value = read_json(value)
        fields = read_fields(
            value, required=(), optional=("capture", "edits", "probes", "controller")
        )
        for name, part in fields.items():
            if part is None:
                raise SpecError(name, f"expected a dict or a list, got {kind(part)}")
        plan = Plan.make(**fields)
        if plan is None:
            raise SpecError("", _EMPTY)
        return plan

    @staticmethod
    def make(
        capture: object = None,
        edits: object = None,
        probes: object = None,
        controller: object = None,
    ) -> Plan | None:
        """Create a plan from Python values; None if all arguments are None.

        Args:
            capture: None or False; a Capture, an Attention or the dict of one, or a list or tuple
                of these; a short form, see `read_short_capture`; or a dict by sink, see
                `read_consumers`.
            edits: None, any form of `parse_edit`, or a list or tuple of these, which may be empty:
                an update may give some.
            probes: None, a Probe or dict, or a list or tuple of these.
            controller: None, or any form of `Controller.parse`.

        Raises:
            SpecError: see `parse`.
        """
        if capture is False:
            capture = None
        elif names_consumers(capture):
            with at("capture"):
                capture = read_consumers(capture)
        if all(part is None for part in (capture, edits, probes, controller)):
            return None
        with at("controller"):
            chosen = None if controller is None else Controller.parse(controller)
        with at("capture"):
            short = read_short_capture(capture)
        is_none_yet = isinstance(edits, (list, tuple)) and not edits
        return Plan(
            _read_parts("capture", short or capture, parse_readout),
            () if is_none_yet else _read_parts("edits", edits, parse_edit),
            _read_parts("probes", probes, Probe.parse),
            controller=chosen,
        )

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form, which `parse` reads as an equal plan."""
        fields = only_set(
            capture=[capture.to_dict() for capture in self.captures],
            edits=[edit.to_dict() for edit in self.edits],
            probes=[probe.to_dict() for probe in self.probes],
            controller=None if self.controller is None else self.controller.to_dict(),
        )
        return fields or {"edits": []}

    def to_json(self) -> str:
        """Return the JSON form as text."""
        return json.dumps(self.to_dict(), allow_nan=False, separators=(",", ":"))

    def names(self) -> tuple[str, ...]:
        """Return the names of the registered vectors in use, each once."""
        if self._names is None:
            own = () if self.controller is None else (self.controller,)
            parts = (*self.edits, *self.probes, *self.switches, *own)
            names = tuple(dict.fromkeys(name for part in parts for name in part.names()))
            object.__setattr__(self, "_names", names)
        return self._names or ()

    @property
    def switches(self) -> tuple[Switch, ...]:
        """The switches of its probes, in their order."""
        return tuple(probe.act for probe in self.probes if isinstance(probe.act, Switch))

    def origin(self, index: int) -> int:
        """Return the index that edit `index` had before binding."""
        return self.origins[index] if self.origins else index

    @property
    def selections(self) -> list[Positions]:
        """The positions of all parts, of each version."""
        selections = [*self._edited, *self.searched]
        selections += [selection for capture in self.captures for selection in capture.selections]
        selections += [selection for probe in self.probes for selection in probe.selections]
        return selections

    @property
    def needs_prompt(self) -> bool:
        """Whether the selected positions depend on more of the prompt than its length."""
        return any(positions.needs_prompt for positions in self.selections)

    @property
    def marked(self) -> tuple[Positions, ...]:
        """The positions with marks of the edits of all versions."""
        own = (positions for positions in self._edited if positions.has_marks)
        return tuple(dict.fromkeys((*self.searched, *own)))

    @property
    def _edited(self) -> list[Positions]:
        """The positions of the edits of each version that it may change to."""
        sets = () if self.controller is None else self.controller.edits
        edits = [*self.edits, *(edit for switch in self.switches for edit in switch.edits)]
        edits += [edit for edit_set in sets for edit in edit_set.edits]
        return [edit.positions for edit in edits]

    def without_places(self) -> Plan:
        """Return the plan without destinations; itself if two captures differ in these alone."""
        bare = tuple(capture.without_place() for capture in self.captures)
        if bare == self.captures or len(set(bare)) < len(bare):
            return self
        return replace(self, captures=bare)

    def bind(self, lookup: Lookup, num_layers: int | None = None) -> Plan:
        """Return the plan with names replaced by their registered vectors.

        An edit whose name has several taps or whole edits, or with one vector per layer, becomes
        several consecutive edits. Negative layers match no name if `num_layers` is None.
        """
        own = () if self.controller is None else (self.controller,)
        if all(part.is_bound for part in (*self.edits, *self.probes, *own)):
            return self
        bind = partial(bind_edit, lookup=lookup, num_layers=num_layers)
        edits, origins = expand_edits(self.edits, self.origins, bind)
        probes: list[Probe] = []
        for index, probe in enumerate(self.probes):
            with at(f"probes[{index}]"):
                probes.extend(probe.bind(lookup, num_layers))
        controller = self.controller
        if controller is not None:
            with at("controller"):
                controller = controller.bind(lookup, num_layers)
        return Plan(
            self.captures, edits, tuple(probes), origins, self.coming_from, controller=controller
        )

    def expanded(self, expand: Callable[[Edit], tuple[Edit, ...]]) -> Plan:
        """Return the plan with each edit replaced by those that `expand` returns for it."""
        edits, origins = expand_edits(self.edits, self.origins, expand)
        return replace(self, edits=edits, origins=origins)

    def fill(self, open_rows: OpenRows, shape: ModelShape) -> Plan:
        """Return the plan with rows of earlier requests by value; see `fill_edit`."""
        return self.expanded(lambda edit: fill_edit(edit, open_rows, shape))


def ids_of(own: Plan | None) -> Hashable:
    """Return what only plans of the same objects have in common, as long as one of them lives."""
    if own is None:
        return None
    parts = *own.captures, *own.edits, *own.probes, own.controller
    return own.origins, own.coming_from, own.searched, *map(id, parts)


@dataclass(frozen=True, slots=True)
class Bound:
    """A plan that was bound; holds the own plan's parts, whose ids are its key."""

    own: Plan | None
    plan: Plan | None
    named: tuple[tuple[Any, object], ...]  # its names, and what they stood for


class BoundPlans:
    """Binds plans, each once: requests with the same field share the plan's objects."""

    def __init__(self, lookup: Lookup, num_layers: int) -> None:
        self._lookup: Any = lookup
        self._num_layers = num_layers
        self._bound: dict[Hashable, Bound] = {}

    def is_current(self, bound: Bound) -> bool:
        """Return whether the names of a plan stand for the same as when it was bound."""
        if not bound.named:
            return True
        with suppress(SpecError):  # `Plan.bind` says where the name is
            return all(self._lookup(name) is meaning for name, meaning in bound.named)
        return False

    def bound(self, own: Plan | None) -> Bound:
        """Return a plan with what its names stand for now: the same object as long as they do."""
        key = ids_of(own)
        known = self._bound.get(key)
        if known is not None and self.is_current(known):
            return known
        named: dict[Any, Any] = {}
        plan = own
        if own is not None:
            plan = own.bind(
                lambda name: named.setdefault(name, self._lookup(name)), self._num_layers
            )
        bound = Bound(own, plan, tuple(named.items()))
        if named:
            if len(self._bound) >= _MOST_BOUND:
                self._bound.clear()
            self._bound[key] = bound
        return bound

    def bind(self, own: Plan | None) -> Plan | None:
        return self.bound(own).plan

    def forget(self) -> None:
        self._bound.clear()


def asks_engine(plan: Plan) -> bool:
    """Return whether it has read-outs or tokens for which an engine has to be asked."""
    readouts = any(not isinstance(capture, Capture) for capture in plan.captures)
    return readouts or any(map(has_token, plan.edits))


def has_token(edit: Edit) -> bool:
    """Return whether an edit, or that of a gate, has a token in place of its vector."""
    steer = edit.edit if isinstance(edit, Gate) else edit
    return isinstance(steer, Steer) and steer.token is not None


def check_law(plan: Plan, controller: Controller) -> None:
    """Check that a request whose controller is a `Threshold` has edits, and single scores."""
    law = controller.law
    if law is not None and any(probe.name == law.probe and probe.classes for probe in plan.probes):
        raise SpecError(
            f"controller.{law.word}.probe",
            f"{show(law.probe)} has classes, and a Threshold reads one score for each token; give "
            "a probe of one class",
        )
    if law is not None and not plan.edits:
        raise SpecError(
            "controller", "a Threshold changes the strength of the request's edits: give it `edits`"
        )


def _read_parts(name: str, value: object, read: Callable[[object], T]) -> tuple[T, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) or is_placed_vector(value):
        with at(name):
            return (read(value),)
    if not value:
        raise SpecError(name, "the list is empty; use None, or omit the field")
    if len(value) > MAX_PARTS:
        raise SpecError(name, f"expected at most {MAX_PARTS}, got {len(value)}")
    return read_each(name, value, read)


def emit_server_wide(part: ServerWide) -> dict[str, object]:
    """Return the JSON form of an edit, or of a probe among edits: with the `op` "probe"."""
    return {"op": "probe", **part.to_dict()} if isinstance(part, Probe) else part.to_dict()


def parse_server_wide(value: object) -> ServerWide:
    """Read an edit, or a probe among edits, from the form of `emit_server_wide`."""
    if isinstance(value, Mapping) and value.get("op") == "probe":
        return Probe.parse({name: field for name, field in value.items() if name != "op"})
    return parse_edit(value)


def read_prompts(before: Sequence[ServerWide], also: Sequence[Capture]) -> bool:
    """Return whether what applies to every request depends on more of a prompt than its length."""
    return any(selection.needs_prompt for selection in _selections((*before, *also)))


def reads_all(plan: Plan | None, before: Sequence[ServerWide], also: Sequence[Capture]) -> bool:
    """Return whether a request edits and probes every token, and captures nothing."""
    own = () if plan is None else plan.selections
    captured = bool(also) or (plan is not None and bool(plan.captures))
    return not captured and all(positions == _ALL for positions in (*own, *_selections(before)))


def beams_problem(parts: Sequence[ServerWide | Capture]) -> str | None:
    """Return why a search for beams cannot have what applies to every request; None: it can. It
    makes a request for each token, whose prompt has the tokens before it.
    """
    if all(map(_is_of_every_token, parts)):
        return None
    return (
        "beam_search makes a separate request for each token, so server-wide edits and captures "
        "that select positions or phases would apply at other tokens, and server-wide probes would "
        "not stop it; clear them, or select all positions"
    )


def _is_of_every_token(part: ServerWide | Capture) -> bool:
    if isinstance(part, Probe) and not isinstance(part.act, Flag | None):
        return False
    return part.is_of_all if isinstance(part, Bias) else part.positions == _ALL


def _selections(parts: Sequence[ServerWide | Capture]) -> Iterator[Positions]:
    for part in parts:
        yield from part.selections if isinstance(part, (Capture, Probe)) else (part.positions,)
        if isinstance(part, Probe) and isinstance(part.act, Switch):
            yield from (edit.positions for edit in part.act.edits)
