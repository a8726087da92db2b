"""Where each request's captured rows go, once they are here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from midstream.spec import Capture, Plan, ResolvedPlan
from midstream.spec.sink_target import MEMORY, Metadata

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]+")
_KEPT_OF_ID = 96


@dataclass(frozen=True, slots=True)
class Route:
    """Where the rows of some of a request's captures go.

    Attributes:
        sink, tag: of these captures.
        name: under which the sink keeps them.
        metadata: of these captures; one of them may bring it for all.
        captures: which of the resolved plan's.
        is_all: whether these are all of them.
    """

    sink: str
    tag: str
    name: str
    metadata: Metadata
    captures: tuple[int, ...]
    is_all: bool


def routes_of(
    resolved: ResolvedPlan,
    own: Plan | None,
    every: Sequence[Capture],
    request_id: str,
    uid: str,
) -> tuple[Route, ...]:
    """The routes of a request's rows, those that go to one place together.

    Args:
        resolved: the request's plan.
        own: what it was resolved from; None: it asks for nothing itself.
        every: the captures of every request.
        request_id: vLLM's.
        uid: midstream's own, which no other request has.
    """
    found: dict[tuple[str, str, str], list[int]] = {}
    metadata: dict[tuple[str, str, str], Metadata] = {}
    for nth, capture in enumerate(resolved.captures):
        if capture.source < 0:
            written = every[capture.source]
        else:
            assert own is not None
            written = own.captures[capture.source]
        # On an output there are neither tags nor names.
        place = (MEMORY, "", "") if written.sink == MEMORY else written.place
        found.setdefault(place, []).append(nth)
        metadata[place] = metadata.get(place) or written.metadata
    unnamed: dict[str, int] = {}
    routes = []
    for (sink, tag, given), captures in found.items():
        name = given
        if not name:
            name = made_name(request_id, uid, unnamed.get(sink, 0))
            unnamed[sink] = unnamed.get(sink, 0) + 1
        is_all = len(captures) == len(resolved.captures)
        described = metadata[sink, tag, given]
        routes.append(Route(sink, tag, name, described, tuple(captures), is_all))
    return tuple(routes)


def made_name(request_id: str, uid: str, nth: int) -> str:
    """A name that no other request has: another process may number its requests alike, and an id
    may be one that no file can be called.
    """
    plain = _NOT_IN_NAMES.sub("_", request_id)[:_KEPT_OF_ID].lstrip(".-") or "request"
    return f"{plain}-{uid[:12]}" + (f"-{nth}" if nth else "")
