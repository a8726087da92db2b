"""A sweep as runs: prompts with plans for an engine, and what becomes of their outputs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from midstream.errors import SpecError
from midstream.lab.sweep.alignment import align_positions
from midstream.lab.sweep.cells import MAX_CELLS, Grid, SweepCell, plan_grid
from midstream.lab.sweep.edits import PatchRows, check_rows, check_sizes, edits_of
from midstream.lab.sweep.feature_patch import FeaturePatch
from midstream.lab.sweep.metrics import Metric, NextToken, Recovered
from midstream.lab.sweep.receipts import SweepReceipts
from midstream.lab.sweep.request import SweepRequest
from midstream.lab.sweep.result import Sweep
from midstream.lab.sweep.source import (
    NameSource,
    NumberSource,
    PromptSource,
    RowsSource,
    ZeroSource,
)
from midstream.plan import Capture, CapturedRows, Logits, Plan, Sites
from midstream.plan.captured_rows import OpenRows
from midstream.plan.positions.prompt import Prompt
from midstream.plan.readouts import ReadOut
from midstream.plan.shape import ModelShape
from midstream.plan.vectors.named_lookup import Lookup, SaeName, pick, vectors_of
from midstream.results.arrays import to_numpy
from midstream.results.receipt import Receipt
from midstream.sites import Tap, show_tap
from midstream.validation import at


@dataclass(frozen=True)
class SweepPrompt:
    """A prompt of a sweep, in which positions can be located, and the text of each token."""

    prompt: Prompt
    texts: tuple[str, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        assert self.prompt.token_ids is not None
        return self.prompt.token_ids


@dataclass(frozen=True)
class SweepContext:
    """What a sweep needs to know of its engine."""

    shape: ModelShape
    lookup: Lookup
    open_rows: OpenRows | None = None  # returns the rows of an earlier request by id
    most_cells: int = MAX_CELLS


@dataclass(frozen=True)
class SweepRun:
    """One run of an engine."""

    token_ids: tuple[int, ...]
    plan: Plan | None
    cell: SweepCell | None = None  # None: it is unpatched


@dataclass
class _Seen:
    """What the runs so far have given."""

    receipts: list[Receipt] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0


class SweepJob:
    """One sweep: give an engine `first_runs()` and call `begin` with their outputs; then all of
    `runs()`, in this order, and `add` each output; `result()` is the sweep.
    """

    def __init__(
        self,
        request: SweepRequest,
        context: SweepContext,
        prompt: SweepPrompt,
        source: SweepPrompt | None,
        shown: Metric | None = None,
    ) -> None:
        """Plan it; `shown` is the metric as it was given, that of the request has ids as tokens."""
        request, self._features = _with_features(request, context)
        self.request = request
        self._shown = shown or request.metric
        self._shape = context.shape
        self._prompt = prompt
        self._source = source
        self._aligned: Mapping[int, int] | None = None
        self._rows: PatchRows | None = None
        self.grid = self._plan(context)
        taps = frozenset(cell.tap for cell in self.grid.cells)
        check_sizes(request, taps, context.shape)
        if self._features is not None:
            self._features.check_width(taps, context.shape)
        if isinstance(request.metric, Recovered) and self._clean_tokens is None:
            raise SpecError(
                "metric", "Recovered needs a clean run: give a prompt, or an output, as the source"
            )
        self._reference = NextToken()
        self._corrupt = math.nan
        self._clean: float | None = None
        self._unpatched: list[float] = []
        self._seen = _Seen()
        self._values = np.full(self.grid.shape, np.nan, np.float32)

    @property
    def length(self) -> int:
        """Number of tokens of the longest prompt."""
        return max(self._prompt.prompt.length, len(self._clean_tokens or ()))

    @property
    def _clean_tokens(self) -> tuple[int, ...] | None:
        """The tokens of the clean run; None: there is none."""
        if self._source is not None:
            return self._source.token_ids
        source = self.request.source
        return source.prompt if isinstance(source, RowsSource) else None

    def first_runs(self) -> list[SweepRun]:
        """Return the unpatched runs that come before the cells: the prompt, and the source."""
        runs = [self._unpatched_run()]
        if self._clean_tokens is not None:
            plan = self._plan_of([], self._capture())
            runs.append(SweepRun(self._clean_tokens, plan))
        return runs

    def begin(self, outputs: Iterable[Any]) -> None:
        corrupt, *others = outputs
        own = self._read(corrupt)
        clean = None
        for output in others:
            clean = self._read(output)
            if isinstance(self.request.source, PromptSource):
                self._keep_rows(output.activations)
        self._reference = own if clean is None else clean
        self._corrupt = self._value(own, corrupt)
        if clean is not None:
            self._clean = self._value(clean, others[0])
        if isinstance(self.request.metric, Recovered) and self._clean == self._corrupt:
            raise SpecError(
                "metric",
                f"the clean and the unpatched run have the same value, {self._corrupt:.6g}, so "
                "there is nothing to recover",
            )

    def runs(self) -> Iterator[SweepRun]:
        """Yield the runs of all cells, with the unpatched ones spread among them."""
        count, repeats = len(self.grid.cells), self.request.repeats
        before = Counter((repeat + 1) * count // (repeats + 1) for repeat in range(repeats))
        for index, cell in enumerate(self.grid.cells):
            for _ in range(before[index]):
                yield self._unpatched_run()
            edits = edits_of(cell, self.request, self._rows, self._shape, self._features)
            yield SweepRun(self._prompt.token_ids, self._plan_of(edits), cell)

    def add(self, run: SweepRun, output: Any) -> float:
        value = self._scaled(self._value(self._read(output), output))
        if run.cell is None:
            self._unpatched.append(value)
        else:
            self._values[run.cell.index] = value
        return value

    def result(self) -> Sweep:
        metric = self._shown
        unpatched = [self._scaled(self._corrupt), *self._unpatched]
        texts = self._prompt.texts
        return Sweep(
            self._values,
            self.grid.dims,
            self.grid.coords,
            metric if isinstance(metric, Metric) else name_of(metric),
            self._corrupt,
            self._clean,
            max(unpatched) - min(unpatched) if self._unpatched else math.nan,
            tuple("".join(texts[position] for position in places) for places in self.grid.places),
            SweepReceipts(
                tuple(self._seen.receipts), self._seen.prompt_tokens, self._seen.cached_tokens
            ),
        )

    def _plan(self, context: SweepContext) -> Grid:
        """Return the grid, and prepare rows that are known before any run."""
        request, shape, prompt = self.request, context.shape, self._prompt.prompt
        source, most = request.source, context.most_cells
        if isinstance(source, PromptSource):
            assert self._source is not None
            self._aligned = align_positions(
                request.align, prompt.length, self._source.prompt.length
            )
            return plan_grid(request, shape, prompt, self._aligned, most=most)
        if isinstance(source, CapturedRows):
            if context.open_rows is None:
                raise SpecError(
                    "source.captured",
                    "rows that a server cached can be used only in a request to that server; give "
                    "the rows themselves",
                )
            source = _opened(source, context.open_rows)
        if isinstance(source, RowsSource) and any(source.positions.values()):
            self._aligned = align_positions(request.align, prompt.length, source.length)
            known = {tap: frozenset(positions) for tap, positions in source.positions.items()}
            grid = plan_grid(request, shape, prompt, self._aligned, known, most)
            places = {
                tap: {position: row for row, position in enumerate(positions)}
                for tap, positions in source.positions.items()
            }
            self._use(source.rows, places)
            return grid
        if request.align != "exact":
            raise SpecError("align", "this source has no positions to align; omit it")
        if isinstance(source, RowsSource):
            self._use(source.rows, None)
            rows = dict.fromkeys(source.rows, frozenset[int]())
            return plan_grid(request, shape, prompt, None, rows, most)
        grid = plan_grid(request, shape, prompt, None, most=most)
        if isinstance(source, NameSource):
            taps = dict.fromkeys(cell.tap for cell in grid.cells)
            self._use(_named_rows(source.name, context.lookup, taps), None)
        else:
            assert isinstance(source, (ZeroSource, NumberSource))
        return grid

    def _use(
        self,
        rows: Mapping[Tap, NDArray[np.float32]],
        places: Mapping[Tap, Mapping[int, int]] | None,
    ) -> None:
        check_rows(rows, self._shape)
        self._rows = PatchRows(rows, places, self._aligned or {})

    def _capture(self) -> list[Capture]:
        """Return the captures of the source prompt: the rows of all cells."""
        if not isinstance(self.request.source, PromptSource):
            return []
        assert self._aligned is not None
        cells = self.grid.cells
        needed = [self._aligned[position] for cell in cells for position in cell.positions]
        return captures_of([cell.tap for cell in cells], needed)

    def _keep_rows(self, activations: Any) -> None:
        rows, places = {}, {}
        for tap, tap_rows in activations.items():
            rows[tap] = np.array(to_numpy(tap_rows.reshape(len(tap_rows), -1)), np.float32)
            positions = activations.positions_of(*tap).tolist()
            places[tap] = {position: row for row, position in enumerate(positions)}
        self._rows = PatchRows(rows, places, self._aligned or {})

    def _plan_of(self, edits: list[Any], captures: Sequence[ReadOut] = ()) -> Plan | None:
        readouts = list(captures)
        if self.request.reads_all:
            readouts.append(Logits(tokens="all", positions="last_prompt"))
        return Plan.make(capture=readouts or None, edits=edits or None)

    def _unpatched_run(self) -> SweepRun:
        return SweepRun(self._prompt.token_ids, self._plan_of([]))

    def _read(self, output: Any) -> NextToken:
        seen = self._seen
        seen.prompt_tokens += len(output.prompt_token_ids)
        seen.cached_tokens += output.num_cached_tokens or 0
        # An unpatched run asks for nothing.
        receipt = getattr(output, "receipt", None)
        if receipt is not None:
            seen.receipts.append(receipt)
        metric = self.request.metric
        if not isinstance(metric, Metric):
            return NextToken()
        if self.request.reads_all:
            return NextToken(every=np.array(to_numpy(output.logits.logprobs[0]), np.float32))
        (logprobs, *_) = output.outputs[0].logprobs
        return NextToken({int(token): logprobs[token].logprob for token in metric.tokens})

    def _value(self, run: NextToken, output: Any) -> float:
        metric = self.request.metric
        if isinstance(metric, Metric):
            return metric.value(run, self._reference)
        return float(metric(output))

    def _scaled(self, value: float) -> float:
        """Return the value of a run as it is in the grid."""
        if not isinstance(self.request.metric, Recovered):
            return value
        assert self._clean is not None
        return (value - self._corrupt) / (self._clean - self._corrupt)


def _with_features(
    request: SweepRequest, context: SweepContext
) -> tuple[SweepRequest, FeaturePatch | None]:
    """Return a request with the layer and site of its SAE, and its features; None: it has none."""
    if request.sae is None:
        return request, None
    with at("sae"):
        source = context.lookup(SaeName(request.sae))
        tap = source.tap if request.left else None
    return request.at_tap(tap), FeaturePatch.of(source, request.features)


def _opened(source: CapturedRows, open_rows: OpenRows) -> RowsSource:
    with at("source"):
        cached = open_rows(source.id)
        rows, positions = {}, {}
        for tap in cached.taps:
            positions[tap] = source.positions or cached.positions(tap)
            rows[tap] = np.stack([row.numpy() for row in cached.read(tap, source.positions)])
    length = max(max(tap_positions) for tap_positions in positions.values()) + 1
    return RowsSource(rows, positions, length)


def _named_rows(name: str, lookup: Lookup, taps: Iterable[Tap]) -> dict[Tap, NDArray[np.float32]]:
    with at("source"):
        vectors = vectors_of(name, lookup)
        rows = {}
        for tap in taps:
            try:
                rows[tap] = pick(name, vectors, tap).numpy()[None]
            except SpecError as error:
                raise SpecError("", f"{error.problem} (wanted: {show_tap(tap)})") from None
        return rows


def captures_of(taps: Iterable[Tap], positions: Iterable[int]) -> list[Capture]:
    """Return captures of whole rows at all taps, one for each site."""
    layers: dict[str, set[int]] = {}
    for site, layer in taps:
        layers.setdefault(site, set()).add(layer)
    wanted = sorted(set(positions))
    return [
        Capture(sorted(indices), Sites(site), wanted, codec="raw")
        for site, indices in layers.items()
    ]


def name_of(metric: Callable[..., Any]) -> str:
    """Return the name of a function, or of its class."""
    return str(getattr(metric, "__name__", type(metric).__name__))
