"""The field `midstream` of a request body: captures, edits, probes, and how to return rows."""

from __future__ import annotations

import functools
from collections.abc import Container
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from midstream.api.arguments import CallArguments
from midstream.compat.translation import translate, without_translated
from midstream.config.config import KEY
from midstream.errors import SpecError
from midstream.plan import Capture, Plan
from midstream.plan.resolved import ON_DEVICE
from midstream.validation import at, kind, read_fields, read_json_text, show

Return = Literal["handle", "inline", "none"]
RETURNS: tuple[Return, ...] = ("handle", "inline", "none")
# Many requests have the same field: it is parsed once. Longer ones, which have vectors, are not
# kept.
_CACHED_FIELDS, _CACHED_LENGTH = 256, 1 << 16


@dataclass(frozen=True, slots=True)
class MidstreamField:
    """The parsed field `midstream` of one request."""

    plan: Plan | None  # None: the request has none of its own
    activations: Return  # how captured rows without a sink are returned
    arguments: CallArguments = CallArguments()  # as the client wrote them
    guards: bool = False  # whether the response has the flags of the server's guards

    @property
    def name(self) -> str:
        """The field of the body that the plan comes from."""
        translated = () if self.plan is None else self.plan.coming_from
        return translated[0][0] if translated else KEY

    def explain(self, error: SpecError) -> SpecError:
        """Return an error of the plan with the path of the invalid field in the body."""
        if self.name != KEY:
            where = f" (`{error.path}` of the plan made of it)" if error.path else ""
            return type(error)(self.name, error.problem + where)
        return self.arguments.explain(error).under(KEY)


def read_field(value: object) -> MidstreamField:
    """Parse the field's object: captures, edits, probes, controller and `activations`."""
    with at(KEY):
        optional = ("capture", "edits", "steer", "probes", "controller", "activations", "guards")
        fields = read_fields(value, required=(), optional=optional)
        guards = fields.pop("guards", False)
        if not isinstance(guards, bool):
            raise SpecError("guards", f"expected true or false, got {kind(guards)}")
        returned = fields.pop("activations", "handle")
        if returned not in RETURNS:
            got = show(returned) if isinstance(returned, str) else kind(returned)
            raise SpecError("activations", f"expected one of {', '.join(RETURNS)}, got {got}")
        for name, part in fields.items():
            if part is None:
                raise SpecError(name, "expected a dict or a list, got null; omit it instead")
        arguments = CallArguments(**fields)
        try:
            plan = arguments.alone().plan()
        except SpecError as error:
            raise arguments.explain(error) from None
        for capture in () if plan is None or returned == "handle" else plan.captures:
            if isinstance(capture, Capture) and capture.reduce == ON_DEVICE:
                problem = f'expected "handle", as rows stay on the device, got "{returned}"'
                raise SpecError("activations", problem)
        return MidstreamField(plan, returned, arguments, guards)


def take_field(body: dict[str, Any], known: Container[str] = ()) -> MidstreamField | None:
    """Take the field, or its text in `vllm_xargs`, and other tools' out of a body; None: absent."""
    own_field = _take_own(body)
    plan = _take_translated(body, known)
    if plan is None:
        return own_field
    if own_field is not None and own_field.plan is not None:
        name, _ = plan.coming_from[0]
        raise SpecError(name, f"the field `{KEY}` has a plan too; give one of them")
    if own_field is None:
        return MidstreamField(plan, "handle")
    return MidstreamField(plan, own_field.activations, guards=own_field.guards)


def _read_again(value: object) -> MidstreamField:
    """Return the field of a value, which is read once for all equal values."""
    try:
        # Several times as fast as JSON, whose strings may have escapes.
        packed = msgspec.msgpack.encode(value)
    except (OverflowError, RecursionError, UnicodeEncodeError):
        return read_field(value)
    return _read_packed(packed) if len(packed) <= _CACHED_LENGTH else read_field(value)


@functools.lru_cache(maxsize=_CACHED_FIELDS)
def _read_packed(packed: bytes) -> MidstreamField:
    return read_field(msgspec.msgpack.decode(packed))


def _take_own(body: dict[str, Any]) -> MidstreamField | None:
    xargs = body.get("vllm_xargs")
    inner = xargs.get(KEY) if isinstance(xargs, dict) else None
    if inner is None:
        return _read_again(body.pop(KEY)) if KEY in body else None
    if KEY in body:
        raise SpecError(f"vllm_xargs.{KEY}", f"the body has a field {KEY} too; use only one")
    assert isinstance(xargs, dict)
    if not isinstance(inner, str):
        raise SpecError(f"vllm_xargs.{KEY}", f"expected JSON as text, got {kind(inner)}")
    with at(f"vllm_xargs.{KEY}"):
        value = read_json_text(inner)
    body["vllm_xargs"] = {name: argument for name, argument in xargs.items() if name != KEY}
    return read_field(value)


def _take_translated(body: dict[str, Any], known: Container[str]) -> Plan | None:
    plan = translate(body, known)
    xargs = body.get("vllm_xargs")
    inner = None
    if isinstance(xargs, dict):
        with at("vllm_xargs"):
            inner = translate(xargs)
    if plan is not None and inner is not None:
        name, _ = inner.coming_from[0]
        raise SpecError(
            f"vllm_xargs.{name}", "there are such fields in the body too; use one place"
        )
    if plan is not None:
        for name, _ in plan.coming_from:
            del body[name]
    if inner is not None:
        assert isinstance(xargs, dict)
        body["vllm_xargs"] = without_translated(xargs)
    return inner if plan is None else plan
