"""Destinations of the captured rows of a request."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from midstream.plan import Capture, Plan, ResolvedPlan
from midstream.plan.readouts import ReadOut
from midstream.plan.sink_target import MEMORY, Metadata
from midstream.sinks.delivery import Label

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]+")
_KEPT_OF_ID = 96


@dataclass(frozen=True, slots=True)
class SinkRoute:
    """The destination of the rows of some captures of a request."""

    sink: str
    tag: str
    name: str  # of the rows in the sink; empty: they are on the output
    metadata: Metadata  # one of the captures may give it for all
    captures: tuple[int, ...]  # indices in the resolved plan
    is_all: bool  # these are all captures of the plan
    layout: str = ""  # of the files; empty: that of the sink

    @property
    def label(self) -> Label:
        return Label(self.name, self.tag, self.metadata, self.layout)


def routes_of(
    resolved: ResolvedPlan,
    own: Plan | None,
    every: Sequence[Capture],
    request_id: str,
    uid: str,
) -> tuple[SinkRoute, ...]:
    """Return the routes of a request's rows: one for each destination."""
    by_place: dict[tuple[str, str, str], list[int]] = {}
    metadata: dict[tuple[str, str, str], Metadata] = {}
    layouts: dict[tuple[str, str, str], str] = {}
    for index, capture in enumerate(resolved.captures):
        written: ReadOut
        if capture.source < 0:
            written = every[capture.source]
        else:
            assert own is not None
            written = own.captures[capture.source]
        # Rows on an output have neither tags nor names.
        place = (MEMORY, "", "") if written.sink == MEMORY else written.place
        by_place.setdefault(place, []).append(index)
        metadata[place] = metadata.get(place) or written.metadata
        layouts[place] = layouts.get(place) or written.layout
    unnamed: dict[str, int] = {}
    routes = []
    for (sink, tag, given_name), captures in by_place.items():
        name = given_name
        if not name and sink != MEMORY:
            name = unique_name(request_id, uid, unnamed.get(sink, 0))
            unnamed[sink] = unnamed.get(sink, 0) + 1
        is_all = len(captures) == len(resolved.captures)
        described, layout = metadata[sink, tag, given_name], layouts[sink, tag, given_name]
        routes.append(SinkRoute(sink, tag, name, described, tuple(captures), is_all, layout))
    return tuple(routes)


def unique_name(request_id: str, uid: str, number: int) -> str:
    """Return a name that no other request has, and that is a valid file name, as ids need not be;
    `number`: index of the route among those to one sink without a given name.
    """
    plain = _NOT_IN_NAMES.sub("_", request_id)[:_KEPT_OF_ID].lstrip(".-") or "request"
    return f"{plain}-{uid[:12]}" + (f"-{number}" if number else "")
