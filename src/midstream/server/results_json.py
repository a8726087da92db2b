"""JSON encoding of a choice's results: receipt, scores, captured rows, and sink results."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import torch

from midstream.config.http import HttpSettings
from midstream.errors import HttpError
from midstream.plan.selection import Layers
from midstream.plan.sink_target import MEMORY
from midstream.results.activations import Activations, rows_after
from midstream.results.probe_scores import Probes
from midstream.results.readouts import RESULTS, ReadOutResult
from midstream.results.receipt import CaptureResult
from midstream.results.serialization import PackedRows, pack
from midstream.server.base64_text import Base64Text, dump
from midstream.server.cached_rows.capture_cache import CachedCapture, CaptureCache
from midstream.server.http_request import ChoiceUpdate, RequestContext
from midstream.sites import ENDS, Tap

HELD_PATH = "/v1/midstream/activations"
_FORMAT = "safetensors"
# The call of a thread costs as much CPU time as the encoding of some 300 kB. Rows of more bytes
# than this are encoded in one, so that the event loop does not wait for them.
_LOOP_BYTES = 1 << 20
_NAMES = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


class ResultEncoder:
    """Encodes results of one engine as JSON values."""

    def __init__(
        self, settings: HttpSettings, captures: CaptureCache, hidden: int, dtype: torch.dtype
    ) -> None:
        self._settings = settings
        self._captures = captures
        self._vectors = (hidden, dtype)

    async def encode(
        self, context: RequestContext, choice: int, update: ChoiceUpdate
    ) -> dict[str, Any]:
        """Return a choice's new results for `dump` and `plain`; an empty dict if there are none."""
        encoded: dict[str, Any] = {}
        if update.final is not None:
            encoded["receipt"] = update.final.receipt.to_dict()
        if update.guards is not None:
            encoded["guards"] = update.guards
        probes = update.probes
        if probes is not None and (scores := _new_scores(context, choice, probes)):
            encoded["probes"] = scores
        if update.rows:
            encoded["rows"] = [await self._inline(new_rows) for new_rows in update.rows]
            sent = context.rows_sent.setdefault(choice, {})
            for rows in update.rows:
                taps = [tap for tap, count in rows.counts().items() if count]
                sent.update((tap, int(rows.positions_of(*tap)[-1])) for tap in taps)
        for name, kind in RESULTS.items():
            if name in update.readouts:
                parts = update.readouts[name]
                encoded[kind.rows_field] = [self._readout(name, part) for part in parts]
            whole = None if update.final is None else getattr(update.final, name)
            if whole is not None:
                encoded[name] = self._readout(name, whole)
        if update.final is not None:
            results = update.final.capture_results or {}
            if sinks := {sink: _stored(results[sink]) for sink in results if sink != MEMORY}:
                encoded["captures"] = sinks
            rows = update.final.activations
            if rows is not None and context.request_field.activations == "none":
                # Events before the last cannot have the last rows of a capture with `stream`.
                left = rows_after(rows, context.rows_sent.get(choice, {}), _streamed(context, rows))
                if any(left.counts().values()):
                    encoded["rows"] = [*encoded.get("rows", ()), await self._inline(left)]
            elif rows is not None:
                encoded["activations"] = await self._whole(context, update.request_id, rows)
        return encoded

    def _readout(self, name: str, result: ReadOutResult) -> Any:
        self._check_inline(name, result.nbytes, result.fewer)
        return result.to_json()

    def _check_inline(self, what: str, size: int, fewer: str) -> None:
        """Raise an HttpError, 413, if results are larger than a response may be."""
        limit = self._settings.inline_bytes
        if size > limit:
            raise HttpError(
                413,
                f"midstream.{what}: {size} bytes exceed the limit of {limit} bytes per response "
                f"(http.inline_bytes); ask for {fewer}",
                "midstream.capture",
            )

    async def _whole(
        self, context: RequestContext, request_id: str, rows: Activations
    ) -> dict[str, Any]:
        if context.request_field.activations == "inline":
            return await self._inline(rows)
        about = context.client, request_id, describe(rows), context.reservation
        if rows.held.owns_memory:
            # Nothing is copied before a client fetches the rows.
            cached = self._captures.store(PackedRows(rows, *self._vectors), *about)
        else:
            # Rows in a worker's memory are copied now, so that they do not keep it in use.
            store = self._captures.store
            copy = asyncio.to_thread(lambda: store(pack(rows, *self._vectors), *about))
            work = asyncio.ensure_future(copy)
            try:
                cached = await asyncio.shield(work)
            except asyncio.CancelledError:
                # The thread continues; its rows have no client any more: free them when it ends.
                work.add_done_callback(self._discard)
                raise
        self._captures.hold(cached, rows.source)
        context.undelivered.append(cached.id)
        return handle_of(cached)

    def _discard(self, work: asyncio.Future[CachedCapture]) -> None:
        if not work.cancelled() and work.exception() is None:
            self._captures.delete(work.result().id)

    async def _inline(self, rows: Activations) -> dict[str, Any]:
        # Check the size before any row is copied.
        codec, size = rows.codec, 0
        for group in rows.held.groups():
            row = codec.row_bytes(group.nothing.hidden, group.nothing.dtype) + 16
            size += row * len(group) * len(group.taps)
        if size > self._settings.inline_bytes:
            raise HttpError(
                413,
                f"midstream.activations: {size} bytes exceed the limit of "
                f"{self._settings.inline_bytes} bytes per response (http.inline_bytes); use "
                '"handle" and fetch them, or capture less',
                "midstream.activations",
            )
        if size > _LOOP_BYTES:
            text = await asyncio.to_thread(self._encoded, rows)
        else:
            text = self._encoded(rows)
        return {**describe(rows), "base64": text}

    def _encoded(self, rows: Activations) -> Base64Text:
        return Base64Text(PackedRows(rows, *self._vectors).parts())


