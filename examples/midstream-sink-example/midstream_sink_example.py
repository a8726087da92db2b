"""A sink for midstream: the running mean of each site and layer, as JSON lines."""

from __future__ import annotations

import json
import os

import torch

from midstream.sinks import Delivery, Origin, Sink


class RunningMean(Sink):
    """Sink that appends a line for each completion, site and layer: the number of rows so far, and
    their mean.
    """

    group_seconds = 0.05  # requests that end within this time are flushed together

    def __init__(self, path: str, every: int = 1) -> None:
        """Read the sink's settings, which are the arguments.

        Args:
            path: path of the file.
            every: write only every n-th completion.

        Raises:
            ValueError: an invalid setting.
        """
        if not isinstance(path, str) or not path:
            raise ValueError(f"path: expected the path of a file, got {path!r}")
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every: expected at least 1, got {every!r}")
        self._path = os.path.abspath(path)
        self._every = every
        self._seen = 0
        self._lines: list[str] = []
        self._sums: dict[tuple[str, int], torch.Tensor] = {}
        self._rows: dict[tuple[str, int], int] = {}

    def open(self, origin: Origin) -> None:
        """Prepare the file. An exception raised here stops the start of the engine."""
        self._width = origin.hidden_size
        self.flush()

    def write(self, delivery: Delivery) -> None:
        """Add the rows of a completion. An exception raised here affects only this request."""
        self._seen += 1
        for tap, rows in delivery.activations.items():
            total = self._sums.setdefault(tap, torch.zeros(self._width, dtype=torch.float64))
            total += rows.double().sum(dim=0)
            count = self._rows[tap] = self._rows.get(tap, 0) + len(rows)
            if self._seen % self._every == 0 and count:
                line = {
                    "request": delivery.name,
                    "site": tap[0],
                    "layer": tap[1],
                    "rows": count,
                    "mean": (total / count).tolist(),
                }
                self._lines.append(json.dumps(line) + "\n")

    def flush(self) -> None:
        """Write the lines to disk. Results report rows as stored only after this has returned."""
        lines, self._lines = self._lines, []
        with open(self._path, "a", encoding="utf-8") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
