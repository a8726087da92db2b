"""What was asked for and what was done: the proof that comes with every result."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from midstream.errors import ReceiptError

STATUSES = ("ok", "partial", "error")


@dataclass(frozen=True, slots=True)
class Captured:
    """Rows of one site and layer: how many the request asked for, and how many came."""

    site: str
    layer: int
    expected: int
    actual: int


@dataclass(frozen=True, slots=True)
class Edited:
    """Edits: one is one of the plan's edits, carried out for one token at one site and layer. An
    edit whose gate stayed closed was carried out: it was decided on the device.

    Attributes:
        expected: what the plan asks for, given the tokens that were computed.
        applied: what the device counted while it computed this request.
        tokens: tokens that were to get at least one edit.
        cached: edits of tokens that were not computed, because the prefix cache had their KV from
            a request that asked for the very same there. `applied + cached == expected`.
    """

    expected: int
    applied: int
    tokens: int
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Probed:
    """Scores of one probe: how many the request asked for, and how many came."""

    name: str
    site: str
    layer: int
    expected: int
    actual: int


@dataclass(frozen=True, slots=True)
class Selected:
    """What one selection of the plan came to.

    Attributes:
        what: where in the plan it stands, as `edits[0]`.
        positions: [start, stop) ranges, ascending.
    """

    what: str
    positions: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        shown = [
            str(start) if stop == start + 1 else f"{start}–{stop - 1}"
            for start, stop in self.positions
        ]
        return f"{self.what}: positions {', '.join(shown) or 'none'}"


@dataclass(frozen=True, slots=True)
class CaptureResult:
    """What became of captured rows at the sink to which they went.

    Attributes:
        status: "ok": all of them are kept, durably if the sink keeps them so. "partial": some are.
            "error": it is not known that any are.
        reason: why it is not "ok"; empty if it is.
        paths: the files that have them, if they are in files.
        manifest: the sink's own account of it, JSON values; None: it gives none.
    """

    status: str = "ok"
    reason: str = ""
    paths: tuple[str, ...] = ()
    manifest: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status: expected one of {', '.join(STATUSES)}, got {self.status!r}")

    @staticmethod
    def joined(results: Sequence[CaptureResult]) -> CaptureResult:
        """Several as one: the worst status, all reasons and paths; the manifest of a single one."""
        if len(results) == 1:
            return results[0]
        return CaptureResult(
            max((one.status for one in results), key=STATUSES.index),
            "; ".join(dict.fromkeys(one.reason for one in results if one.reason)),
            tuple(path for one in results for path in one.paths),
        )

    @staticmethod
    def of_pieces(results: Sequence[CaptureResult]) -> CaptureResult:
        """Those of what came in pieces as one: each path once; the manifest of the last."""
        joined = CaptureResult.joined(results)
        paths = tuple(dict.fromkeys(joined.paths))
        return replace(joined, paths=paths, manifest=results[-1].manifest)


@dataclass(frozen=True, slots=True)
class Receipt:
    """One completion's receipt.

    Attributes:
        request_id: vLLM's id of the request.
        prompt_tokens, generated_tokens: the last generated token is never computed on, so there
            are `prompt_tokens + generated_tokens − 1` rows.
        captured: per site and layer.
        edited: None when no edit was asked for.
        probed: per probe.
        selected: the positions that each capture, edit and probe came to.
        dropped: captured vectors that found no room; only with the setting `overflow="drop"`.
        problems: what else differs from what was asked; empty when all is as it should be.
        kept: (sink, what became of the rows that went to it), for every sink but `memory`.
    """

    request_id: str
    prompt_tokens: int
    generated_tokens: int
    captured: tuple[Captured, ...]
    edited: Edited | None
    probed: tuple[Probed, ...] = ()
    selected: tuple[Selected, ...] = ()
    dropped: int = 0
    problems: tuple[str, ...] = ()
    kept: tuple[tuple[str, CaptureResult], ...] = ()

    @property
    def status(self) -> str:
        """`ok`; `partial` where captured vectors were dropped, as the settings allow; or `error`
        when something else differs from what was asked.
        """
        return "error" if self.problems else "partial" if self.dropped else "ok"

    def check(self) -> None:
        """Raises ReceiptError when something differs from what was asked."""
        if self.problems:
            raise ReceiptError(self.complaint)

    @property
    def complaint(self) -> str:
        """The problems, in one sentence."""
        return f"request {self.request_id}: " + "; ".join(self.problems)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        plain = asdict(self)
        return {
            "status": self.status,
            **plain,
            "captured": [asdict(one) for one in self.captured],
            "probed": [asdict(one) for one in self.probed],
            "selected": [
                {"what": one.what, "positions": [list(each) for each in one.positions]}
                for one in self.selected
            ],
            "problems": list(self.problems),
            "kept": [
                {"sink": sink, "status": one.status, "reason": one.reason, "paths": [*one.paths]}
                for sink, one in self.kept
            ],
        }

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> Receipt:
        """The receipt that `to_dict` gave; without the manifests of sinks."""
        return Receipt(
            request_id=plain["request_id"],
            prompt_tokens=plain["prompt_tokens"],
            generated_tokens=plain["generated_tokens"],
            captured=tuple(Captured(**one) for one in plain["captured"]),
            edited=None if plain["edited"] is None else Edited(**plain["edited"]),
            probed=tuple(Probed(**one) for one in plain["probed"]),
            selected=tuple(
                Selected(one["what"], tuple((start, stop) for start, stop in one["positions"]))
                for one in plain["selected"]
            ),
            dropped=plain["dropped"],
            problems=tuple(plain["problems"]),
            kept=tuple(
                (one["sink"], CaptureResult(one["status"], one["reason"], tuple(one["paths"])))
                for one in plain["kept"]
            ),
        )

    def __str__(self) -> str:
        lines = [
            f"request {self.request_id}: {self.status}; {self.prompt_tokens} prompt and "
            f"{self.generated_tokens} generated tokens"
        ]
        if self.captured:
            expected = sum(one.expected for one in self.captured)
            actual = sum(one.actual for one in self.captured)
            lines.append(
                f"  captured {actual} of {expected} rows, at {len(self.captured)} sites of layers"
            )
        if self.dropped:
            lines.append(f"  dropped {self.dropped} vectors: there was no room in the arena")
        if self.edited is not None:
            edited = self.edited
            reused = f", {edited.cached} from the prefix cache" if edited.cached else ""
            lines.append(
                f"  edited {edited.tokens} tokens: {edited.applied} of {edited.expected} edits"
                f"{reused}"
            )
        lines += [
            f"  probe {one.name}: {one.actual} of {one.expected} scores" for one in self.probed
        ]
        lines += [f"  {one}" for one in self.selected]
        for sink, kept in self.kept:
            where = f", {kept.paths[0]}" if len(kept.paths) == 1 else ""
            lines.append(f"  sink {sink}: {kept.status}{where}")
        return "\n".join([*lines, *(f"  {problem}" for problem in self.problems)])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"
