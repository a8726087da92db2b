"""Questions about captured rows to a server, as requests for an answer of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from midstream.client.outputs import ServedOutput
from midstream.client.protocol import CHAT, Exchange, call, complete
from midstream.errors import SpecError
from midstream.lab.api.ask import MOST_TOKENS, AskRequest, check_placed
from midstream.plan.captured_rows import CapturedRows, no_rows
from midstream.plan.positions.items import Text
from midstream.plan.vectors.vector import Vector
from midstream.validation import show

CAPTURES = "/v1/midstream/captures"
# Fields of `ask` that are no fields of the request's body.
_FIELDS = ("site", "positions", "into", "mode", "norm", "template", "placeholder")


def questions(
    sources: Any, question: Any, layer: Any, options: Mapping[str, Any]
) -> list[Exchange[ServedOutput]]:
    """Return the exchange of each question; see `Client.ask`."""
    fields = {name: options[name] for name in _FIELDS if name in options}
    body = {name: value for name, value in options.items() if name not in _FIELDS}
    for name in ("edits", "steer", "messages"):
        if name in body:
            raise SpecError(name, "ask() makes its own; omit it")
    request = AskRequest(sources, question, layer, **fields)
    return [_answer(request, rows, text, body) for rows, text in request.pairs()]


def _answer(
    request: AskRequest,
    rows: tuple[Vector, ...] | CapturedRows,
    question: str,
    body: Mapping[str, Any],
) -> Exchange[ServedOutput]:
    if not isinstance(rows, CapturedRows):
        count = len(rows)
    else:
        count = len(rows.positions) or (yield from _count(rows))
    where = Text(request.placeholders(count))
    messages = [{"role": "user", "content": request.content(count, question)}]
    lengths = {"max_tokens", "max_completion_tokens"} & body.keys()
    defaults: dict[str, Any] = {"temperature": 0} | ({} if lengths else {"max_tokens": MOST_TOKENS})
    asked = {**defaults, **body, "edits": request.edit(rows, where)}
    output: ServedOutput = check_placed(
        (yield from complete(CHAT, asked, messages=messages)), count
    )
    return output


def _count(rows: CapturedRows) -> Exchange[int]:
    """Return how many rows a server keeps of a layer."""
    listing = yield from call("GET", CAPTURES)
    kept = {capture["id"]: capture["rows"] for capture in listing["captures"]}
    if rows.id not in kept:
        raise SpecError(
            "sources",
            f"there are no rows {show(rows.id)} of this client: they were deleted, or have expired",
        )
    known = kept[rows.id]
    count = known.get(f"{rows.site}.{rows.layer}", 0)
    if not count:
        names = [name.rpartition(".") for name in known]
        raise no_rows((rows.site or "", rows.layer or 0), [(site, int(n)) for site, _, n in names])
    return int(count)
