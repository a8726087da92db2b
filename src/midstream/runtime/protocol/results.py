"""Results of requests, from a worker to the front end. The data of one name is, for each of its
vLLM requests: the states of its positions, uint16; captured rows in blocks, one per set of taps:
[positions, bytes of a record of all taps]; scores, float32 [positions, slots]; doses of edits,
float64 [3, columns] and [positions, 1 + columns], the positions first. With a lease, rows
stay in the arena, and blocks are int64 [runs, 3]: segment, offset in it, number of records.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.codecs import Codec
from midstream.errors import MessageError, MidstreamError
from midstream.results.encoded_rows import Chunk, Scattered, UnreadChunks
from midstream.runtime.protocol.codec import Natural, ProtocolMessage, Runs
from midstream.runtime.protocol.record_layout import (
    BlockForm,
    PatternHeader,
    RecordLayout,
    layout_of,
)
from midstream.runtime.protocol.runs import Floats, Ints, count_of, expand_runs, within_runs
from midstream.runtime.protocol.worker_info import WorkerInfo
from midstream.sites import Tap

# Steps whose checksums a worker keeps: ranks may be that far apart when they are compared.
KEPT_CHECKSUMS = 256
_STATE = 2  # bytes of a position's state
_SCORE = 4  # bytes of a score
_NUMBER = 8  # bytes of a sum of doses
_RUN = 3 * 8  # bytes of a run of records in the arena
# More bytes are copied when results are assembled, in a thread, and not when they are first read.
_UNREAD_BYTES = 1 << 20


class DoseSums(NamedTuple):
    """Doses of the edits of one version of a request's plan, by column."""

    version: int
    totals: NDArray[np.float64]  # [3, columns]: sum, number and largest; without the latest
    positions: NDArray[Any]  # of the latest, ascending
    latest: NDArray[np.floating[Any]]  # [positions, columns]; below 0: none


class RowsHeader(ProtocolMessage, frozen=True, array_like=True):
    """A block of captured rows."""

    taps: tuple[Natural, ...]  # indices of the worker's, in the order within a record
    codec: str
    runs: Runs
    nbytes: Natural
    patterns: tuple[PatternHeader, ...] = ()  # rows of attention, in order


class ScoresHeader(ProtocolMessage, frozen=True, array_like=True):
    """A block of probe scores."""

    runs: Runs
    nbytes: Natural


class FunctionCount(ProtocolMessage, frozen=True, array_like=True):
    """Calls of one function of a plan, by its index, and the rows that they were given."""

    index: Natural
    calls: Natural
    rows: Natural


class DosesHeader(ProtocolMessage, frozen=True, array_like=True):
    """Doses of the edits of one version of a plan; see `DoseSums`."""

    version: Natural
    columns: Natural
    positions: Natural  # of those that are no sums

    @property
    def nbytes(self) -> int:
        return _NUMBER * (3 * self.columns + self.positions * (1 + self.columns))


class WeightState(ProtocolMessage, frozen=True, array_like=True):
    """A state of the weights: number 0 is that of the start, and each change has a higher one."""

    number: Natural = 0
    name: str = ""  # the caller's; empty: none was given


class RequestHeader(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Results of one vLLM request."""

    id: str
    problem: str  # the first thing that went wrong; empty: nothing did
    dropped: int  # captured vectors that the arena had no space for
    prompt: list[int]  # token ids of an input session's, as last extended; otherwise empty
    turns: list[int]  # lengths of that prompt at each extension
    states: Natural  # positions whose state is in the data; see `segments`
    rows: list[RowsHeader]
    scores: list[ScoresHeader]
    resets: Natural = 0  # of the prefix cache when it began, if the front end keeps rows
    functions: list[FunctionCount] = []  # at this worker's taps
    # (number, first position) of each later one of its plan
    versions: list[tuple[Natural, Natural]] = []
    doses: list[DosesHeader] = []
    # It ran on these, ascending; none: on that of the start alone, without a name.
    weights: list[WeightState] = []

    @property
    def nbytes(self) -> int:
        blocks = sum([header.nbytes for header in self.rows]) + sum(
            [header.nbytes for header in self.scores]
        )
        return self.states * _STATE + blocks + sum([header.nbytes for header in self.doses])


class LeasedSegment(ProtocolMessage, frozen=True, array_like=True):
    """A segment of the worker's arena."""

    number: int
    fd: int
    nbytes: int


class Lease(ProtocolMessage, frozen=True, array_like=True):
    """A reader's hold on arena memory."""

    number: int
    segments: list[LeasedSegment]


class ResultHeader(ProtocolMessage, frozen=True):
    """Results under one name."""

    name: str  # the uid, or `partial_name` of it
    requests: list[RequestHeader]  # vLLM's of that uid, in the order of the data
    nbytes: Natural
    lease: Lease | None  # hold on the rows in the arena; None: rows are in the data
    resets: Natural = 0  # of the prefix cache by now, if the front end keeps rows


class StepChecksum(ProtocolMessage, frozen=True, array_like=True):
    """Checksums over all steps up to one."""

    step: int
    received: str  # of requests and batches; equal on all ranks
    executed: str  # of edits; equal on all ranks of a pipeline stage


def partial_name(uid: str) -> str:
    """Return the name of results of a request that still runs."""
    return f"{uid} piece"


# -- in the front end ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leased:
    """Rows in a worker's arena."""

    segments: dict[int, NDArray[np.uint8]]  # memory of those that they lie in, by number
    keep: bool  # they may stay there; otherwise they are copied


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """Results under one name from one worker. `leased`: rows in the arena; None: in the data."""

    worker: WorkerInfo
    header: ResultHeader
    data: bytes
    leased: Leased | None = None


WorkerAnswers = list[WorkerAnswer]


@dataclass(frozen=True, slots=True)
class ResultBlock:
    """Rows of some taps at the same positions. Their vectors have the same width."""

    taps: Sequence[Tap]  # in the order within a record
    codec: Codec
    positions: Ints  # ascending
    chunks: Sequence[Chunk]  # [positions, taps, bytes of a row] each, one after the other
    rank: int = 0
    is_leased: bool = False  # the chunks are in the worker's arena, which they keep in use
    parts: int = 1  # in which the ranks have the rows; 1: whole rows

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.chunks)

    @property
    def is_bare(self) -> bool:
        """Whether only the positions are known; the rows are elsewhere."""
        return not self.chunks

    def bare(self) -> ResultBlock:
        return replace(self, chunks=[])


