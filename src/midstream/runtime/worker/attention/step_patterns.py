"""Rows and scores that are made of the captured queries of a step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from midstream.runtime.protocol.runs import within_runs
from midstream.runtime.worker.attention.queries import queries_of
from midstream.runtime.worker.attention.reader import PatternReader
from midstream.runtime.worker.step.in_flight import PreparedStep
from midstream.runtime.worker.step.slot_table import SlotTable
from midstream.runtime.worker.step.step_plan import CodecBatch
from midstream.runtime.worker.tables.codec_table import CodecTable
from midstream.runtime.worker.tables.device_buffers import Buffers, on_device
from midstream.runtime.worker.tables.pattern_records import PatternEncoding


class StepPatterns:
    """Rows and scores of the batches of a step, after its forward pass was queued."""

    def __init__(
        self, buffers: Buffers, slots: SlotTable, codecs: CodecTable, reader: PatternReader | None
    ) -> None:
        """Args:
        buffers: the rank's buffers; queries are in its ring.
        slots: the requests.
        codecs: the encodings of captured rows.
        reader: computes rows and scores; None: no request asks for any.
        """
        self._buffers = buffers
        self._slots = slots
        self._codecs = codecs
        self._reader = reader

    def has_rows(self, batch: CodecBatch) -> bool:
        """Return whether records of a batch have rows; if not, scores alone are made of them."""
        encoding = self._codecs.encoding(batch.codec)
        return not isinstance(encoding, PatternEncoding) or encoding.has_rows

    def encode(self, prepared: PreparedStep, batch: CodecBatch) -> Tensor | None:
        """Return the encoded records of a batch, uint8 [n, row_bytes]; None if they are made of
        the batch's units of the ring alone.
        """
        encoding = self._codecs.encoding(batch.codec)
        if not isinstance(encoding, PatternEncoding):
            return None
        assert self._reader is not None
        records = self._records(prepared, batch, encoding)
        queries = queries_of(prepared, batch, self._slots, records.device)
        return self._reader.encode(encoding, records, *queries)

    def score(self, prepared: PreparedStep) -> None:
        """Write the scores that are made of attention into the buffer of scores."""
        runs, scores = prepared.plan.runs, self._buffers.scores
        for batch in prepared.plan.batches:
            encoding = self._codecs.encoding(batch.codec)
            if not isinstance(encoding, PatternEncoding) or not encoding.has_scores:
                continue
            assert self._reader is not None
            records = self._records(prepared, batch, encoding)
            queries = queries_of(prepared, batch, self._slots, records.device)
            length = runs.length[batch.runs]
            rows = np.repeat(runs.row[batch.runs], length) + within_runs(length)
            places = on_device(torch.from_numpy(rows), scores.device)
            self._reader.score(encoding, records, *queries, places, scores)

    def _records(
        self, prepared: PreparedStep, batch: CodecBatch, encoding: PatternEncoding
    ) -> Tensor:
        """Return the records of a batch in the ring, [n, numbers]."""
        first = prepared.first + batch.first
        units = self._buffers.ring[first : first + batch.num_units]
        return units.view(-1, encoding.units * units.shape[1])
