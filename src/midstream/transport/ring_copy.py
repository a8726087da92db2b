"""Transports from the staging ring to the arena: a copy stream on CUDA, a plain copy on the CPU."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from midstream.codecs import Raw
from midstream.transport.arena import Arena, Extent
from midstream.transport.base import Copy, HostScores, Parcel, Shipment, Transport

# Bytes of a step's rows up to which they are copied on the model's own stream. The device copies
# them in ten microseconds; handing them to another stream takes the host longer.
_SMALL = 1 << 19
_ROWS = 1 << 12  # of the memory of scores, at least


def host_transport(ring: Tensor, arena: Arena) -> Transport:
    return CudaTransport(ring, arena) if ring.is_cuda else CpuTransport(ring, arena)


@dataclass(frozen=True, slots=True)
class CpuCopy:
    """A completed copy of a tensor."""

    copied: Tensor

    def values(self) -> Tensor:
        return self.copied


@dataclass(frozen=True, slots=True)
class CpuShipment:
    """A completed shipment."""

    extents: tuple[Extent | None, ...]
    copied_tally: Tensor
    copied_scores: HostScores

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def tally(self) -> Tensor:
        return self.copied_tally

    def free_staging(self) -> None:
        pass

    def scores(self) -> HostScores:
        return self.copied_scores


class CpuTransport:
    """Synchronous transport: `ship` copies the rows, so the ring is free when it returns."""

    def __init__(self, ring: Tensor, arena: Arena) -> None:
        self._ring, self.capacity = _Ring(ring), ring.shape[0]
        self._arena = arena
        self._log = ScoreLog()

    def reserve(self, num_units: int) -> int:
        _check_fits(num_units, self.capacity)
        return 0

    def copy(self, values: Tensor) -> Copy:
        return CpuCopy(values.clone())

    def ship(self, parcels: list[Parcel], tally: Tensor, scores: Tensor) -> Shipment:
        extents = tuple([self._arena.take(parcel.nbytes) for parcel in parcels])
        for parcel, extent in zip(parcels, extents, strict=True):
            if extent is not None:
                self._ring.send(parcel, extent)
        return CpuShipment(extents, tally.clone(), self._log.add(scores))


class _Ring:
    """The ring as units, and as bytes: raw rows are copied without a view made of them first."""

    def __init__(self, units: Tensor) -> None:
        self._units, self._bytes = units, units.view(-1).view(torch.uint8)
        self._unit_bytes = units.shape[1] * units.itemsize

    def send(self, parcel: Parcel, extent: Extent) -> None:
        """Queue the encoding and the copy on the current stream."""
        first, encoded = parcel.first, parcel.encoded
        if encoded is not None:
            # Made on another stream, on which its memory must not be used again before the copy.
            if encoded.is_cuda:
                encoded.record_stream(torch.cuda.current_stream(encoded.device))
            encoded = encoded.reshape(-1)
        elif isinstance(parcel.encoding.codec, Raw):
            begin = first * self._unit_bytes
            encoded = self._bytes[begin : begin + parcel.nbytes]
        else:
            units = self._units[first : first + parcel.num_units]
            encoded = parcel.encoding.encode(units).reshape(-1)
        # A copy into a file blocks: file-backed pages cannot be pinned.
        extent.memory.copy_(encoded, non_blocking=extent.pinned)


class ScoreLog:
    """Scores of steps, one after the other in memory of many steps: those of a request are then
    gathered at once, and each step needs no memory of its own. Thread-safe.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._memory = torch.empty((0, 0))
        self._end = 0

    def add(self, scores: Tensor) -> HostScores:
        """Return a copy of a step's scores, [tokens, slots]; its memory lives as long as it."""
        size, slots = scores.shape
        with self.lock:
            rows, columns = self._memory.shape
            if columns != slots or self._end + size > rows:
                # Steps are recorded in inference mode, and read outside.
                with torch.inference_mode(False):
                    self._memory = torch.empty((max(_ROWS, size), slots))
                self._end = 0
            added = HostScores(self._memory, self._end, size)
            self._end += size
        if size:
            added.values.copy_(scores)
        return added


