"""From the batch's requests to what each of its rows asks for. No loop over rows or layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from midstream.ops import layout
from midstream.runtime.protocol.runs import Ints, within_runs
from midstream.runtime.protocol.segments import APPLIED_0, CACHED, MOST_APPLIED, UNSEEN
from midstream.runtime.worker.request_state import RequestState, Segment
from midstream.runtime.worker.step.step_batch import StepBatch
from midstream.runtime.worker.step.step_plan import CodecBatch, StepPlan, TokenRuns
from midstream.runtime.worker.tables.program_table import ProgramTable

T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True, slots=True)
class _Decode:
    """A step in which every request that asks for something had one row: the next is often the
    same but for the positions.

    Attributes:
        slots: of the batch; the same array as long as its requests are the same.
        scheduled: tokens of each request.
        chosen: which of the batch's requests ask for something; `slot`, their slots.
        start, stop: the segments that they were in.
        active: which of the chosen have a program there.
    """

    plan: StepPlan
    slots: Ints
    scheduled: NDArray[np.int32]
    chosen: Ints
    slot: Ints
    start: Ints
    stop: Ints
    active: NDArray[np.bool_]


class Planner:
    """Knows the requests that ask for something and lays out each step for the device."""

    def __init__(self, tables: ProgramTable, max_model_len: int) -> None:
        self._tables = tables
        self._requests: dict[str, RequestState] = {}
        self._slot_of: dict[str, int] = {}
        self._by_slot: list[RequestState | None] = []
        self._free: list[int] = []
        # Per slot: the segment that its latest rows were in, and how far it has come.
        # start, stop, program, group, width, kind, scored, codec
        self._now = np.zeros((0, 8), np.int64)
        self._seen = np.zeros(0, np.int64)
        self._serial = np.zeros(0, np.int64)
        self._latest: tuple[list[str], Ints] | None = None
        self._decode: _Decode | None = None
        self._done = np.zeros((0, max_model_len), np.uint16)

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, request_id: str) -> RequestState | None:
        """The request of that id, if it asks for something and is not forgotten."""
        return self._requests.get(request_id)

    def all(self) -> Iterable[RequestState]:
        """Every request that is not forgotten."""
        return self._requests.values()

    def by_slot(self, slot: int) -> RequestState | None:
        """The request in a slot."""
        return self._by_slot[slot]

    def serials(self, slots: Ints) -> Ints:
        """The numbers of the requests in some slots."""
        return self._serial[slots]

    def new_slot(self) -> int:
        """A free slot; the arrays grow as needed."""
        if not self._free:
            size = len(self._by_slot)
            grown = max(64, 2 * size)
            self._now = _grow(self._now, grown)
            self._seen = _grow(self._seen, grown)
            self._serial = _grow(self._serial, grown)
            self._done = _grow(self._done, grown)
            self._by_slot += [None] * (grown - size)
            self._free = list(range(grown - 1, size - 1, -1))
        return self._free.pop()

    def add(self, request: RequestState) -> None:
        """Registers a request whose slot came from `new_slot`."""
        slot = request.slot
        self._latest = None
        self._requests[request.id] = request
        self._slot_of[request.id] = slot
        self._by_slot[slot] = request
        self._enter(slot, request.segments[0])
        self._seen[slot] = 0
        self._serial[slot] = request.serial

    def retire(self, request: RequestState) -> None:
        """The request has no more rows: a row of its id is another's, which may ask for nothing."""
        self._latest = self._decode = None
        if self._slot_of.get(request.id) == request.slot:
            del self._slot_of[request.id]

    def runs(self, request: RequestState) -> bool:
        """Whether a request may have more rows."""
        return self._slot_of.get(request.id) == request.slot

    def forget(self, request: RequestState) -> None:
        """Ends a request: its positions' states move into `request.done`, its slot is free."""
        slot = request.slot
        seen = int(self._seen[slot])
        request.done = self._done[slot, :seen].copy()
        self._done[slot, :seen] = UNSEEN
        self.retire(request)
        if self._requests.get(request.id) is request:
            del self._requests[request.id]
        self._by_slot[slot] = None
        self._free.append(slot)

    def plan(self, view: StepBatch, watch: bool) -> StepPlan | None:
        """The step's layout; None when no row of it asks for anything.

        Args:
            view: the batch.
            watch: make the first row active even if it asks for nothing, so that the taps that
                fire can be counted.
        """
        if not watch:
            plan = self._again(view)
            if plan is not None:
                return plan
        self._decode = None
        pieces = self._pieces(view)
        if pieces is None and not watch:
            return None
        plan = self._lay_out(pieces or _NOTHING, view.num_tokens, watch)
        if pieces is not None and not watch:
            self._remember(view, plan)
        return plan

    def _remember(self, view: StepBatch, plan: StepPlan) -> None:
        """Notes a step that the next may repeat."""
        positioned = self._tables.by_position[plan.pieces.program].any()
        pieces = plan.pieces
        if positioned or not pieces.exact or (pieces.length != 1).any():
            return
        slots = self._slots(view.request_ids)
        chosen = np.flatnonzero(slots >= 0)
        scheduled = np.array(view.scheduled)
        if (scheduled[chosen] != 1).any():
            return
        slot = slots[chosen]
        now = self._now[slot]
        active = now[:, 2] != layout.IDLE_PROGRAM
        # A request that crossed into a segment is laid out last: such a step is not the rule.
        if not np.array_equal(slot[active], plan.pieces.slot):
            return
        self._decode = _Decode(
            plan, slots, scheduled, chosen, slot, now[:, 0].copy(), now[:, 1].copy(), active
        )

    def _again(self, view: StepBatch) -> StepPlan | None:
        """The last step's plan at the new positions, if nothing else has changed."""
        last = self._decode
        if last is None or view.late is not None or self._slots(view.request_ids) is not last.slots:
            return None
        position = view.computed[last.chosen].astype(np.int64)
        if (
            not np.array_equal(view.scheduled, last.scheduled)
            or (position < last.start).any()
            or (position >= last.stop).any()
        ):
            return None
        self._advance(last.slot, position, position + 1)
        return last.plan.at(position[last.active])

    def record(self, plan: StepPlan, edits: Ints) -> None:
        """Notes what the device did for each active row."""
        mine = plan.slots >= 0
        states = np.minimum(APPLIED_0 + edits[mine], MOST_APPLIED)
        self._done[plan.slots[mine], plan.positions[mine]] = states

    def _pieces(self, view: StepBatch) -> TokenRuns | None:
        if not self._requests:
            return None
        slot = self._slots(view.request_ids)
        chosen = np.flatnonzero(slot >= 0)
        if chosen.size == 0:
            return None
        slot = slot[chosen]
        length = view.scheduled[chosen].astype(np.int64)
        row = (np.cumsum(view.scheduled, dtype=np.int64) - view.scheduled)[chosen]
        lowest, position = self._bounds(view, chosen, slot, row, length)
        stop = position + length
        exact = lowest is position or bool((lowest == position).all())

        now = self._now[slot]
        inside = (lowest >= now[:, 0]) & (stop <= now[:, 1])
        fields = np.column_stack((row, length, position, slot, now[:, 2:]))
        if not inside.all():
            crossing = [
                piece
                for nth in np.flatnonzero(~inside)
                for piece in self._cross(
                    int(slot[nth]), int(row[nth]), int(position[nth]), int(stop[nth])
                )
            ]
            fields = np.concatenate((fields[inside], np.array(crossing, np.int64).reshape(-1, 10)))
        fields = fields[fields[:, 4] != layout.IDLE_PROGRAM]
        if fields.shape[0] == 0:
            return None
        if fields[:, 9].any():
            fields = fields[np.argsort(fields[:, 9], kind="stable")]
        records = fields[:, 1] * fields[:, 6]
        record = np.cumsum(records) - records
        row, length, position, slot, program, group, width, kind, scored, codec = fields.T
        return TokenRuns(
            row, length, position, slot, program, group, width, kind, scored, codec, record, exact
        )

    def _bounds(
        self, view: StepBatch, chosen: Ints, slot: Ints, row: Ints, length: Ints
    ) -> tuple[Ints, Ints]:
        """The lowest and the highest position that the first row of each request may have."""
        position = view.computed[chosen].astype(np.int64)
        if view.late is None:
            self._advance(slot, position, position + length)
            return position, position
        lowest = np.maximum(position - view.late.slack()[chosen], 0)
        self._advance(slot, lowest, position + length)
        if self._undecided(slot, lowest, position, position + length):
            # What these rows are to get depends on where they are, and must be armed before their
            # forward, so the host waits for the device. It is rare: only where a request may just
            # be passing a bound of what it asks for.
            position = view.late.positions().cpu().numpy()[row].astype(np.int64)
            return position, position
        return lowest, position

    def _undecided(self, slot: Ints, lowest: Ints, position: Ints, stop: Ints) -> bool:
        """Whether there is a request whose rows may lie in one segment or in another."""
        now = self._now[slot]
        outside = (lowest < now[:, 0]) | (stop > now[:, 1])
        for nth in np.flatnonzero(outside & (lowest < position)).tolist():
            request = self._by_slot[int(slot[nth])]
            assert request is not None
            if len(request.segments_within(int(lowest[nth]), int(stop[nth]))) > 1:
                return True
        return False

    def _advance(self, slot: Ints, position: Ints, stop: Ints) -> None:
        """Notes how far requests have come; what lies before a row and was never computed came
        from the prefix cache.

        Args:
            slot: of each request.
            position: of its first row, or a lower bound.
            stop: of its last row and one more, or an upper bound.
        """
        seen = self._seen[slot]
        skipped = position > seen
        if skipped.any():
            for nth in np.flatnonzero(skipped).tolist():
                states = self._done[slot[nth], seen[nth] : position[nth]]
                states[states == UNSEEN] = CACHED
        self._seen[slot] = np.maximum(seen, stop)

    def _slots(self, request_ids: Sequence[str]) -> Ints:
        """Each request's slot, −1 for those that ask for nothing; most steps repeat the last."""
        if self._latest is None or self._latest[0] != request_ids:
            find = self._slot_of.get
            slots = np.fromiter((find(name, -1) for name in request_ids), np.int64)
            self._latest = (list(request_ids), slots)
        return self._latest[1]

    def _cross(self, slot: int, row: int, position: int, stop: int) -> list[list[int]]:
        """The pieces of a run of rows that is not within the segment that its slot was in."""
        request = self._by_slot[slot]
        assert request is not None
        pieces = []
        for segment in request.segments_within(position, stop):
            start, end = max(position, segment.start), min(stop, segment.stop)
            self._enter(slot, segment)
            state = self._now[slot, 2:].tolist()
            pieces.append([row + start - position, end - start, start, slot, *state])
        return pieces

    def _enter(self, slot: int, segment: Segment) -> None:
        self._now[slot] = (
            segment.start,
            segment.stop,
            segment.program,
            segment.group,
            len(segment.taps),
            segment.kind,
            segment.scored,
            segment.codec,
        )

    def _lay_out(self, pieces: TokenRuns, num_tokens: int, watch: bool) -> StepPlan:
        length = pieces.length
        within = within_runs(length)
        active = np.repeat(pieces.row, length) + within
        width = np.repeat(pieces.width, length)
        records = np.repeat(pieces.record, length) + within * width + 1
        program = np.repeat(pieces.program, length)
        tokens = np.zeros((num_tokens, layout.TOKEN_COLUMNS), np.int32)
        tokens[active, layout.PROGRAM] = program
        tokens[active, layout.GROUP] = np.repeat(pieces.group, length)
        tokens[active, layout.RECORD] = np.where(width > 0, records, 0)
        slots = np.repeat(pieces.slot, length)
        positions = np.repeat(pieces.position, length) + within
        tables = self._tables
        # Only where it is read: what does not change from step to step need not be sent again.
        reads_position = tables.by_position[program]
        told = not pieces.exact and bool(reads_position.any())
        # A position that the device fills in is none here, so that no exact step looks like it.
        tokens[active, layout.POSITION] = np.where(reads_position, -1 if told else positions, 0)
        fewest = tables.fewest[program].astype(np.int64)
        most = tables.most[program].astype(np.int64)
        if watch and tokens[0, layout.PROGRAM] == layout.IDLE_PROGRAM:
            tokens[0, layout.PROGRAM] = layout.WATCH_PROGRAM
            active, slots, positions = (
                np.append(array, value)
                for array, value in ((active, 0), (slots, -1), (positions, 0))
            )
            fewest, most, width = (np.append(each, 0) for each in (fewest, most, width))
        return StepPlan(
            tokens=tokens,
            num_records=int((length * pieces.width).sum()),
            active=active,
            slots=slots,
            positions=positions,
            fewest=fewest,
            most=most,
            captures=width,
            by_id=bool(tables.by_id[program].any()),
            scored=bool(pieces.scored.any()),
            told=told,
            pieces=pieces,
            loads=self._loads(pieces),
        )

    def _loads(self, pieces: TokenRuns) -> tuple[CodecBatch, ...]:
        rows = pieces.length * pieces.width
        found = []
        first = 0
        for codec in sorted(set(pieces.codec[rows > 0].tolist())):
            mine = np.flatnonzero((rows > 0) & (pieces.codec == codec))
            count = int(rows[mine].sum())
            found.append(
                CodecBatch(
                    codec=codec,
                    first=first,
                    num_rows=count,
                    mine=mine,
                    serial=self._serial[pieces.slot[mine]],
                    length=pieces.length[mine],
                    kind=pieces.kind[mine],
                    record=pieces.record[mine] - first,
                )
            )
            first += count
        return tuple(found)


_EMPTY = np.zeros(0, np.int64)
_NOTHING = TokenRuns(*(_EMPTY,) * 11, True)


def _grow(array: NDArray[T], rows: int) -> NDArray[T]:
    # zeros() of a large array takes memory only where it is written.
    grown = np.zeros((rows, *array.shape[1:]), array.dtype)
    grown[: array.shape[0]] = array
    return grown
