"""Receipts: what a completion requested, and what was done for it."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any

from midstream.errors import ReceiptError

STATUSES = ("ok", "partial", "error")


@dataclass(frozen=True, slots=True)
class Captured:
    """Counts of captured rows of one site and layer: by the plan, and those that there are.

    Of these, `reused` were computed by earlier requests, see `Capture`.
    """

    site: str
    layer: int
    expected: int
    actual: int
    reused: int = 0


@dataclass(frozen=True, slots=True)
class Dose:
    """How strong an edit was at one site and layer: ‖h after − h before‖ / ‖h before‖ of a token, h
    its vector there. Of an edit that adds a vector v it is |scale| · ‖v‖ / ‖h‖.

    Attributes:
        what: path of the edit in the plan, as in `Selected`.
        mean, largest: over the tokens. Where a gate stayed closed the dose is 0.
        tokens: number of edited tokens that were computed; the prefix cache had the others.
    """

    what: str
    site: str
    layer: int
    mean: float
    largest: float
    tokens: int

    def __str__(self) -> str:
        return (
            f"{self.what} at {self.site} of layer {self.layer}: dose {self.mean:.3g}, at most "
            f"{self.largest:.3g}"
        )


@dataclass(frozen=True, slots=True)
class Edited:
    """Counts of applied edits. One edit of the plan counts once per token and tap.

    An edit whose gate stayed closed counts as applied: the device evaluated it.

    Attributes:
        expected: number of edits that the plan requires for the computed tokens.
        applied: number of edits that the device counted for this request.
        tokens: number of tokens with at least one edit.
        cached: number of edits of tokens that were not computed, because the prefix cache had KV of
            a request with identical edits there. `applied + cached == expected`.
        doses: of each edit, site and layer that is measured; see the setting `doses`.
    """

    expected: int
    applied: int
    tokens: int
    cached: int = 0
    doses: tuple[Dose, ...] = ()


@dataclass(frozen=True, slots=True)
class Probed:
    """Counts of one probe's scores: `expected` by the plan, and `actual`.

    Attributes:
        unscored: how many of them are NaN, as the prefix cache had their tokens without a score;
            see the setting `unscored_tokens`.
    """

    name: str
    site: str
    layer: int
    expected: int
    actual: int
    unscored: int = 0


@dataclass(frozen=True, slots=True)
class Called:
    """Calls of the function of a `Local`, at one site and layer.

    Attributes:
        expected: number of selected rows.
        rows: number of rows that it was given; rows that are computed again after a preemption
            count again, and rows of the prefix cache do not.
        calls: number of calls, one for each step with such rows.
    """

    name: str
    site: str
    layer: int
    expected: int
    rows: int
    calls: int


@dataclass(frozen=True, slots=True)
class Selected:
    """Positions that one selection of the plan resolved to.

    Attributes:
        what: path of the selection in the plan, such as `edits[0]`.
        positions: [start, stop) ranges, ascending.
        left_out: number of selected positions beyond the capture's `max_rows`, of which there are
            no rows.
    """

    what: str
    positions: tuple[tuple[int, int], ...]
    left_out: int = 0

    def __str__(self) -> str:
        shown = [
            str(start) if stop == start + 1 else f"{start}–{stop - 1}"
            for start, stop in self.positions
        ]
        more = f"; {self.left_out} more were left out" if self.left_out else ""
        return f"{self.what}: positions {', '.join(shown) or 'none'}{more}"


@dataclass(frozen=True, slots=True)
class Version:
    """A version of the request's plan, if it was changed while the request ran.

    Attributes:
        number: 0 for the plan that the request was sent with, then by one more for each update; of
            switches, in the order of their probes. A controller with `mode="sync"` has one for each
            of its sets of edits and scales, and may return to it.
        source: who made it: "request", "update", "probe:NAME" or "controller:NAME"; of a controller
            with `mode="sync"`, then "/" and the name of the set of edits, and " failed" since it
            failed.
        positions: [start, stop) at which it held; start = stop: at none.
        scale: factor on the strength of the edits given last.
        expected, applied, cached: counts of edits at these positions, as in `Edited`.
    """

    number: int
    source: str
    positions: tuple[int, int]
    scale: float = 1.0
    expected: int = 0
    applied: int = 0
    cached: int = 0

    def __str__(self) -> str:
        start, stop = self.positions
        where = f"positions {start}–{stop - 1}" if start < stop else "no position"
        scale = "" if self.scale == 1 else f", scale {self.scale:g}"
        reused = f", {self.cached} from the prefix cache" if self.cached else ""
        return (
            f"version {self.number} ({self.source}{scale}): {where}, {self.applied} of "
            f"{self.expected} edits{reused}"
        )


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """A state of the model's weights.

    Attributes:
        number: 0 as the engine loaded them; a change gives the next one, as a reload, an update by
            a trainer, or an adapter loaded with other weights under the same name.
        name: as the caller calls it, by vLLM's `update_weight_version` or `finish_weight_update`.
    """

    number: int = 0
    name: str = ""

    def __str__(self) -> str:
        return f"{self.number} ({self.name})" if self.name else str(self.number)


@dataclass(frozen=True, slots=True)
class Action:
    """What a probe did when its scores met its condition.

    Attributes:
        kind: "stop", "switch" or "flag".
        position: position of the token whose score met the condition, the first such.
        score: the pooled score there, which was compared with the threshold.
    """

    name: str
    kind: str
    position: int
    score: float


@dataclass(frozen=True, slots=True)
class Nonfinite:
    """Positions with an infinite or NaN value, or with an edit that saturated."""

    positions: int
    first: int


@dataclass(frozen=True, slots=True)
class CaptureResult:
    """Result of storing captured rows in a sink.

    Attributes:
        status: "ok": all rows are stored, durably if the sink is durable. "partial": some are.
            "error": unknown or none.
        reason: why the status is not "ok"; empty if it is.
        paths: files with the rows, if the sink writes files.
        manifest: the sink's own description of the rows, JSON values; None if it has none.

    Raises:
        ValueError: the status is unknown.
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
        """Merge several results: worst status, all reasons and paths; the manifest only of a single
        result.
        """
        if len(results) == 1:
            return results[0]
        return CaptureResult(
            max((result.status for result in results), key=STATUSES.index),
            "; ".join(dict.fromkeys(result.reason for result in results if result.reason)),
            tuple(path for result in results for path in result.paths),
        )

    @staticmethod
    def of_pieces(results: Sequence[CaptureResult]) -> CaptureResult:
        """Merge the results of several chunks of rows: unique paths, manifest of the last chunk."""
        joined = CaptureResult.joined(results)
        paths = tuple(dict.fromkeys(joined.paths))
        return replace(joined, paths=paths, manifest=results[-1].manifest)