class PinnedStaging:
    """Pinned memory that is used again: allocating it takes longer than a copy of a few rows."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._empty = torch.empty(0)

    def take(self, like: Tensor) -> Tensor:
        """Return a pinned tensor of the shape and the one dtype of `like`, undefined."""
        if not like.numel():
            if self._empty.shape != like.shape:
                self._empty = torch.empty_like(like, device="cpu")
            return self._empty
        while self._free:
            memory = self._free.pop()
            if memory.shape == like.shape:
                return memory
            if memory.untyped_storage().nbytes() >= like.nbytes:
                return memory.as_strided((like.numel(),), (1,), 0).view(like.shape)
        # Powers of two, so that the next step may be somewhat larger.
        size = 1 << max(like.numel() - 1, 1).bit_length()
        memory = torch.empty(size, dtype=like.dtype, pin_memory=torch.cuda.is_available())
        return memory[: like.numel()].view(like.shape)

    def give(self, taken: Tensor) -> None:
        """Return a tensor from `take` whose copy is complete and whose values are read."""
        if taken.numel():
            self._free.append(taken)


class EventPool:
    """CUDA events that are used again: making one and destroying it are calls of the driver."""

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []

    def record(self, stream: torch.cuda.Stream) -> Arrival:
        """Return the arrival of what is queued on a stream by now."""
        event = self._free.pop() if self._free else torch.cuda.Event()
        event.record(stream)
        return Arrival(_LentEvent(event, self._free))


@dataclass(slots=True, eq=False)
class _LentEvent:
    """A recorded event. It is free when nobody holds this object, so no thread is using it then."""

    event: torch.cuda.Event
    _free: list[torch.cuda.Event]

    def __del__(self) -> None:
        self._free.append(self.event)


@dataclass(slots=True, eq=False)
class Arrival:
    """When copies are complete; asked once, as each call to the driver yields Python's lock."""

    _lent: _LentEvent | None
    _is_new: bool = True

    def is_past(self) -> bool:
        """Return whether they are known to be; the first answer, to the step itself, is no."""
        # A local variable holds the event while this thread uses it, here and below.
        lent, is_new = self._lent, self._is_new
        self._is_new = False
        if lent is None:
            return True
        if is_new or not lent.event.query():
            return False
        self._lent = None
        return True

    def wait(self) -> None:
        lent = self._lent
        if lent is not None:
            lent.event.synchronize()
            self._lent = None

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Have what is queued on a stream from now on wait for the copies."""
        lent = self._lent
        if lent is not None:
            stream.wait_event(lent.event)


@dataclass(frozen=True, slots=True)
class CudaCopy:
    """A copy of a tensor in progress on the model's stream."""

    pinned: Tensor
    arrival: Arrival

    def values(self) -> Tensor:
        self.arrival.wait()
        return self.pinned


@dataclass(slots=True, eq=False)
class CudaShipment:
    """A shipment in progress, on the model's stream or beside it."""

    extents: tuple[Extent | None, ...]
    _memory: tuple[Tensor, Tensor]  # pinned, of the tally and the scores
    arrival: Arrival
    _staging: tuple[PinnedStaging, PinnedStaging]  # which get the memory back
    _log: ScoreLog  # which gets the scores before
    _scores: HostScores | None = None

    def ready(self) -> bool:
        return self.arrival.is_past()

    def wait(self) -> None:
        self.arrival.wait()

    def tally(self) -> Tensor:
        self.arrival.wait()
        return self._memory[0]

    def scores(self) -> HostScores:
        self.arrival.wait()
        # vLLM may send a step's output, with its scores, from a thread of its own.
        with self._log.lock:
            if self._scores is None:
                self._scores = self._log.add(self._memory[1])
            return self._scores

    def free_staging(self) -> None:
        if self._memory[1].numel():
            self.scores()
        for staging, memory in zip(self._staging, self._memory, strict=True):
            staging.give(memory)


