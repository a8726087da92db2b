"""Rows on their way from the ring to the arena."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.stored import make_arena

from midstream.codecs import Full8, Raw, RowEncoding, parse_codec
from midstream.runtime.worker.tables.pattern_records import PatternColumns, PatternEncoding
from midstream.transport import ring_copy
from midstream.transport.arena import Arena, ArenaSettings
from midstream.transport.base import Parcel
from midstream.transport.ring_copy import (
    CpuTransport,
    CudaShipment,
    CudaTransport,
    EventPool,
    PinnedStaging,
    ScoreLog,
    host_transport,
)

# Elements of a row that are too many bytes for the model's own stream.
WIDE = ring_copy._SMALL // 4 + 1


def on_cuda(test):
    needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return pytest.mark.gpu(needs_cuda(test))


def ring(rows=8, width=3, device="cpu"):
    return torch.arange(rows * width, dtype=torch.float32, device=device).view(rows, width)


def tally(rows=4, device="cpu"):
    return torch.arange(rows * 4, dtype=torch.int32, device=device).view(rows, 4)


def scores(rows=4, device="cpu"):
    return torch.arange(rows * 2, dtype=torch.float32, device=device).view(rows, 2)


def encoding(codec, width):
    """Rows of a ring whose unit is a vector."""
    return RowEncoding.of(codec, (width,), width)


def raw(first, num_rows, width=3):
    return [parcel(first, num_rows, Raw(), width)]


def parcel(first, num_units, codec, width, dtype=torch.float32):
    used = encoding(codec, width)
    nbytes = num_units // used.units * used.row_bytes(dtype)
    return Parcel(first, num_units, nbytes, used)


def rows_of(shipment, nth=0, dtype=torch.float32, width=3):
    shipment.wait()
    extent = shipment.extents[nth]
    assert extent is not None
    return extent.memory.view(dtype).view(-1, width)


def test_rows_that_are_encoded_already_are_shipped_as_they_are():
    """As rows of attention, which are not made of the ring's units alone."""
    transport = host_transport(ring(), make_arena())
    encoded = torch.arange(2 * 8, dtype=torch.uint8).view(2, 8)
    columns = PatternColumns(0, 0, 0, 0, 6, "full", 1, (), 2)
    mixed = PatternEncoding(Raw(), (), 2, (), (columns,))
    first = transport.reserve(6)
    parcels = [Parcel(first, 4, 16, mixed, encoded), *raw(first + 4, 2)]
    shipment = transport.ship(parcels, tally(), scores())
    assert torch.equal(rows_of(shipment, 0, torch.uint8, 8), encoded)
    assert torch.equal(rows_of(shipment, 1), ring()[4:6])


def test_a_shipment_has_the_rows_of_its_step_and_its_tally_although_nothing_was_captured():
    transport = host_transport(ring(), make_arena())
    assert transport.capacity == 8
    shipment = transport.ship(raw(transport.reserve(5), 5), tally(), scores())
    assert shipment.ready()
    assert torch.equal(rows_of(shipment), ring()[:5])
    assert torch.equal(shipment.tally(), tally())
    assert torch.equal(shipment.scores().values, scores())
    shipment = transport.ship([], tally(), scores(0))
    assert shipment.extents == ()
    assert torch.equal(shipment.tally(), tally())
    assert shipment.scores().values.shape == (0, 2)
    transport = host_transport(ring().bfloat16(), make_arena())
    rows = parcel(0, 2, Raw(), 3, torch.bfloat16)
    shipment = transport.ship([rows], tally(), scores(0))
    assert torch.equal(rows_of(shipment, dtype=torch.bfloat16), ring().bfloat16()[:2])
    assert isinstance(host_transport(ring(), make_arena()), CpuTransport)


def test_what_was_shipped_or_copied_does_not_change_with_the_next_step():
    source, counts, read = ring(), tally(), scores()
    transport = host_transport(source, make_arena())
    shipment = transport.ship(raw(transport.reserve(8), 8), counts, read)
    for each in (source, counts, read):
        each.zero_()
    transport.ship(raw(0, 8), counts, read)
    assert torch.equal(rows_of(shipment), ring())
    assert torch.equal(shipment.tally(), tally())
    assert torch.equal(shipment.scores().values, scores())
    positions = torch.arange(4)
    copy = host_transport(ring(), make_arena()).copy(positions)
    positions.zero_()
    assert copy.values().tolist() == [0, 1, 2, 3]


