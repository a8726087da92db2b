"""Totals over the ended requests of an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from midstream.results.receipt import Receipt
from midstream.sites import Tap


@dataclass(slots=True)
class RequestTotals:
    """Totals over requests with a plan, counted when they end.

    Attributes:
        completions: number of completions, by the status of their receipts.
        aborted: number of calls that ended without receipts.
        rows: number of captured vectors.
        row_bytes: their size in bytes, as encoded on the device.
        dropped: number of captured vectors that the arena had no space for.
        edits: number of edits that were applied.
        cached_edits: number of edits that the prefix cache served.
        scores: number of probe scores.
        sink_failures: number of (completion, sink) pairs whose rows are not all kept.
    """

    completions: Counter[str] = field(default_factory=Counter)
    aborted: int = 0
    rows: int = 0
    row_bytes: int = 0
    dropped: int = 0
    edits: int = 0
    cached_edits: int = 0
    scores: int = 0
    sink_failures: int = 0

    def add(
        self,
        receipts: Iterable[Receipt],
        sizes: Mapping[Tap, int],
        reduced: Container[Tap] = (),
    ) -> None:
        """Add a call that has ended.

        Args:
            receipts: receipts of its completions.
            sizes: bytes of an encoded row of each captured tap.
            reduced: taps whose rows are reduced to one.
        """
        for receipt in receipts:
            self.completions[receipt.status] += 1
            for one in receipt.captured:
                tap = one.site, one.layer
                rows = min(1, one.actual) if tap in reduced else one.actual
                self.rows += rows
                self.row_bytes += rows * sizes[tap]
            self.dropped += receipt.dropped
            self.scores += sum(one.actual for one in receipt.probed)
            self.sink_failures += sum(kept.status != "ok" for _, kept in receipt.kept)
            if receipt.edited is not None:
                self.edits += receipt.edited.applied
                self.cached_edits += receipt.edited.cached

    def to_dict(self) -> dict[str, Any]:
        """Return the totals as JSON values."""
        return {**asdict(self), "completions": dict(self.completions)}
