"""Plans of running requests; equal bytes are read, cut and written to the device once."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from midstream.errors import NoRoomError
from midstream.plan import ResolvedPlan, Vector
from midstream.plan.resolve.wire import from_bytes
from midstream.runtime.protocol.rank_parts import part_of_steps
from midstream.runtime.protocol.segments import (
    FOREVER,
    PlanSegment,
    RankShare,
    cut,
    device_rows_of,
)
from midstream.runtime.protocol.vector_update import VectorUpdate
from midstream.runtime.worker.request_state import (
    RankPlan,
    Segment,
    acquire_segments,
    release_segments,
)
from midstream.runtime.worker.row_index import CapturedRowIndex
from midstream.runtime.worker.tables.codec_table import CodecTable
from midstream.runtime.worker.tables.program_table import ProgramTable
from midstream.sites import Tap

_CACHED_PLANS = 256


class VectorStore:
    """Vectors by digest, each dropped once every front end that added it has dropped it."""

    def __init__(self) -> None:
        self._vectors: dict[str, Vector] = {}
        self._front_ends: dict[str, set[int]] = {}  # that added it, by digest
        self.by_digest: Mapping[str, Vector] = MappingProxyType(self._vectors)

    def update(self, update: VectorUpdate) -> None:
        """Drop vectors of a front end, then store new ones."""
        for digest in update.dropped:
            front_ends = self._front_ends.get(digest, set())
            front_ends.discard(update.front_end)
            if not front_ends:
                self._vectors.pop(digest, None)
                self._front_ends.pop(digest, None)
        for data in update.added:
            vector = Vector(data)
            self._vectors.setdefault(vector.digest, vector)
            self._front_ends.setdefault(vector.digest, set()).add(update.front_end)

    def count(self, front_end: int) -> int:
        return sum(front_end in front_ends for front_ends in self._front_ends.values())


class PlanTable:
    """Owner of the plans that requests use, and of the vectors that plans may name."""

    def __init__(
        self,
        tables: ProgramTable,
        codecs: CodecTable,
        rows: CapturedRowIndex[Any],
        taps: Mapping[Tap, int],
        share: RankShare,
    ) -> None:
        self._tables = tables
        self._device_rows = tables.instructions.device_rows
        self._codecs = codecs
        self._rows = rows
        self._taps = dict(taps)
        self._share = share
        self._vectors = VectorStore()
        self._plans: dict[bytes, RankPlan] = {}
        # Plans without a user, the one that was used last at the end.
        self._unused: dict[bytes, RankPlan] = {}
        self._acquired = 0
        # Requests one after the other often have the same plan, too.
        self._parse = functools.lru_cache(maxsize=_CACHED_PLANS)(self._parse_and_cut)

    def update_vectors(self, update: VectorUpdate) -> None:
        """Store vectors that plans of later requests name, and drop others."""
        self._vectors.update(update)
        if self._device_rows is not None:
            self._device_rows.free(update.freed)
        if update.dropped:
            self._parse.cache_clear()  # its plans keep their vectors

    @property
    def vectors(self) -> Collection[str]:
        """Digests of the vectors that plans may name."""
        return self._vectors.by_digest.keys()

    def count_vectors(self, front_end: int) -> int:
        return self._vectors.count(front_end)

    def acquire(self, packed: bytes) -> RankPlan:
        """Return a plan for one more request. Pair with `release`."""
        plan = self._plans.get(packed)
        if plan is not None:
            if self._device_rows:  # it may have rows of the weights that its first user had
                self._check_rows(plan.resolved)
        else:
            resolved, pieces = self._parse(packed)
            self._check_rows(resolved)
            try:
                segments = self._acquire_segments(pieces, resolved.codec)
            except NoRoomError:
                self.drop_unused()
                segments = self._acquire_segments(pieces, resolved.codec)
            self._acquired += 1
            plan = self._plans[packed] = RankPlan(self._acquired, packed, resolved, segments)
        self._unused.pop(packed, None)
        plan.users += 1
        return plan

    def _check_rows(self, plan: ResolvedPlan) -> None:
        """Check that the rows on the device are here that this rank's edits of a plan need."""
        if self._device_rows is not None:
            every = device_rows_of(plan)
            mine = [row for edit, row in every if (edit.site, edit.layer) in self._taps]
            self._device_rows.check(mine)

    def without_work(self, packed: bytes) -> list[Segment]:
        """Return a plan's segments without edits and captures, as another rank may run it."""
        bare = [PlanSegment(0, FOREVER, (), (), False, (), False)]
        with suppress(Exception):  # then no rank can read it
            _, pieces = self._parse(packed)
            bare = [
                piece._replace(edits=(), taps=(), scored=False, patterns=()) for piece in pieces
            ]
        return self._acquire_segments(bare, "raw")

    def _acquire_segments(self, pieces: list[PlanSegment], codec: str) -> list[Segment]:
        return acquire_segments(pieces, self._tables, self._rows, self._codecs, codec)

    def release(self, plan: RankPlan) -> None:
        plan.users -= 1
        if plan.users:
            return
        if plan.resolved.edits or plan.resolved.probes:
            # Vectors are not kept beyond their requests, also those of other ranks' layers.
            self._free(plan)
            return
        self._unused[plan.packed] = plan
        if len(self._unused) > _CACHED_PLANS:
            self._free(self._unused.pop(next(iter(self._unused))))

    def drop_unused(self) -> None:
        """Free plans that no request uses; those without edits are kept, as they often recur."""
        for plan in self._unused.values():
            self._free(plan)
        self._unused.clear()

    def _free(self, plan: RankPlan) -> None:
        del self._plans[plan.packed]
        release_segments(plan.segments, self._tables)

    def __len__(self) -> int:
        return len(self._plans) - len(self._unused)

    def _parse_and_cut(self, packed: bytes) -> tuple[ResolvedPlan, list[PlanSegment]]:
        resolved = from_bytes(packed, self._vectors.by_digest)
        return resolved, [self._own_part(piece) for piece in cut(resolved, self._taps, self._share)]

    def _own_part(self, piece: PlanSegment) -> PlanSegment:
        """Return a piece of a plan whose edits are those of this rank's parts of the vectors."""
        share, edits = self._share, []
        if all(parts == 1 for parts in share.parts):
            return piece
        for edit in piece.edits:
            parts, part = share.parts[edit.tap], share.rank // share.copies(edit.tap)
            if parts > 1:
                # A part of a vector has no dose of the whole.
                edit = replace(edit, steps=part_of_steps(edit.steps, part, parts), dose=None)
            edits.append(edit)
        return piece._replace(edits=tuple(edits))