def _strongest(doses: Sequence[Dose]) -> list[Dose]:
    """Return of each edit the dose of the site and layer where its mean is the largest."""
    strongest: dict[str, Dose] = {}
    for dose in doses:
        if dose.what not in strongest or dose.mean > strongest[dose.what].mean:
            strongest[dose.what] = dose
    return [*strongest.values()]


def _plain(counts: Any) -> dict[str, Any]:
    return {name: getattr(counts, name) for name in counts.__slots__}


@dataclass(frozen=True, slots=True)
class Receipt:
    """One completion's receipt.

    Attributes:
        request_id: vLLM's id of the request.
        prompt_tokens: number of prompt tokens.
        generated_tokens: number of generated tokens. The last one is never computed on, so there
            are `prompt_tokens + generated_tokens − 1` rows.
        captured: counts per site and layer.
        edited: counts of edits; None if the request has no edits.
        probed: counts per probe.
        selected: positions that each capture, edit and probe resolved to.
        dropped: number of captured vectors dropped because the arena was full; only with the
            setting `overflow="drop"`.
        nonfinite: positions at which an edited or captured row or a score is not finite, or an
            edit saturated; None: there are none.
        problems: all other differences from the plan; empty if there are none.
        kept: (sink, result) for every sink except `memory`.
        coming_from: (field, tool) of each field of another tool that the request was given in.
        called: calls of Python functions, see `Local`.
        versions: the versions of its plan and where each held, in order; empty if it was never
            changed.
        actions: what probes with an `act` did; of those that did nothing there is none.
        weight_versions: the versions of the weights that it ran on, in order: more than one if
            they changed while it ran. Empty: those that the engine loaded.
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
    nonfinite: Nonfinite | None = None
    coming_from: tuple[tuple[str, str], ...] = ()
    called: tuple[Called, ...] = ()
    versions: tuple[Version, ...] = ()
    actions: tuple[Action, ...] = ()
    weight_versions: tuple[WeightVersion, ...] = ()

    @property
    def weight_version(self) -> WeightVersion:
        """The version of the weights that it ended with."""
        return self.weight_versions[-1] if self.weight_versions else WeightVersion()

    @property
    def status(self) -> str:
        """`ok`; `partial` if captured vectors were dropped, values are not finite or cached tokens
        have no score, as the settings allow; `error` if there are problems.
        """
        if self.problems:
            return "error"
        is_partial = self.dropped or self.nonfinite or any(probe.unscored for probe in self.probed)
        return "partial" if is_partial else "ok"

    def check(self) -> None:
        """Check that there are no problems.

        Raises:
            ReceiptError: there are; the message lists them.
        """
        if self.problems:
            raise ReceiptError(self.complaint)

    @property
    def complaint(self) -> str:
        """The problems, in one sentence."""
        return f"request {self.request_id}: " + "; ".join(self.problems)

    def of_request(self, request_id: str) -> Receipt:
        """Return the receipt with another id of the request."""
        # `replace` takes several times as long.
        return Receipt(request_id, *_all_but_id(self))

    def with_reused(self, counts: Mapping[tuple[str, int], int]) -> Receipt:
        """Return the receipt with the numbers of reused rows, by site and layer."""
        if not counts:
            return self
        captured = tuple(
            replace(record, reused=counts.get((record.site, record.layer), 0))
            for record in self.captured
        )
        return replace(self, captured=captured)

    def with_doses(self, doses: tuple[Dose, ...]) -> Receipt:
        """Return the receipt with the doses of its edits."""
        if not doses or self.edited is None:
            return self
        return replace(self, edited=replace(self.edited, doses=doses))

    def to_dict(self) -> dict[str, Any]:
        """Return the receipt as plain JSON values."""
        # Not `asdict`, which copies every value in Python code: this is on the path of a request.
        return {
            "status": self.status,
            "request_id": self.request_id,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            # There may be one for each layer.
            "captured": [
                {
                    "site": captured.site,
                    "layer": captured.layer,
                    "expected": captured.expected,
                    "actual": captured.actual,
                    **({"reused": captured.reused} if captured.reused else {}),
                }
                for captured in self.captured
            ],
            "edited": None
            if self.edited is None
            else {**_plain(self.edited), "doses": [_plain(dose) for dose in self.edited.doses]},
            "probed": [
                {
                    "name": probed.name,
                    "site": probed.site,
                    "layer": probed.layer,
                    "expected": probed.expected,
                    "actual": probed.actual,
                    **({"unscored": probed.unscored} if probed.unscored else {}),
                }
                for probed in self.probed
            ],
            "selected": [
                {
                    "what": selected.what,
                    "positions": [list(span) for span in selected.positions],
                    **({"left_out": selected.left_out} if selected.left_out else {}),
                }
                for selected in self.selected
            ],
            "dropped": self.dropped,
            "problems": list(self.problems),
            "kept": [
                {
                    "sink": sink,
                    "status": result.status,
                    "reason": result.reason,
                    "paths": [*result.paths],
                }
                for sink, result in self.kept
            ],
            "nonfinite": None if self.nonfinite is None else _plain(self.nonfinite),
            "coming_from": dict(self.coming_from),
            "called": [_plain(called) for called in self.called],
            "versions": [
                {**_plain(version), "positions": list(version.positions)}
                for version in self.versions
            ],
            "actions": [_plain(action) for action in self.actions],
            "weight_versions": [_plain(version) for version in self.weight_versions],
        }

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> Receipt:
        """Create a receipt from the values of `to_dict`; manifests of sinks are not included."""
        import msgspec  # here, as `import midstream` loads the standard library alone

        kept = [(result["sink"], result) for result in plain["kept"]]
        # Servers of earlier versions do not send it.
        coming_from = [*plain.get("coming_from", {}).items()]
        return msgspec.convert({**plain, "kept": kept, "coming_from": coming_from}, Receipt)

    def __str__(self) -> str:
        lines = [
            f"request {self.request_id}: {self.status}; {self.prompt_tokens} prompt and "
            f"{self.generated_tokens} generated tokens"
        ]
        if self.captured:
            expected = sum(captured.expected for captured in self.captured)
            actual = sum(captured.actual for captured in self.captured)
            earlier = sum(captured.reused for captured in self.captured)
            lines.append(
                f"  captured {actual} of {expected} rows, at {len(self.captured)} sites of layers"
                + (f"; {earlier} were reused" if earlier else "")
            )
        if self.dropped:
            lines.append(f"  dropped {self.dropped} vectors: the arena was full")
        if self.nonfinite:
            lines.append(
                f"  {self.nonfinite.positions} positions are not finite; the first is "
                f"{self.nonfinite.first}"
            )
        if self.edited is not None:
            edited = self.edited
            reused = f", {edited.cached} from the prefix cache" if edited.cached else ""
            lines.append(
                f"  edited {edited.tokens} tokens: {edited.applied} of {edited.expected} edits"
                f"{reused}"
            )
            lines += [f"  {dose}" for dose in _strongest(edited.doses)]
        lines += [
            f"  probe {probed.name}: {probed.actual} of {probed.expected} scores"
            + (f", {probed.unscored} of them NaN: cached unscored" if probed.unscored else "")
            for probed in self.probed
        ]
        lines += [
            f"  {fn.name} at {fn.site} of layer {fn.layer}: {fn.rows} rows in {fn.calls} calls"
            for fn in self.called
        ]
        lines += [f"  {version}" for version in self.versions]
        if self.weight_versions:
            lines.append(f"  weights: version {', '.join(map(str, self.weight_versions))}")
        lines += [
            f"  {act.kind} by probe {act.name} at position {act.position}: {act.score:.6g}"
            for act in self.actions
        ]
        lines += [f"  {part}" for part in self.selected]
        lines += [f"  {name}: a field of {tool}" for name, tool in self.coming_from]
        for sink, kept in self.kept:
            where = f", {kept.paths[0]}" if len(kept.paths) == 1 else ""
            lines.append(f"  sink {sink}: {kept.status}{where}")
        return "\n".join([*lines, *(f"  {problem}" for problem in self.problems)])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


_all_but_id = attrgetter(*[field.name for field in fields(Receipt)][1:])