def test_staging_memory_is_used_again_once_it_was_given_back_and_not_before():
    staging = PinnedStaging()
    first, second = staging.take(tally(5)), staging.take(tally(5))
    assert first.shape == second.shape == (5, 4)
    assert first.data_ptr() != second.data_ptr()
    staging.give(first)
    again = staging.take(tally(3))
    assert again.shape == (3, 4)
    assert again.data_ptr() == first.data_ptr()
    staging.give(again)
    larger = staging.take(tally(5))
    assert larger.data_ptr() == first.data_ptr()
    staging.give(larger)
    assert staging.take(tally(99)).shape == (99, 4)
    assert staging.take(tally(0)).shape == (0, 4)


def test_each_codec_has_its_own_part_of_the_ring_and_of_the_arena():
    transport = host_transport(ring(), make_arena())
    parcels = [*raw(0, 3), parcel(3, 5, Full8(), 3)]
    shipment = transport.ship(parcels, tally(), scores(0))
    assert torch.equal(rows_of(shipment), ring()[:3])
    reduced = rows_of(shipment, 1, torch.uint8, Full8().row_bytes(3, torch.float32))
    assert torch.equal(reduced, Full8().encode(ring()[3:]))


def test_of_what_is_dropped_the_tally_comes_all_the_same():
    transport = host_transport(ring(rows=4096), make_arena(4096, "drop"))
    kept = transport.ship(raw(0, 300), tally(), scores(0))
    lost = transport.ship(raw(0, 300), tally(), scores())
    assert lost.extents == (None,)
    assert torch.equal(lost.tally(), tally())
    assert torch.equal(lost.scores().values, scores())
    assert torch.equal(rows_of(kept), ring(rows=4096)[:300])


def test_a_step_may_fill_the_ring_but_no_more():
    transport = host_transport(ring(), make_arena())
    assert transport.reserve(8) == 0
    with pytest.raises(AssertionError, match="captures 9 units, .* holds 8: .*staging_bytes"):
        transport.reserve(9)


def pinned_arena():
    return Arena(ArenaSettings(64 << 20, 1 << 20, "block", Path("/tmp")), pin=True)


@on_cuda
def test_rows_arrive_in_pinned_memory_as_they_were_when_shipped():
    source, counts, read = ring(device="cuda"), tally(device="cuda"), scores(device="cuda")
    transport = host_transport(source, pinned_arena())
    shipment = transport.ship(raw(transport.reserve(5), 5), counts, read)
    counts.zero_()
    read.zero_()
    assert torch.equal(rows_of(shipment), ring()[:5])
    assert torch.equal(shipment.tally(), tally())
    assert torch.equal(shipment.scores().values, scores())
    assert shipment.ready()
    assert rows_of(shipment).is_pinned()
    assert not shipment.scores().values.is_pinned(), "it stays, and pinned memory is used again"
    transport = host_transport(ring(device="cuda"), pinned_arena())
    counts = tally(device="cuda")
    shipment = transport.ship([], counts, scores(0, device="cuda"))
    assert shipment.extents == ()
    assert shipment.scores().values.shape == (0, 2)
    assert torch.equal(shipment.tally(), tally())
    assert isinstance(host_transport(ring(device="cuda"), pinned_arena()), CudaTransport)


@on_cuda
@pytest.mark.parametrize("rows", [1, 3, 900])
def test_from_cuda_few_and_many_rows_of_several_parcels_arrive(rows):
    """Rows of 12 bytes."""
    source = ring(2 * rows + 5, device="cuda")
    transport = host_transport(source, pinned_arena())
    for _ in range(3):
        counts, read = tally(rows, device="cuda"), scores(rows, device="cuda")
        parcels = [*raw(1, rows), *raw(rows + 1, rows)]
        shipment = transport.ship(parcels, counts[: rows - 1], read)
        assert torch.equal(rows_of(shipment), ring(2 * rows + 5)[1 : rows + 1])
        assert torch.equal(rows_of(shipment, 1), ring(2 * rows + 5)[rows + 1 : -4])
        assert torch.equal(shipment.tally(), tally(rows)[:-1])
        assert torch.equal(shipment.scores().values, scores(rows))
        shipment.free_staging()


