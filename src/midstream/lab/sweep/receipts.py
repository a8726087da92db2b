"""The receipts of a sweep's runs, and their sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from midstream.errors import SpecError
from midstream.results.receipt import Receipt
from midstream.validation import at, kind, read_fields, read_int, read_word


@dataclass(frozen=True)
class ReceiptSums:
    """Sums over the receipts of a sweep's runs; `applied + cached == expected`."""

    runs: int = 0  # that had a plan
    status: str = "ok"  # the worst status: `ok`, `partial` or `error`
    expected: int = 0  # edits that were asked for, once for each token
    applied: int = 0  # edits that the device counted
    cached: int = 0  # of tokens in the prefix cache, of an earlier run of the cell
    problems: tuple[str, ...] = ()

    @staticmethod
    def of(receipts: Sequence[Receipt]) -> ReceiptSums:
        statuses = {receipt.status for receipt in receipts}
        status = next((word for word in ("error", "partial") if word in statuses), "ok")
        edited = [receipt.edited for receipt in receipts if receipt.edited is not None]
        return ReceiptSums(
            len(receipts),
            status,
            sum(receipt.expected for receipt in edited),
            sum(receipt.applied for receipt in edited),
            sum(receipt.cached for receipt in edited),
            tuple(receipt.complaint for receipt in receipts if receipt.problems),
        )

    @staticmethod
    def from_dict(value: object) -> ReceiptSums:
        """Read what `dataclasses.asdict` returned."""
        fields = read_fields(value, required=tuple(ReceiptSums.__dataclass_fields__))
        counts = {
            name: read_int(fields[name]) for name in ("runs", "expected", "applied", "cached")
        }
        status = read_word(fields["status"], ("ok", "partial", "error"))
        return ReceiptSums(**counts, status=status, problems=tuple(map(str, fields["problems"])))


@dataclass(frozen=True)
class SweepReceipts:
    """The receipts of all runs of a sweep, and their sums.

    Attributes:
        every: one receipt for each run that had a plan, in the order of the runs; (): a server
            returned the sums alone.
        prompt_tokens: number of prompt tokens of all runs.
        cached_tokens: of these, the tokens that the prefix cache served.
        given_sums: sums over the receipts, as a server returned them; None: they are of `every`.
    """

    every: tuple[Receipt, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    given_sums: ReceiptSums | None = None

    @cached_property
    def sums(self) -> ReceiptSums:
        """Sums over the receipts."""
        return ReceiptSums.of(self.every) if self.given_sums is None else self.given_sums

    @property
    def status(self) -> str:
        """`ok`, or the worst status of a receipt: `partial` or `error`."""
        return self.sums.status

    @property
    def expected(self) -> int:
        """Number of edits that were asked for, counted once for each token."""
        return self.sums.expected

    @property
    def applied(self) -> int:
        """Number of edits that the device counted."""
        return self.sums.applied

    @property
    def cached(self) -> int:
        """Number of edits of tokens that the prefix cache had, of an earlier run of the same cell.
        `applied + cached == expected`.
        """
        return self.sums.cached

    @property
    def problems(self) -> tuple[str, ...]:
        """The problems of all receipts."""
        return self.sums.problems

    def to_json(self) -> object:
        """Return each receipt as JSON values; if only the sums are known, these."""
        if len(self.every) == self.sums.runs:
            return [receipt.to_dict() for receipt in self.every]
        return asdict(self.sums)

    @staticmethod
    def from_json(value: object, prompt_tokens: int, cached_tokens: int) -> SweepReceipts:
        """Read what `to_json` returned.

        Raises:
            SpecError: it is not that.
        """
        if isinstance(value, Mapping):
            with at("receipts"):
                return SweepReceipts((), prompt_tokens, cached_tokens, ReceiptSums.from_dict(value))
        if not isinstance(value, (list, tuple)):
            raise SpecError("receipts", f"expected a list or a dict, got {kind(value)}")
        every = tuple(Receipt.from_dict(receipt) for receipt in value)
        return SweepReceipts(every, prompt_tokens, cached_tokens)

    def without_every(self) -> SweepReceipts:
        """Return the sums alone."""
        return replace(self, every=(), given_sums=self.sums)

    def __len__(self) -> int:
        return self.sums.runs

    def __str__(self) -> str:
        cached = f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens from the prefix cache"
        edits = f"{self.applied + self.cached} of {self.expected} edits"
        return f"{len(self)} runs: {self.status}; {edits}; {cached}"
