"""What an answer says of a choice: receipt, scores, rows, and what became of those at sinks."""

from __future__ import annotations

import asyncio
import base64
import math
from typing import Any

import torch

from midstream.activations import Activations
from midstream.packed import pack
from midstream.scores import Probes
from midstream.serving.exchange import Exchange, News
from midstream.serving.held import Held, Holding
from midstream.serving.refusals import Refusal
from midstream.serving.settings import HttpSettings
from midstream.spec.destination import MEMORY

HELD_PATH = "/v1/midstream/activations"
_FORMAT = "safetensors"
_NAMES = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


class Answers:
    """Makes them, for one engine."""

    def __init__(
        self, settings: HttpSettings, holding: Holding, hidden: int, dtype: torch.dtype
    ) -> None:
        """Args:
        settings: the server's limits.
        holding: has rows that are fetched.
        hidden, dtype: of the vectors that are captured.
        """
        self._settings = settings
        self._holding = holding
        self._vectors = (hidden, dtype)

    async def tell(self, exchange: Exchange, choice: int, news: News) -> dict[str, Any]:
        """What is new of a choice, as JSON values; empty: nothing.

        Raises:
            Refusal: 413, its rows are more than an answer may have; or there is no room to hold
                them.
        """
        told: dict[str, Any] = {}
        if news.final is not None:
            told["receipt"] = news.final.receipt.to_dict()
        if news.probes is not None:
            scores = _new_scores(exchange, choice, news.probes)
            if scores:
                told["probes"] = scores
        if news.rows:
            told["rows"] = [await self._inline(each) for each in news.rows]
        if news.final is not None:
            kept = {
                sink: {"status": one.status, "reason": one.reason, "paths": list(one.paths)}
                for sink, one in (news.final.capture_results or {}).items()
                if sink != MEMORY
            }
            if kept:
                told["captures"] = kept
            rows = news.final.activations
            if rows is not None and exchange.wishes.activations != "none":
                told["activations"] = await self._whole(exchange, news.request_id, rows)
        return told

    async def _whole(
        self, exchange: Exchange, request_id: str, rows: Activations
    ) -> dict[str, Any]:
        if exchange.wishes.activations == "inline":
            return await self._inline(rows)
        work = asyncio.ensure_future(
            asyncio.to_thread(self._hold, exchange.client, request_id, rows)
        )
        try:
            held = await asyncio.shield(work)
        except asyncio.CancelledError:
            # The thread goes on; nobody will be told of what it holds.
            work.add_done_callback(self._let_go)
            raise
        exchange.untold.append(held.id)
        return handle_of(held)

    def _hold(self, client: str, request_id: str, rows: Activations) -> Held:
        packed = pack(rows, *self._vectors)
        return self._holding.hold(packed, client, request_id, _about(rows))

    def _let_go(self, work: asyncio.Future[Held]) -> None:
        if not work.cancelled() and work.exception() is None:
            self._holding.delete(work.result().id)

    async def _inline(self, rows: Activations) -> dict[str, Any]:
        # What it comes to is known before anything is copied.
        width = rows.codec.row_bytes(*self._vectors)
        size = (width + 16) * sum(rows.counts().values())
        if size > self._settings.inline_bytes:
            raise Refusal(
                413,
                f"midstream.activations: {size} bytes are more than the "
                f'{self._settings.inline_bytes} that an answer may have; ask for "handle" and '
                "fetch them, or capture less",
                "midstream.activations",
            )
        return {**_about(rows), "base64": await asyncio.to_thread(self._encoded, rows)}

    def _encoded(self, rows: Activations) -> str:
        return base64.b64encode(pack(rows, *self._vectors)).decode("ascii")


def handle_of(held: Held) -> dict[str, Any]:
    """Where to fetch rows that are held."""
    return {
        **held.about,
        "id": held.id,
        "url": f"{HELD_PATH}/{held.id}",
        "bytes": held.nbytes,
        "expires_at": held.expires_at,
    }


def _about(rows: Activations) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "codec": rows.codec.spec,
        "rows": {f"{site}.{layer}": count for (site, layer), count in rows.counts().items()},
    }


def _new_scores(exchange: Exchange, choice: int, probes: Probes) -> dict[str, Any]:
    found = {}
    for name in probes:
        told = exchange.told.get((choice, name), 0)
        scores = probes[name][told:].tolist()
        exchange.told[choice, name] = told + len(scores)
        if scores or not told:
            found[name] = {
                # JSON has no other numbers; their names are those of JavaScript.
                "scores": [each if math.isfinite(each) else _NAMES[str(each)] for each in scores],
                "positions": probes.positions_of(name)[told:].tolist(),
                "token_ids": probes.token_ids_of(name)[told:].tolist(),
            }
    return found
