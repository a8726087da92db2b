"""What one worker sent for one completion, cut by its header; see `results` for the layout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.codecs import Codec, parse_codec
from midstream.results.encoded_rows import Chunk, Scattered
from midstream.runtime.protocol.runs import Ints, within_runs
from midstream.sites import Tap

WorkerAnswers = list[tuple[dict[str, Any], bytes]]


class ResultBlock(NamedTuple):
    """Rows of some taps at the same positions.

    Attributes:
        taps: in the order in which a record has them.
        codec: how the rows are encoded.
        positions: int64 [n], ascending.
        chunks: [positions, taps, bytes of a row] each, one after the other.
    """

    taps: list[Tap]
    codec: Codec
    positions: Ints
    chunks: list[Chunk]

    @property
    def is_bare(self) -> bool:
        """Whether it only says where rows were, which are elsewhere."""
        return not self.chunks

    def bare(self) -> ResultBlock:
        """The same without the rows."""
        return self._replace(chunks=[])


class WorkerResult:
    """One worker's share of one completion.

    Attributes:
        worker: the worker's own description.
        problem: what went wrong there, if anything.
        done: uint16, the state of each position; see `requests`.
        dropped: how many captured vectors found no room there.
        size: how many bytes of the data it took.
    """

    def __init__(
        self,
        worker: dict[str, Any],
        entry: dict[str, Any],
        data: memoryview,
        leased: Leased | None,
    ) -> None:
        self.worker = worker
        self.dropped: int = entry["dropped"]
        self._leased = leased
        self.problem: str = entry["problem"]
        size = entry["done"] * 2
        self.done: NDArray[np.uint16] = np.frombuffer(data[:size], np.uint16)
        self._blocks: list[tuple[dict[str, Any], memoryview]] = []
        self._scores: list[tuple[dict[str, Any], memoryview]] = []
        for kept, headers in ((self._blocks, entry["blocks"]), (self._scores, entry["scores"])):
            for header in headers:
                kept.append((header, data[size : size + header["nbytes"]]))
                size += header["nbytes"]
        self.size = size

    def blocks(self) -> list[ResultBlock]:
        """The captured rows."""
        hidden, dtype = self.worker["hidden_size"], getattr(torch, self.worker["dtype"])
        names = self.worker["taps"]
        found = []
        for header, data in self._blocks:
            positions = expand((first, first + length) for first, length in header["runs"])
            taps = [(site, layer) for site, layer in map(names.__getitem__, header["taps"])]
            codec = parse_codec(header["codec"])
            width = codec.row_bytes(hidden, dtype)
            if self._leased is None:
                rows = _tensor(data, torch.uint8)
                chunks: list[Chunk] = [rows.view(positions.size, len(taps), width)]
            else:
                places = np.frombuffer(data, np.int64).reshape(-1, 3)
                chunks = _leased_chunks(places, self._leased, len(taps), width)
            found.append(ResultBlock(taps, codec, positions, chunks))
        return found

    def scores(self) -> list[tuple[Ints, Tensor]]:
        """(positions, float32 [positions, slots]) of what the probes read."""
        found = []
        for header, data in self._scores:
            positions = expand((first, first + length) for first, length in header["runs"])
            found.append((positions, _tensor(data, torch.float32).view(positions.size, -1)))
        return found


def split(answers: WorkerAnswers, num_completions: int) -> dict[int, list[WorkerResult]]:
    """Each completion's parts. With several completions vLLM runs each as a request of its own,
    whose id begins with its index and an underscore.
    """
    children: dict[int, list[WorkerResult]] = {}
    for header, data in answers:
        view, offset = memoryview(data), 0
        for entry in header["requests"]:
            part = WorkerResult(header["worker"], entry, view[offset:], header["leased"])
            offset += part.size
            children.setdefault(index_of(entry["id"], num_completions), []).append(part)
    return children


def index_of(request_id: str, num_completions: int) -> int:
    """Which completion vLLM's id of one is for."""
    return 0 if num_completions == 1 else int(request_id.split("_", 1)[0])


def expand(ranges: Iterable[tuple[int, int]]) -> Ints:
    """The positions in [start, stop) ranges."""
    runs = [np.arange(start, stop) for start, stop in ranges]
    return np.concatenate(runs) if runs else np.zeros(0, np.int64)


def _leased_chunks(places: Ints, leased: Leased, taps: int, width: int) -> list[Chunk]:
    """Records where they lie, those together that lie in one segment.

    Args:
        places: int64 [runs, 3]: segment, offset in it, how many records.
        leased: the segments.
        taps: rows of a record.
        width: bytes of a row.
    """
    breaks = np.flatnonzero(np.diff(places[:, 0])) + 1
    chunks: list[Chunk] = []
    for runs in np.split(places, breaks):
        memory = leased.segments[int(runs[0, 0])]
        begins, lengths = runs[:, 1], runs[:, 2]
        if len(runs) == 1 and leased.keep:
            start, records = int(begins[0]), int(lengths[0])
            whole = memory[start : start + records * taps * width]
            chunks.append(whole.view(records, taps, width))
            continue
        offsets = np.repeat(begins, lengths) + within_runs(lengths) * (taps * width)
        found = Scattered(memory, offsets, taps, width)
        chunks.append(found if leased.keep else found.records())
    return chunks


def _tensor(data: memoryview, dtype: torch.dtype) -> Tensor:
    # A writable copy: tensors over read-only memory are a trap for whoever writes to them.
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.zeros(0, dtype=dtype)


def piece_of(uid: str) -> str:
    """The name under which rows of a uid are held that are handed over while it runs."""
    return f"{uid} piece"


@dataclass(frozen=True, slots=True)
class Leased:
    """Rows of a worker's arena.

    Attributes:
        segments: the memory of each segment that they lie in.
        keep: whether they may stay there; otherwise they are to be copied.
    """

    segments: dict[int, Tensor]
    keep: bool