@on_cuda
@pytest.mark.parametrize("codec", ["raw", "full8", "rp8:k=64", "topk8:k=16"])
def test_steps_that_lap_the_ring_while_copies_are_under_way_lose_nothing(codec):
    rows, width, steps = 64, 4096, 200
    used = parse_codec(codec)
    source = torch.zeros(rows, width, device="cuda")
    base = torch.randn(width, generator=torch.Generator().manual_seed(0)).cuda()
    transport = host_transport(source, pinned_arena())
    shipments = []
    for step in range(steps):
        count = 1 + step * 7 % 40
        first = transport.reserve(count)
        assert first + count <= rows
        source[first : first + count] = base * float(step + 1)
        read = torch.full((5, 2), float(step), device="cuda")
        parcels = [parcel(first, count, used, width)]
        shipments.append((step, count, transport.ship(parcels, tally(device="cuda"), read)))
        read.fill_(-1)
    for step, count, shipment in shipments:
        assert bool((shipment.scores().values == float(step)).all())
        wanted = used.encode((base * float(step + 1)).expand(count, width).contiguous()).cpu()
        found = rows_of(shipment, 0, torch.uint8, wanted.shape[1])
        assert torch.equal(found, wanted), f"step {step} was overwritten"


@on_cuda
def test_what_is_beyond_the_memory_arrives_in_files_from_cuda(tmp_path):
    arena = Arena(ArenaSettings(1 << 20, 1 << 20, "spill", tmp_path), pin=True)
    source = torch.arange(1 << 18, dtype=torch.float32, device="cuda").view(-1, 1024)
    transport = host_transport(source, arena)
    shipments = [
        transport.ship(raw(0, 256, 1024), tally(device="cuda"), scores(0)) for _ in range(4)
    ]
    assert arena.used["disk_bytes"] == 3 << 20
    for shipment in shipments:
        assert torch.equal(rows_of(shipment, width=1024), source.cpu())


@on_cuda
def test_another_process_reads_what_arrived_from_cuda_without_a_copy():
    arena = pinned_arena()
    source = torch.arange(1 << 16, dtype=torch.float32, device="cuda").view(-1, 64)
    shipment = host_transport(source, arena).ship(raw(0, 1024, 64), tally(device="cuda"), scores(0))
    shipment.wait()
    (extent,) = shipment.extents
    assert extent is not None
    script = (
        "import sys, torch; from midstream.transport.memory import map_shared;"
        "pid, fd, size, offset, count = map(int, sys.argv[1:]);"
        "rows = map_shared(pid, fd, size)[offset:][:count].view(torch.float32);"
        "assert torch.equal(rows, torch.arange(count // 4, dtype=torch.float32))"
    )
    fd, size = arena.describe([extent.segment])[extent.segment]
    numbers = [os.getpid(), fd, size, extent.offset, extent.memory.numel()]
    subprocess.run([sys.executable, "-c", script, *map(str, numbers)], check=True)


@on_cuda
def test_on_cuda_a_copy_arrives_before_what_is_queued_after_it():
    positions = torch.arange(4, device="cuda")
    copy = host_transport(ring(device="cuda"), pinned_arena()).copy(positions)
    torch.cuda._sleep(10**9)
    later = torch.cuda.Event()
    positions.zero_()
    later.record()
    assert copy.values().tolist() == [0, 1, 2, 3]
    assert not later.query(), "it was waited for work that was queued after the copy"
    torch.cuda.synchronize()


class Event:
    """An event of a CUDA stream, which counts how often the driver is asked."""

    made = []

    def __init__(self):
        self.is_complete, self.asked, self.meanwhile = False, 0, None
        self.made.append(self)

    def record(self, _stream):
        self.is_complete = False

    def query(self):
        self.asked += 1
        return self.is_complete

    def synchronize(self):
        self.asked += 1
        self.is_complete = True
        if self.meanwhile is not None:
            self.meanwhile()


class Stream:
    """A CUDA stream, with the events that it waits for and the streams that were chosen since."""

    def __init__(self, _device=None):
        self.awaited, self.chosen = [], []

    def wait_event(self, event):
        self.awaited.append(event)


@pytest.fixture
def model_stream(monkeypatch):
    """The stream of a model, on a driver that is none."""
    stream = Stream()
    monkeypatch.setattr(Event, "made", [])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: stream)
    monkeypatch.setattr(torch.cuda, "set_stream", stream.chosen.append)
    monkeypatch.setattr(ring_copy, "_pinned", torch.empty_like)
    return stream


@pytest.mark.parametrize("waits", [False, True])
def test_the_driver_is_not_asked_again_about_a_shipment_that_is_complete(model_stream, waits):
    arrival = EventPool().record(model_stream)
    (event,) = Event.made
    shipment = CudaShipment(
        (), (tally(), torch.zeros(0, 1)), arrival, (PinnedStaging(), PinnedStaging()), ScoreLog()
    )
    assert not shipment.ready()
    assert event.asked == 0, "its own step asks in vain"
    assert not shipment.ready()
    if waits:
        assert torch.equal(shipment.tally(), tally())
    else:
        event.is_complete = True
        assert shipment.ready()
    shipment.wait()
    assert shipment.ready()
    shipment.scores()
    shipment.free_staging()
    assert event.asked == 2


