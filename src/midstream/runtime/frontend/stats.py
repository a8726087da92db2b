"""What the requests of an engine came to, counted since it started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from midstream.results.receipt import Receipt


@dataclass(slots=True)
class RequestTotals:
    """Only requests that asked for something are counted, when they end.

    Attributes:
        completions: by the status of their receipts.
        aborted: calls that ended without receipts.
        rows: captured vectors.
        row_bytes: what they took as they left the device.
        dropped: captured vectors that found no room.
        edits: edits that were carried out.
        cached_edits: edits that the prefix cache had.
        scores: of probes.
        sink_failures: (completion, sink) pairs whose rows are not all kept.
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

    def add(self, receipts: Iterable[Receipt], width: int) -> None:
        """Counts a call that has ended.

        Args:
            receipts: of its completions.
            width: bytes of one row, as it left the device.
        """
        for receipt in receipts:
            rows = sum(one.actual for one in receipt.captured)
            self.completions[receipt.status] += 1
            self.rows += rows
            self.row_bytes += rows * width
            self.dropped += receipt.dropped
            self.scores += sum(one.actual for one in receipt.probed)
            self.sink_failures += sum(kept.status != "ok" for _, kept in receipt.kept)
            if receipt.edited is not None:
                self.edits += receipt.edited.applied
                self.cached_edits += receipt.edited.cached

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "completions": dict(self.completions)}
