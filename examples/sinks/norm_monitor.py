"""A sink that reports norms of rows while requests run, as JSON lines, to watch with `tail -f`.

midstream serve MODEL --sinks 'norms:class=norm_monitor:NormMonitor,path=norms.jsonl'
"""

from __future__ import annotations

import json

from midstream.sinks import Delivery, Sink


class NormMonitor(Sink):
    """Appends a line for each piece of a completion: mean and largest norm by site and layer."""

    wants = "rows"  # pieces of running requests
    piece_seconds = 0.2

    def __init__(self, path: str, limit: float = 0.0) -> None:
        """Args:
        path: path of the file.
        limit: report only pieces with a norm above it.
        """
        self._path = path
        self._limit = limit
        self._lines: list[str] = []

    def write(self, delivery: Delivery) -> None:
        norms = {
            f"{site}.{layer}": rows.float().norm(dim=1)
            for (site, layer), rows in delivery.activations.items()
            if len(rows)
        }
        if not norms or max(float(one.max()) for one in norms.values()) <= self._limit:
            return
        line = {
            "request": delivery.request_id,
            "piece": delivery.piece,
            "tokens": len(delivery.generated_token_ids),
            "mean": {tap: round(float(one.mean()), 4) for tap, one in norms.items()},
            "max": {tap: round(float(one.max()), 4) for tap, one in norms.items()},
        }
        self._lines.append(json.dumps(line) + "\n")

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        with open(self._path, "a", encoding="utf-8") as file:
            file.writelines(lines)