@dataclass(frozen=True, slots=True)
class _InFlight:
    first: int
    stop: int
    arrival: Arrival


class CudaTransport:
    """Asynchronous transport to pinned memory, on a stream of its own unless rows are few."""

    def __init__(self, ring: Tensor, arena: Arena) -> None:
        self._ring, self.capacity = _Ring(ring), ring.shape[0]
        self._device = ring.device
        self._arena = arena
        self._stream = torch.cuda.Stream(ring.device)
        self._queued = torch.cuda.Event()
        self._events = EventPool()
        self._staging = PinnedStaging(), PinnedStaging()  # of tallies and of scores
        self._log = ScoreLog()
        self._in_flight: deque[_InFlight] = deque()
        self._next = 0

    def reserve(self, num_units: int) -> int:
        _check_fits(num_units, self.capacity)
        while self._in_flight and self._in_flight[0].arrival.is_past():
            self._in_flight.popleft()
        # Restarting at row 0 when no copy is in progress keeps small steps in the device's cache.
        if not self._in_flight or self._next + num_units > self.capacity:
            self._next = 0
        first, stop = self._next, self._next + num_units
        for copy in self._in_flight:
            if copy.first < stop and first < copy.stop:
                copy.arrival.hold(torch.cuda.current_stream(self._device))
        self._next = stop
        return first

    def copy(self, values: Tensor) -> Copy:
        pinned = _pinned(values)
        pinned.copy_(values, non_blocking=True)
        return CudaCopy(pinned, self._events.record(torch.cuda.current_stream(self._device)))

    def ship(self, parcels: list[Parcel], tally: Tensor, scores: Tensor) -> Shipment:
        memory = self._staging[0].take(tally), self._staging[1].take(scores)
        # The next step overwrites these: copied on the model's own stream.
        memory[0].copy_(tally, non_blocking=True)
        if scores.numel():
            memory[1].copy_(scores, non_blocking=True)
        extents = tuple([self._arena.take(parcel.nbytes) for parcel in parcels])
        pairs = zip(parcels, extents, strict=True)
        sent = [(parcel, extent) for parcel, extent in pairs if extent is not None]
        current = torch.cuda.current_stream(self._device)
        if sum([parcel.nbytes for parcel, _ in sent]) <= _SMALL:
            for parcel, extent in sent:
                self._ring.send(parcel, extent)
            arrival = self._events.record(current)
        else:
            arrival = self._send_beside(current, sent)
        return CudaShipment(extents, memory, arrival, self._staging, self._log)

    def _send_beside(
        self, current: torch.cuda.Stream, sent: list[tuple[Parcel, Extent]]
    ) -> Arrival:
        """Copy parcels on the copy stream, once what is queued on the current one is complete."""
        # One event for all steps: a wait refers to the record before it.
        self._queued.record(current)
        self._stream.wait_event(self._queued)
        torch.cuda.set_stream(self._stream)
        try:
            for parcel, extent in sent:
                self._ring.send(parcel, extent)
        finally:
            torch.cuda.set_stream(current)
        arrival = self._events.record(self._stream)
        first = min(parcel.first for parcel, _ in sent)
        stop = max(parcel.first + parcel.num_units for parcel, _ in sent)
        self._in_flight.append(_InFlight(first, stop, arrival))
        return arrival


def _pinned(like: Tensor) -> Tensor:
    # Pinning is slow, even for an empty tensor.
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.numel() > 0)


def _check_fits(num_units: int, capacity: int) -> None:
    # Unreachable: request validation limits the captures of a step, see `capture_limit`.
    if num_units > capacity:
        raise AssertionError(
            f"one step captures {num_units} units, the staging ring holds {capacity}: "
            "raise midstream's setting staging_bytes"
        )
