"""The field `midstream` of a request body: captures, edits, probes, and how to return rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from midstream.api.arguments import CallArguments
from midstream.config.config import KEY
from midstream.errors import SpecError
from midstream.spec import Plan
from midstream.validation import at, kind, read_fields, read_json

Return = Literal["handle", "inline", "none"]
RETURNS: tuple[Return, ...] = ("handle", "inline", "none")


@dataclass(frozen=True, slots=True)
class MidstreamField:
    """The parsed field `midstream` of one request.

    Attributes:
        plan: captures, edits and probes; None if the request has none of its own.
        activations: how captured rows without a sink are returned. "handle": cached on the server,
            and the response says where to fetch them; "inline": in the response; "none": not at
            all.
        arguments: the arguments of the plan as the client wrote them.
    """

    plan: Plan | None
    activations: Return
    arguments: CallArguments = CallArguments()

    def explain(self, error: SpecError) -> SpecError:
        """Return an error of the plan with the path of the invalid field in the body."""
        return self.arguments.explain(error).under(KEY)


def read_field(value: object) -> MidstreamField:
    """Parse `{"capture": …, "edits": …, "steer": …, "probes": …, "activations": …}`.

    Raises:
        SpecError: an unknown or malformed field; the path starts with `midstream`.
    """
    with at(KEY):
        given = read_fields(
            value,
            required=(),
            optional=("capture", "edits", "steer", "probes", "activations"),
        )
        returned = given.pop("activations", "handle")
        if returned not in RETURNS:
            raise SpecError(
                "activations", f"expected one of {', '.join(RETURNS)}, got {returned!r}"
            )
        for name, part in given.items():
            if part is None:
                raise SpecError(name, "expected a dict or a list, got null; omit it instead")
        arguments = CallArguments(**given)
        try:
            return MidstreamField(arguments.alone().plan(), returned, arguments)
        except SpecError as error:
            raise arguments.explain(error) from None


def take_field(body: dict[str, Any]) -> MidstreamField | None:
    """Remove the field from a body and parse it; None if it is absent.

    Clients that cannot add fields may send it as JSON text in `vllm_xargs` instead.

    Raises:
        SpecError: as for `read_field`; or the field is in both places.
    """
    xargs = body.get("vllm_xargs")
    inner = xargs.get(KEY) if isinstance(xargs, Mapping) else None
    if inner is None:
        return read_field(body.pop(KEY)) if KEY in body else None
    if KEY in body:
        raise SpecError(f"vllm_xargs.{KEY}", f"the body has a field {KEY} too; use only one")
    assert isinstance(xargs, Mapping)
    if not isinstance(inner, str):
        raise SpecError(f"vllm_xargs.{KEY}", f"expected JSON as text, got {kind(inner)}")
    with at(f"vllm_xargs.{KEY}"):
        value = read_json(inner)
    body["vllm_xargs"] = {name: each for name, each in xargs.items() if name != KEY}
    return read_field(value)
