"""The field `midstream` of a request's body: what to capture, edit and probe, and how to answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from midstream.arguments import Asked
from midstream.config import KEY
from midstream.errors import SpecError
from midstream.spec import Plan
from midstream.spec.fields import at, kind, read_fields, read_json

Return = Literal["handle", "inline", "none"]
RETURNS: tuple[Return, ...] = ("handle", "inline", "none")


@dataclass(frozen=True, slots=True)
class Wishes:
    """What one request asks for.

    Attributes:
        plan: what to capture, edit and probe; None: nothing of its own.
        activations: how captured rows come that go to no sink. "handle": they are held, and the
            answer says where to fetch them; "inline": they are in the answer; "none": not at all.
        asked: what the plan was made of, as it was written.
    """

    plan: Plan | None
    activations: Return
    asked: Asked = Asked()

    def explain(self, error: SpecError) -> SpecError:
        """An error of the plan, at the field of the body that is wrong."""
        return self.asked.explain(error).under(KEY)


def read_wishes(value: object) -> Wishes:
    """The wishes of `{"capture": …, "edits": …, "steer": …, "probes": …, "activations": …}`.

    Raises:
        SpecError: anything unknown or malformed; the path starts with `midstream`.
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
                raise SpecError(name, "expected a dict or a list, got null; leave it out")
        asked = Asked(**given)
        try:
            return Wishes(asked.alone().plan(), returned, asked)
        except SpecError as error:
            raise asked.explain(error) from None


def take_wishes(body: dict[str, Any]) -> Wishes | None:
    """Takes the field out of a body; None: there is none. It may be text in `vllm_xargs` instead,
    from clients that cannot add fields.

    Raises:
        SpecError: as `read_wishes`; or it is in both places.
    """
    xargs = body.get("vllm_xargs")
    inner = xargs.get(KEY) if isinstance(xargs, Mapping) else None
    if inner is None:
        return read_wishes(body.pop(KEY)) if KEY in body else None
    if KEY in body:
        raise SpecError(f"vllm_xargs.{KEY}", "it is there besides the body's own; give one")
    assert isinstance(xargs, Mapping)
    if not isinstance(inner, str):
        raise SpecError(f"vllm_xargs.{KEY}", f"expected JSON as text, got {kind(inner)}")
    with at(f"vllm_xargs.{KEY}"):
        value = read_json(inner)
    body["vllm_xargs"] = {name: each for name, each in xargs.items() if name != KEY}
    return read_wishes(value)