def test_the_driver_is_asked_once_for_a_shipment_and_for_its_part_of_the_ring(model_stream):
    transport = CudaTransport(ring(width=WIDE), make_arena(1 << 22))
    shipment = transport.ship(raw(transport.reserve(5), 5, WIDE), tally(), scores(0))
    event = Event.made[-1]
    event.is_complete = True
    assert not shipment.ready(), "its own step asks first"
    assert transport.reserve(5) == 0
    shipment.free_staging()
    assert shipment.ready()
    assert event.asked == 1
    assert model_stream.awaited == []


def test_scores_stay_while_later_shipments_use_their_memory(model_stream, monkeypatch):
    made = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **kw: made.append(a) or empty(*a, **kw))
    transport = CudaTransport(ring(), make_arena())
    made.clear()
    shipments = []
    for step in range(20):
        shipment = transport.ship([], tally(), scores(5) + step)
        Event.made[-1].is_complete = True
        assert torch.equal(shipment.scores().values, scores(5) + step)
        shipment.free_staging()
        shipments.append(shipment)
    assert len(made) == 3, "pinned memory of a tally and of scores, and that of the log, made once"
    for step, shipment in enumerate(shipments):
        assert torch.equal(shipment.scores().values, scores(5) + step)


def test_scores_of_a_step_are_kept_whether_the_memory_was_made_in_inference_mode_or_not():
    log = ScoreLog()
    with torch.inference_mode():
        first = log.add(scores(5))
    second = log.add(scores(5) + 1)
    with torch.inference_mode():
        third = log.add(scores(5) + 2)
    assert first.memory is second.memory is third.memory
    for offset, added in enumerate((first, second, third)):
        assert torch.equal(added.values, scores(5) + offset)


def test_few_bytes_are_copied_on_the_models_stream_and_what_is_queued_need_not_wait(model_stream):
    transport = CudaTransport(ring(), make_arena())
    for _ in range(3):
        assert transport.reserve(5) == 0
        shipment = transport.ship(raw(0, 5), tally(), scores())
        assert torch.equal(rows_of(shipment), ring()[:5])
    assert model_stream.chosen == model_stream.awaited == []
    large = CudaTransport(ring(width=WIDE), make_arena(1 << 22))
    large.ship(raw(large.reserve(5), 5, WIDE), tally(), scores())
    assert len(model_stream.chosen) == 2, "the other stream was not chosen, and left again"


def test_what_is_queued_waits_for_the_copies_of_its_part_of_the_ring_alone(model_stream):
    transport = CudaTransport(ring(width=WIDE), make_arena(1 << 22))
    events = []
    for first in (0, 3):
        assert transport.reserve(3) == first
        transport.ship(raw(first, 3, WIDE), tally(), scores(0))
        events.append(Event.made[-1])
    assert transport.reserve(2) == 6
    assert model_stream.awaited == []
    assert transport.reserve(2) == 0
    assert model_stream.awaited == events[:1]
    assert transport.reserve(3) == 2
    assert model_stream.awaited == [events[0], *events]


@pytest.mark.parametrize("width", [3, WIDE])
@pytest.mark.parametrize("units", [0, 2])
def test_steps_that_arrive_one_after_the_other_make_no_new_event(model_stream, units, width):
    transport = CudaTransport(ring(width=width), make_arena(1 << 26))
    late = []
    for _ in range(50):
        parcels = raw(transport.reserve(units), units, width) if units else []
        now = transport.ship(parcels, tally(), scores()), transport.copy(torch.arange(3))
        for shipment, positions in late:
            shipment.wait()
            positions.values()
        late = [now]
    # One between the streams, and two steps' of a shipment and a copy each; one more is recorded
    # while the last of these are held.
    assert len(Event.made) <= 5


def test_an_event_is_not_recorded_again_while_a_thread_waits_for_it(model_stream):
    events = EventPool()
    arrival = events.record(model_stream)
    (event,) = Event.made
    others = []

    def meanwhile():
        # What another thread does while the driver lets it.
        assert not arrival.is_past()
        assert arrival.is_past()
        others.append(events.record(model_stream))

    event.meanwhile = meanwhile
    arrival.wait()
    assert len(Event.made) == 2
    events.record(model_stream)
    assert len(Event.made) == 2, "nobody waits for the event any more"


def test_of_a_shipment_without_scores_the_scores_are_empty(model_stream):
    transport = CudaTransport(ring(), make_arena())
    for rows in (0, 2, 0):
        shipment = transport.ship([], tally(), scores(rows))
        assert torch.equal(shipment.scores().values, scores(rows))