def _stored(result: CaptureResult) -> dict[str, Any]:
    return {"status": result.status, "reason": result.reason, "paths": list(result.paths)}


def plain(results: Any) -> Any:
    """Return results of `ResultEncoder.encode`, or a list of these, as plain JSON values."""
    return json.loads(b"".join(dump(results)))


def handle_of(cached: CachedCapture) -> dict[str, Any]:
    """Return the JSON handle of cached rows: where to fetch them, their size and expiry."""
    return {
        **cached.about,
        "id": cached.id,
        "url": f"{HELD_PATH}/{cached.id}",
        "bytes": cached.nbytes,
        "expires_at": cached.expires_at,
    }


def _streamed(context: RequestContext, rows: Activations) -> list[Tap]:
    """Return the taps whose rows a stream has as they are computed."""
    plan = context.request_field.plan
    return [
        (site, layer)
        for site, layer in rows
        for capture in (() if plan is None else plan.captures)
        if capture.stream and capture.returns_vectors
        if site in capture.sites.names and (site in ENDS or _has_layer(capture.layers, layer))
    ]


def _has_layer(layers: Layers, layer: int) -> bool:
    indices = layers.indices
    # A negative index may be any layer; its rows are then sent rather than left out.
    return indices == "all" or any(index < 0 or index == layer for index in indices)


def describe(rows: Activations) -> dict[str, Any]:
    """Return format, codec and number of rows by tap as JSON values."""
    return {
        "format": _FORMAT,
        "codec": rows.codec.spec,
        "rows": {f"{site}.{layer}": count for (site, layer), count in rows.counts().items()},
    }


def _new_scores(context: RequestContext, choice: int, probes: Probes) -> dict[str, Any]:
    new_scores: dict[str, dict[str, Any]] = {}
    for name in probes:
        sent = context.scores_sent.get((choice, name), 0)
        scores, positions, tokens = probes.rows_from(name, sent)
        context.scores_sent[choice, name] = sent + len(scores)
        if scores or not sent:
            new_scores[name] = {
                "scores": _named(scores),
                "positions": positions,
                "token_ids": tokens,
            }
            outputs = probes.outputs_of(name)
            if outputs and not sent:
                new_scores[name]["outputs"] = outputs
    return new_scores


def _named(scores: list[Any]) -> list[Any]:
    """Return float32 scores with JavaScript's names for NaN and infinities, which JSON lacks."""
    if scores and isinstance(scores[0], list):
        return [_named(outputs) for outputs in scores]
    if math.isfinite(sum(scores)):  # in float64, where a sum of float32 does not overflow
        return scores
    return [score if math.isfinite(score) else _NAMES[str(score)] for score in scores]
