"""Totals over the ended requests of an engine."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from midstream.results.receipt import Receipt
from midstream.sites import Tap


@dataclass(slots=True)
class RequestTotals:
    """Totals over requests with a plan, counted when they end."""

    completions: Counter[str] = field(default_factory=Counter)  # by the status of their receipts
    aborted: int = 0  # number of calls that ended without receipts
    rows: int = 0  # number of captured vectors
    row_bytes: int = 0  # their size in bytes, as encoded on the device
    dropped: int = 0  # number of captured vectors that the arena had no space for
    edits: int = 0  # number of edits that were applied
    cached_edits: int = 0  # number of edits that the prefix cache served
    scores: int = 0  # number of probe scores
    sink_failures: int = 0  # number of (completion, sink) pairs whose rows are not all kept
    _last: tuple[tuple[Any, ...], tuple[int, int]] | None = field(
        default=None, repr=False, compare=False
    )

    def add(
        self,
        receipts: Iterable[Receipt],
        sizes: Mapping[Tap, int],
        reduced: Container[Tap] = (),
    ) -> None:
        """Add an ended call. `sizes`: bytes of an encoded row; `reduced`: taps with one row."""
        for receipt in receipts:
            self.completions[receipt.status] += 1
            rows, nbytes = self._captured(receipt, sizes, reduced)
            self.rows += rows
            self.row_bytes += nbytes
            self.dropped += receipt.dropped
            for probed in receipt.probed:
                self.scores += probed.actual
            for _, kept in receipt.kept:
                self.sink_failures += kept.status != "ok"
            if receipt.edited is not None:
                self.edits += receipt.edited.applied
                self.cached_edits += receipt.edited.cached

    def _captured(
        self, receipt: Receipt, sizes: Mapping[Tap, int], reduced: Container[Tap]
    ) -> tuple[int, int]:
        """Return the number of captured vectors and their size, once for equal completions."""
        key: tuple[Any, ...] = receipt.captured, sizes, reduced
        if self._last is not None:
            before, totals = self._last
            if all(map(operator.is_, key, before)):
                return totals
        rows = nbytes = 0
        for count in receipt.captured:
            tap = count.site, count.layer
            mine = min(1, count.actual) if tap in reduced else count.actual
            rows += mine
            nbytes += mine * sizes[tap]
        self._last = key, (rows, nbytes)
        return rows, nbytes

    def to_dict(self) -> dict[str, Any]:
        names = [field.name for field in fields(self) if field.name != "_last"]
        totals = {name: getattr(self, name) for name in names}
        return {**totals, "completions": dict(self.completions)}
