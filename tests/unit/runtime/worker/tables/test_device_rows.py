"""Rows that stay on a worker's device, against a dictionary of them, and their way into a plan."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_steps import TAPS, WIDTH, make_buffers
from support.nightly import rounds
from support.refusals import refused

from midstream.errors import NoRoomError, SpecError
from midstream.ops.layout import Flags, Op
from midstream.plan import (
    Instruction,
    ResolvedCapture,
    ResolvedEdit,
    ResolvedPlan,
    Steps,
    Vector,
    Where,
)
from midstream.plan.resolve.wire import from_bytes, to_bytes
from midstream.plan.resolved import Pattern
from midstream.plan.vectors.algebra import unit
from midstream.plan.vectors.device_row import DeviceRow
from midstream.runtime.protocol.segments import WHOLE
from midstream.runtime.protocol.vector_update import VectorUpdate
from midstream.runtime.worker.plan_table import PlanTable
from midstream.runtime.worker.row_index import CapturedRowIndex
from midstream.runtime.worker.tables.codec_table import CodecTable
from midstream.runtime.worker.tables.device_rows import DeviceRowTable
from midstream.runtime.worker.tables.program_table import ProgramTable

ROOM, LONGEST = 24, 8
POST = ("resid_post", 1)


def leaving(*captures):
    """A plan that leaves rows of (taps, ranges) on the device."""
    resolved = []
    for taps, ranges in captures:
        names = tuple((f"device.{site}", layer) for site, layer in taps)
        pattern = Pattern("device", 1, (), (), tuple(taps), (1,) * len(taps))
        resolved.append(ResolvedCapture(names, Where(ranges), 0, pattern))
    return ResolvedPlan(LONGEST, (), tuple(resolved))


def table(taps=TAPS, rows=ROOM):
    return DeviceRowTable(rows, WIDTH, taps, torch.float32, torch.device("cpu"))


def placing(*rows):
    """A plan that puts rows at the positions from 2 on, in their order."""
    flags = Flags.COUNTED | Flags.FRESH | (Flags.ROW_BY_POSITION if rows[1:] else Flags.NONE)
    step = Instruction(Op.ADD_MATCHED, write=rows, a=1.0, flags=flags, first=2)
    where = Where(((2, 2 + len(rows)),))
    return ResolvedPlan(LONGEST, (ResolvedEdit("resid_post", 0, Steps((step,)), where, 0),), ())


@st.composite
def selections(draw):
    """Taps, and ranges of positions, of one request."""
    taps = draw(st.lists(st.sampled_from(list(TAPS)), min_size=1, max_size=3, unique=True))
    chosen = draw(st.lists(st.booleans(), min_size=LONGEST, max_size=LONGEST).filter(any))
    ranges = []
    for is_in, group in itertools.groupby(range(LONGEST), key=chosen.__getitem__):
        mine = list(group)
        if is_in:
            ranges.append((mine[0], mine[-1] + 1))
    return tuple(taps), tuple(ranges)


@given(st.data())
@settings(max_examples=rounds(suite=60, nightly=600), deadline=None)
def test_rows_are_those_that_were_stored_last_whatever_is_freed_in_between(data):
    here, known, numbers = table(), {}, itertools.count(1)
    for nth in range(data.draw(st.integers(1, 12))):
        uid = f"r{data.draw(st.integers(0, 4))}"
        match data.draw(st.sampled_from(["add", "store", "store", "free", "read"])):
            case "add":
                taps, ranges = data.draw(selections())
                used = sum(len(t) * n for name, (t, n, _, _) in known.items() if name != uid)
                count = sum(stop - start for start, stop in ranges)
                known.pop(uid, None)
                if used + len(taps) * count > ROOM:
                    with pytest.raises(NoRoomError):
                        here.acquire(uid, leaving((taps, ranges)))
                else:
                    here.acquire(uid, leaving((taps, ranges)))
                    known[uid] = taps, count, ranges, {}
            case "store" if uid in known:
                taps, _, ranges, rows = known[uid]
                tap = data.draw(st.sampled_from(taps))
                start, stop = data.draw(st.sampled_from(ranges))
                first = data.draw(st.integers(start, stop - 1))
                last = data.draw(st.integers(first + 1, stop))
                values = torch.stack([torch.full((WIDTH,), float(next(numbers))) for _ in
                                      range(first, last)])  # fmt: skip
                here.store(uid, TAPS[tap], first, values)
                rows.update(zip([(tap, p) for p in range(first, last)], values, strict=True))
            case "free":
                here.free([uid, "never there"])
                known.pop(uid, None)
            case "read" if known:
                rows = [
                    (DeviceRow(name, *place, WIDTH), value)
                    for name, (*_, stored) in known.items() for place, value in stored.items()
                ]  # fmt: skip
                if rows:
                    chosen = data.draw(st.permutations(rows))[: 1 + nth]
                    here.check(row for row, _ in chosen)
                    found = here.read([row for row, _ in chosen])
                    assert torch.equal(found, torch.stack([value for _, value in chosen]))
        here.check_integrity()
        assert len(here) == len(known)


def test_rows_of_a_later_chunk_leave_those_of_the_first():
    here = table()
    here.acquire("r", leaving(((POST,), ((0, 4),))))
    values = torch.arange(4.0)[:, None].expand(4, WIDTH) + 1
    here.store("r", TAPS[POST], 0, values[:3])
    here.store("r", TAPS[POST], 3, values[3:])
    found = here.read([DeviceRow("r", POST, position, WIDTH) for position in range(4)])
    assert torch.equal(found, values)


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=WIDTH, max_size=WIDTH).filter(any))
def test_a_row_of_length_1_is_that_of_the_host_bit_for_bit(numbers):
    here = table()
    here.acquire("a", leaving(([POST], ((3, 4),))))
    here.store("a", TAPS[POST], 3, torch.tensor([numbers]))
    row, vector = DeviceRow("a", POST, 3, WIDTH, 2.0), Vector.parse(numbers)
    found = here.read([row, unit(row), row.unit()])
    assert found[0].numpy().tobytes() == vector.data
    assert found[1].numpy().tobytes() == found[2].numpy().tobytes() == unit(vector).data


def test_many_rows_are_read_in_parts_in_their_order(monkeypatch):
    monkeypatch.setattr("midstream.runtime.worker.tables.device_rows._AT_ONCE", 3)
    here = table()
    here.acquire("a", leaving(([POST], ((0, 8),))))
    values = torch.arange(8 * WIDTH, dtype=torch.float32).view(8, WIDTH)
    here.store("a", TAPS[POST], 0, values)
    order = [7, 0, 3, 4, 2, 6, 1]
    assert torch.equal(here.read([DeviceRow("a", POST, p, WIDTH) for p in order]), values[order])


def test_rows_that_are_not_there_are_refused_by_their_request():
    here = table({POST: 0})
    here.acquire("a", leaving(([POST], ((2, 5),)), ([("resid_pre", 0)], ((0, 8),))))
    here.store("a", 0, 2, torch.ones(2, WIDTH))
    here.store("gone", 0, 2, torch.ones(1, WIDTH))
    here.check([DeviceRow("a", POST, 3, WIDTH)])
    cases = (
        (("b", POST, 3), "rows of request b are not on the device"),
        (("a", POST, 4), "request a left no row of resid_post at layer 1 at position 4"),
        (("a", POST, 1), "no row of resid_post at layer 1 at position 1"),
        (("a", POST, 5), "at position 5"),
        (("a", ("resid_pre", 0), 3), "no row of resid_pre at layer 0"),
    )
    refused(lambda place: here.check([DeviceRow(*place, WIDTH)]), *cases)
    here.weights = lambda: 1
    with pytest.raises(SpecError, match="rows of request a are of other weights"):
        here.check([DeviceRow("a", POST, 3, WIDTH)])


@given(st.booleans(), st.integers(0, 40), st.text(max_size=40))
def test_a_row_survives_its_bytes_and_its_name_is_all_that_it_is(is_unit, position, source):
    row = DeviceRow(source, POST, position, WIDTH, 2.5, is_unit)
    plan = placing(row, Vector.parse([1, 2, 3, 4]))
    found = from_bytes(to_bytes(plan))
    assert found == plan
    assert found.edits[0].steps.digest == plan.edits[0].steps.digest
    (other, _) = found.edits[0].steps.instructions[0].write
    assert (other.source, other.tap, other.position) == (source, POST, position)
    changed = [
        DeviceRow(source + "x", POST, position, WIDTH, is_unit=is_unit),
        DeviceRow(source, ("resid_post", 2), position, WIDTH, is_unit=is_unit),
        DeviceRow(source, ("resid_pre", 1), position, WIDTH, is_unit=is_unit),
        DeviceRow(source, POST, position + 1, WIDTH, is_unit=is_unit),
        DeviceRow(source, POST, position, WIDTH + 1, is_unit=is_unit),
        DeviceRow(source, POST, position, WIDTH, is_unit=not is_unit),
    ]
    assert len({row.digest, *(one.digest for one in changed)}) == 1 + len(changed)
    assert len({row, *changed}) == 1 + len(changed)
    assert row != Vector.parse([1, 2, 3, 4])


def test_a_plan_gets_its_rows_from_the_device_also_when_programs_move():
    buffers, here = make_buffers(bank_rows=8), table()
    plans = PlanTable(
        ProgramTable(buffers, here), CodecTable(buffers), CapturedRowIndex(), TAPS, WHOLE
    )
    here.acquire("a", leaving(([POST], ((0, 4),))))
    values = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(4))
    here.store("a", TAPS[POST], 0, values)
    rows = [DeviceRow("a", POST, p, WIDTH) for p in (2, 0)]
    between = Vector.parse([9.0, 8.0, 7.0, 6.0])

    def bank_of(plan):
        (segment,) = [piece for piece in plan.segments if piece.edits]
        first = int(buffers.table[TAPS["resid_post", 0], segment.program, 0])
        write = int(buffers.instructions[first, 2]) + 2 * WIDTH // buffers.unit
        return buffers.bank[write : write + 3 * WIDTH // buffers.unit].view(3, WIDTH)

    wanted = torch.stack([values[2], torch.from_numpy(np.array(between.numpy())), values[0]])
    first = plans.acquire(to_bytes(placing(*map(row_of, (1, 11)))))
    plan = plans.acquire(to_bytes(placing(rows[0], between, rows[1])))
    filler = [first, plans.acquire(to_bytes(placing(*map(row_of, (2, 12)))))]
    assert torch.equal(bank_of(plan), wanted)
    for other in filler:
        plans.release(other)
    # It needs the room of both, which is in two parts.
    plans.acquire(to_bytes(placing(*map(row_of, (3, 13, 23, 33, 43)))))
    assert torch.equal(bank_of(plan), wanted)
    with pytest.raises(SpecError, match="rows of request b are not on the device"):
        plans.acquire(to_bytes(placing(DeviceRow("b", POST, 0, WIDTH))))
    here.weights = lambda: 1  # since its first user began
    with pytest.raises(SpecError, match="rows of request a are of other weights"):
        plans.acquire(to_bytes(placing(rows[0], between, rows[1])))
    plans.update_vectors(VectorUpdate((), (), freed=("a", "b")))
    assert len(here) == 0


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_row_that_is_not_finite_is_none(norm):
    with pytest.raises(SpecError, match="resid_post at layer 1 at position 3 has a norm of"):
        DeviceRow("a", POST, 3, WIDTH, norm)


def row_of(number):
    return Vector.parse([float(number), 1.0, -2.0, 0.5])
