"""Sink `log`: one log line per completion."""

from __future__ import annotations

import logging

from midstream.results.receipt import CaptureResult
from midstream.sinks.base import Delivery, Sink

NAME = "midstream.captures"
LEVELS = ("debug", "info", "warning", "error")


class LogSink(Sink):
    """Logs each completion's request, and the number and mean norm of its rows per tap."""

    keeps = ("attention", "norms")

    def __init__(self, level: str = "info") -> None:
        if not isinstance(level, str) or level not in LEVELS:
            raise ValueError(f"level: expected one of {', '.join(LEVELS)}, got {level!r}")
        self._level: int = getattr(logging, level.upper())
        self._logger = logging.getLogger(NAME)

    def write(self, delivery: Delivery) -> CaptureResult | None:
        if self._logger.isEnabledFor(self._level):
            self._logger.log(self._level, "%s", line(delivery))
        return None


def line(delivery: Delivery) -> str:
    who = f"request {delivery.request_id}"
    if delivery.completions > 1:
        who += f", completion {delivery.completion}"
    if delivery.tag:
        who += f", tag {delivery.tag}"
    taps = []
    for (site, layer), rows in delivery.activations.items():
        norms = rows.float().norm(dim=1)
        mean = f", mean norm {float(norms.mean()):.4g}" if len(norms) else ""
        taps.append(f"{site} {layer}: {len(rows)} rows{mean}")
    for result in delivery.readouts.values():
        for (site, layer), _, arrays in result.stored():
            taps.append(f"{site} {layer}: {len(arrays['positions'])} rows")
    counts = (
        f"{delivery.prompt_tokens} prompt and {len(delivery.generated_token_ids)} generated tokens"
    )
    return f"{who}, {delivery.receipt.status}, {counts}; {'; '.join(taps) or 'no rows'}"
