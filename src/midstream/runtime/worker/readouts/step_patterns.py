"""Rows and scores that are made of the captured queries of a step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from midstream.plan.resolved import LENGTHS, ON_DEVICE, REDUCING
from midstream.runtime.protocol.runs import within_runs
from midstream.runtime.worker.readouts.logits import StepLogits
from midstream.runtime.worker.readouts.queries import queries_of
from midstream.runtime.worker.readouts.reader import PatternReader
from midstream.runtime.worker.reductions import CountedRows, Reductions, place_of
from midstream.runtime.worker.step.in_flight import PreparedStep
from midstream.runtime.worker.step.slot_table import SlotTable
from midstream.runtime.worker.step.step_plan import CodecBatch
from midstream.runtime.worker.tables.codec_table import CodecTable
from midstream.runtime.worker.tables.device_buffers import Buffers, on_device
from midstream.runtime.worker.tables.device_rows import DeviceRowTable
from midstream.runtime.worker.tables.pattern_records import PatternEncoding


class StepPatterns:
    """Rows and scores of the batches of a step, after its forward pass was queued."""

    def __init__(
        self,
        buffers: Buffers,
        slots: SlotTable,
        codecs: CodecTable,
        reader: PatternReader | None,
        reductions: Reductions,
        device_rows: DeviceRowTable,
    ) -> None:
        self._buffers = buffers
        self._slots = slots
        self._codecs = codecs
        self._reader = reader
        self._reductions = reductions
        self._device_rows = device_rows

    def compute(self, prepared: PreparedStep) -> StepLogits:
        """Copy a step's rows that stay on the device, write scores of attention, and return the
        logits asked for.
        """
        if len(self._device_rows):
            self._copy(prepared)
        if self._reader is None:
            return {}
        self._score(prepared, self._reader)
        return self._reader.logits(prepared, self._codecs.encoding, self._slots, self._buffers.ring)

    def encode(
        self, prepared: PreparedStep, batch: CodecBatch, logits: StepLogits
    ) -> Tensor | None:
        """Return encoded records of a batch, [n, row_bytes]; None: the ring's units suffice."""
        encoding = self._codecs.encoding(batch.codec)
        if not isinstance(encoding, PatternEncoding):
            return None
        assert self._reader is not None
        records = self._records(prepared, batch, encoding)
        queries = queries_of(prepared, batch, self._slots, records.device)
        mine = _logits_of(prepared, batch, logits, encoding.units)
        reduced = self._reduced(prepared, batch, encoding, records)
        device = next(iter(mine.values())).device if mine else records.device
        mine |= {index: rows.to(device) for index, rows in reduced.items()}
        return self._reader.encode(encoding, records, *queries, mine)

    def count(self, prepared: PreparedStep | None, step: int) -> None:
        """Add a step's rows to its requests' sums; None: it has no program. A request whose cached
        tokens' sums are not there fails.
        """
        if not len(self._reductions):
            return
        pieces: dict[int, list[CountedRows]] = {}
        for encoding, slot, position, records in () if prepared is None else self._runs(prepared):
            if encoding.has_sums:
                rows = CountedRows(position, encoding, records)
                pieces.setdefault(slot, []).append(rows)
        for slot, cached in self._reductions.count(pieces, step).items():
            request = self._slots.by_slot(slot)
            if request is not None:
                self._slots.fail(request, cached, f"no sums are kept of its {cached} cached tokens")

    def _copy(self, prepared: PreparedStep) -> None:
        """Copy a step's rows that stay on the device; after preemption to the same places."""
        for encoding, slot, position, records in self._runs(prepared):
            request = self._slots.by_slot(slot)
            for columns in encoding.patterns:
                if request is not None and columns.kind == ON_DEVICE:
                    rows = records[:, columns.start : columns.start + columns.width]
                    self._device_rows.store(request.uid, columns.tap, position, rows)

    def _runs(self, prepared: PreparedStep) -> Iterator[tuple[PatternEncoding, int, int, Tensor]]:
        """Yield the runs of a step's requests whose rows are counted or stay on the device: the
        encoding, the slot, the first position and the records [n, numbers].
        """
        for batch in prepared.plan.batches:
            encoding = self._codecs.encoding(batch.codec)
            if not isinstance(encoding, PatternEncoding):
                continue
            if not (encoding.has_sums or encoding.leaves_rows):
                continue
            assert prepared is not None
            runs, records = prepared.plan.runs, self._records(prepared, batch, encoding)
            first = (batch.record // encoding.units).tolist()
            columns = runs.slot, runs.position, runs.length
            every = zip(first, *(column[batch.runs].tolist() for column in columns), strict=True)
            for record, slot, position, length in every:
                yield encoding, slot, position, records[record : record + length]

    def _reduced(
        self, prepared: PreparedStep, batch: CodecBatch, encoding: PatternEncoding, records: Tensor
    ) -> dict[int, Tensor]:
        """Return norms and reduced rows of records, float32 [n, size], by number of the pattern."""
        rows = {}
        for index, columns in enumerate(encoding.patterns):
            if not columns.is_row:
                continue
            if columns.kind in LENGTHS:
                vectors = records[:, columns.start : columns.start + columns.width]
                norms = torch.linalg.vector_norm(vectors, dim=1, keepdim=True, dtype=torch.float64)
                rows[index] = norms.float()
            elif columns.kind in REDUCING:
                length = batch.length
                slots = np.repeat(prepared.plan.runs.slot[batch.runs], length).tolist()
                place = place_of(encoding, columns)
                rows[index] = self._reductions.rows(slots, columns, place)
        return rows

    def _score(self, prepared: PreparedStep, reader: PatternReader) -> None:
        runs, scores = prepared.plan.runs, self._buffers.scores
        for batch in prepared.plan.batches:
            encoding = self._codecs.encoding(batch.codec)
            if not isinstance(encoding, PatternEncoding) or not encoding.has_scores:
                continue
            records = self._records(prepared, batch, encoding)
            queries = queries_of(prepared, batch, self._slots, records.device)
            length = runs.length[batch.runs]
            rows = np.repeat(runs.row[batch.runs], length) + within_runs(length)
            places = on_device(torch.from_numpy(rows), scores.device)
            reader.score(encoding, records, *queries, places, scores)

    def _records(
        self, prepared: PreparedStep, batch: CodecBatch, encoding: PatternEncoding
    ) -> Tensor:
        first = prepared.first + batch.first
        units = self._buffers.ring[first : first + batch.num_units]
        return units.view(-1, encoding.units * units.shape[1])


def _logits_of(
    prepared: PreparedStep, batch: CodecBatch, logits: StepLogits, units: int
) -> dict[int, Tensor]:
    """Return the logits of all or some records of an encoding, by number of the pattern."""
    if not logits:
        return {}
    (first,) = [every.first for every in prepared.plan.batches if every.codec == batch.codec]
    begin, stop = (batch.first - first) // units, (batch.first - first + batch.num_units) // units
    return {
        index: rows[begin:stop] for (codec, index), rows in logits.items() if codec == batch.codec
    }
