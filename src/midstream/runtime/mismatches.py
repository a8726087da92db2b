"""What is done about receipts that show that not all was done as asked."""

from __future__ import annotations

import warnings
from collections.abc import Container, Sequence
from typing import Any

from midstream.config import Config
from midstream.errors import ReceiptError, ReceiptWarning
from midstream.receipt import Receipt


class Mismatches:
    """The receipts with problems, until their caller is told."""

    def __init__(self, config: Config) -> None:
        self._warns = config.on_mismatch == "warn"
        self._receipts: list[Receipt] = []

    def add(self, output: Any) -> None:
        """Takes note of an output whose completions have their receipts."""
        self._receipts += [one.receipt for one in output.outputs if one.receipt.problems]

    def forget(self, request_ids: Container[str]) -> None:
        """Nobody waits for these requests any more."""
        self._receipts = [one for one in self._receipts if one.request_id not in request_ids]

    def report(self, outputs: Sequence[Any] = ()) -> None:
        """Tells the caller, once.

        Args:
            outputs: what the call has to give.

        Raises:
            ReceiptError: there were problems, and the settings do not say that they are only to be
                warned of.
        """
        receipts, self._receipts = self._receipts, []
        if not receipts:
            return
        complaints = [receipt.complaint for receipt in receipts]
        if not self._warns:
            raise ReceiptError("\n".join(complaints), outputs)
        for complaint in complaints:
            warnings.warn(complaint, ReceiptWarning, stacklevel=2)