class WorkerResult:
    """One worker's results for one completion; see `RequestHeader`."""

    def __init__(
        self, worker: WorkerInfo, header: RequestHeader, data: memoryview, leased: Leased | None
    ) -> None:
        """Create it from a header and its `header.nbytes` bytes; `leased`: see `WorkerAnswer`."""
        self.worker = worker
        self.problem = header.problem
        self.dropped = header.dropped
        self.resets = header.resets
        self.functions = header.functions
        self.versions = tuple(header.versions)
        self.has_doses = bool(header.doses)
        self.weights = tuple([(state.number, state.name) for state in header.weights])
        self._leased = leased
        end = header.states * _STATE
        self._states = data[:end]
        self._rows: list[tuple[RowsHeader, memoryview]] = []
        for rows in header.rows:
            self._rows.append((rows, data[end : end + rows.nbytes]))
            end += rows.nbytes
        self._scores: list[tuple[ScoresHeader, memoryview]] = []
        for scores in header.scores:
            self._scores.append((scores, data[end : end + scores.nbytes]))
            end += scores.nbytes
        self._doses: list[tuple[DosesHeader, memoryview]] = []
        for doses in header.doses:
            self._doses.append((doses, data[end : end + doses.nbytes]))
            end += doses.nbytes

    @property
    def states(self) -> NDArray[np.uint16]:
        """The state of each position; see `segments`."""
        return np.frombuffer(self._states, np.uint16)

    @property
    def outline(self) -> Hashable:
        """All that is known of the completion besides the values of its rows and scores."""
        rows = [
            (header.taps, header.codec, header.patterns, header.nbytes, *header.runs)
            for header, _ in self._rows
        ]
        scores = [(header.nbytes, *header.runs) for header, _ in self._scores]
        counts = [(count.index, count.calls, count.rows) for count in self.functions]
        known = self.problem, self.dropped, self.versions, tuple(rows), tuple(scores), tuple(counts)
        states = self._states.tobytes()
        return self.worker, self.weights, self._leased is None, states, known

    def forms(self) -> list[BlockForm] | None:
        """Return the forms of the blocks; None: rows are in the arena, large, or between others."""
        if self._leased is not None:
            return None
        forms = []
        for index, (header, data) in enumerate(self._rows):
            form = self._form(index, header, data)
            if form is None:
                return None
            forms.append(form)
        return forms

    def block(self, form: BlockForm) -> ResultBlock:
        """Return the rows of a form, which become tensors when they are first read."""
        part = form.part
        chunks = UnreadChunks(self._rows[form.nth][1], len(part.taps), part.row_bytes)
        rank = self.worker.tensor_rank
        return ResultBlock(part.taps, part.codec, form.positions, chunks, rank, False, part.parts)

    def blocks(self) -> list[ResultBlock]:
        return [block for header, data in self._rows for block in self._blocks(header, data)]

    def scores(self) -> list[tuple[Ints, Floats]]:
        """Return (positions, float32 [positions, slots]) of the probe scores."""
        scores = []
        for header, data in self._scores:
            count = count_of(header.runs)
            if header.nbytes % (max(1, count) * _SCORE) or (header.nbytes and not count):
                raise self._malformed(f"{header.nbytes} bytes of scores at {count} positions")
            values = np.frombuffer(data, np.float32)
            slots = header.nbytes // (max(1, count) * _SCORE)
            scores.append((expand_runs(header.runs), values.reshape(count, slots)))
        return scores

    def doses(self) -> list[DoseSums]:
        """Return the doses of edits of each version of the plan."""
        sent = []
        for header, data in self._doses:
            values, columns = np.frombuffer(data, np.float64), header.columns
            latest = values[3 * columns :].reshape(header.positions, 1 + columns)
            sums = values[: 3 * columns].reshape(3, columns)
            sent.append(DoseSums(header.version, sums, latest[:, 0], latest[:, 1:]))
        return sent

    def _blocks(self, header: RowsHeader, data: memoryview) -> list[ResultBlock]:
        layout = self._layout(header)
        records = self._records(header, data, layout.nbytes)
        positions = expand_runs(header.runs)
        is_leased = self._leased is not None and self._leased.keep
        rank = self.worker.tensor_rank
        return [
            ResultBlock(
                part.taps,
                part.codec,
                positions,
                [part.of(chunk) for chunk in records],
                rank,
                is_leased,
                part.parts,
            )
            for part in layout.parts
        ]

    def _layout(self, header: RowsHeader) -> RecordLayout:
        try:
            return layout_of(self.worker, header.taps, header.codec, header.patterns)
        except MidstreamError as error:
            raise self._malformed(str(error)) from None

    def _form(self, index: int, header: RowsHeader, data: memoryview) -> BlockForm | None:
        """Return the form of a header's block; None: it has several, is split or is large."""
        layout = self._layout(header)
        is_simple = len(layout.parts) == 1 and layout.parts[0].parts == 1
        if not is_simple or not 0 < len(data) <= _UNREAD_BYTES:
            return None
        self._check_size(header, layout.nbytes)
        return BlockForm(index, layout.parts[0], expand_runs(header.runs))

    def _check_size(self, header: RowsHeader, record: int) -> int:
        """Return the number of records of a header whose rows were sent."""
        count = count_of(header.runs)
        if header.nbytes != count * record:
            raise self._malformed(
                f"{header.nbytes} bytes of {count} positions and {record} bytes a record"
            )
        return count

    def _records(self, header: RowsHeader, data: memoryview, record: int) -> list[Chunk]:
        """Return the records of a header as [records, 1, bytes]; leased data are their places."""
        if self._leased is None:
            count = self._check_size(header, record)
            return [_tensor(data).view(count, 1, record)]
        count = count_of(header.runs)
        if header.nbytes % _RUN:
            raise self._malformed(f"{header.nbytes} bytes of runs in the arena")
        places = np.frombuffer(data, np.int64).reshape(-1, 3)
        if int(places[:, 2].sum()) != count:
            raise self._malformed(f"{places[:, 2].sum()} records at {count} positions")
        return _leased_chunks(places, self._leased, record)

    def _malformed(self, what: str) -> MessageError:
        return MessageError(f"worker {self.worker.place} sent malformed results: {what}")


def split(answers: WorkerAnswers, num_completions: int) -> dict[int, list[WorkerResult]]:
    """Return the results by completion; of several, vLLM's id begins with its index and "_"."""
    completions: dict[int, list[WorkerResult]] = {}
    for answer in answers:
        view, offset = memoryview(answer.data), 0
        sizes = [header.nbytes for header in answer.header.requests]
        described = sum(sizes)
        if described != len(view):
            raise MessageError(
                f"worker {answer.worker.place} sent {len(view)} bytes of results and described "
                f"{described}"
            )
        for header, size in zip(answer.header.requests, sizes, strict=True):
            data = view[offset : offset + size]
            offset += size
            result = WorkerResult(answer.worker, header, data, answer.leased)
            completions.setdefault(index_of(header.id, num_completions), []).append(result)
    return completions


def index_of(request_id: str, num_completions: int) -> int:
    """Return the index of the completion that one of vLLM's request ids stands for."""
    return 0 if num_completions == 1 else int(request_id.split("_", 1)[0])


def _leased_chunks(places: Ints, leased: Leased, record: int) -> list[Chunk]:
    """Return records in the arena, [records, 1, bytes of a record], one chunk per stretch of runs
    in the same segment; `places`: int64 [runs, 3]: segment, offset in it, number of records.
    """
    breaks = np.flatnonzero(np.diff(places[:, 0])) + 1
    chunks: list[Chunk] = []
    for runs in np.split(places, breaks):
        memory = leased.segments[int(runs[0, 0])]
        begins, lengths = runs[:, 1], runs[:, 2]
        if len(runs) == 1 and leased.keep:
            start, records = int(begins[0]), int(lengths[0])
            # A tensor over these bytes alone: whatever is saved of it has no rows of others.
            whole = torch.from_numpy(memory[start : start + records * record])
            chunks.append(whole.view(records, 1, record))
            continue
        offsets = np.repeat(begins, lengths) + within_runs(lengths) * record
        scattered = Scattered(memory, offsets, 1, record)
        chunks.append(scattered if leased.keep else scattered.records())
    return chunks


def _tensor(data: memoryview) -> Tensor:
    # A writable copy: tensors over read-only memory are a trap.
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
