"""Open sinks of one engine, each with its queue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial

from midstream.config.sinks import QUEUE_BYTES, SinkSettings
from midstream.errors import BusyError, SpecError
from midstream.plan import Capture, Plan
from midstream.plan.readouts import ReadOut
from midstream.plan.sink_target import MEMORY
from midstream.sinks.base import Origin, Sink
from midstream.sinks.daemon_threads import begin
from midstream.sinks.kept_rows import KEPT, KeptRows
from midstream.sinks.name_claims import NamedCapture, RequestNames
from midstream.sinks.queue import QueueTimes, SinkQueue
from midstream.sinks.registry import make_sink
from midstream.validation import at, hint, listed, show

CHECK_SECONDS = 5.0  # longest time of a sink's `check`
_RETRY_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Pace:
    """Interval and size of the pieces for a sink with `wants = "rows"`; see `Sink`."""

    seconds: float
    nbytes: int


class SinkSet:
    """The sinks that an engine was started with; `memory` is always included."""

    def __init__(self, settings: Sequence[SinkSettings], origin: Origin) -> None:
        self._sinks: dict[str, Sink] = {}
        self._queues: dict[str, SinkQueue] = {}
        # Those of the settings; `ServerCaptures` has those that are set now.
        self.captures: tuple[Capture, ...] = tuple(
            capture for config in settings for capture in config.captures
        )
        self._hanging: dict[str, Future[None]] = {}  # are in `check`, by sink
        self._kept: KeptRows | None = None
        self._origin = origin
        made = [(config, make_sink(config)) for config in settings if config.name != MEMORY]
        try:
            for config, sink in made:
                sink.open(origin)
                self._sinks[config.name] = sink
                longest = config.call_seconds + sink.wait_seconds
                times = QueueTimes(call=longest, close=config.close_seconds)
                self._queues[config.name] = SinkQueue(config.name, sink, config.queue_bytes, times)
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """Valid values of a capture's `sink`."""
        return (MEMORY, *self._sinks)

    def check(self, plan: Plan) -> None:
        """Check whether the sinks can store a plan's rows, as far as known without file systems."""
        for index, sink in enumerate(capture.sink for capture in plan.captures):
            if sink == MEMORY:
                continue
            with at(f"capture[{index}]"):
                if sink not in self._sinks:
                    raise SpecError(
                        "sink",
                        f"this engine has no sink {show(sink)}{hint(sink, self.names)}; it has "
                        f"{listed(self.names)}; configure others at engine start with "
                        f'midstream={{"sinks": {{"{sink}": {{…}}}}}}',
                    )
                destination, layout = self._sinks[sink], plan.captures[index].layout
                if layout and layout not in destination.layouts:
                    known = listed(destination.layouts) if destination.layouts else "none"
                    raise SpecError(
                        "layout", f"the sink {sink} has no layout {show(layout)}; known: {known}"
                    )
                self._check_kind(sink, plan.captures[index])
                self.check_metadata(plan.captures[index])
                self._check_answers(sink)

    def has_places(self, plan: Plan) -> bool:
        return any(True for _ in self._placed(plan))

    def check_places(self, plan: Plan) -> None:
        """Check where a plan's rows are to go. Waits for seconds, so not on an event loop."""
        for index, sink, check in self._placed(plan):
            with at(f"capture[{index}]"):
                self._check_answers(sink)
                self._check_place(sink, check)

    def _placed(self, plan: Plan) -> Iterator[tuple[int, str, Callable[[], None]]]:
        """Yield index, sink and check of each capture for a sink that checks places."""
        for index, (sink, tag, request_id) in enumerate(capture.place for capture in plan.captures):
            destination = self._sinks.get(sink)
            if destination is not None and type(destination).check is not Sink.check:
                # `RequestNames` compares the id with those that the sink has.
                own_id = "" if destination.names is not None else request_id
                yield index, sink, partial(destination.check, tag, own_id)

    def _check_kind(self, sink: str, capture: ReadOut) -> None:
        """Check that a sink stores what a read-out returns, if that is no captured rows."""
        kind = capture.key
        if isinstance(capture, Capture) or kind in self._sinks[sink].keeps:
            return
        keep = [name for name, other in self._sinks.items() if kind in other.keeps]
        raise SpecError(
            "sink",
            f"the sink {show(sink)} does not store {kind}; of this engine's sinks, "
            f"{listed(keep) if keep else 'none'} can; or omit `sink`, for `output.{kind}`",
        )

    def names_of(self, plan: Plan | None) -> RequestNames | None:
        """Return the names of a request's rows, to be taken before it is computed; None: none."""
        named: dict[tuple[str, str], NamedCapture] = {}
        places = [] if plan is None else [capture.place for capture in plan.captures]
        for index, (sink, tag, request_id) in enumerate(places):
            destination = self._sinks.get(sink)
            if not request_id or destination is None or destination.names is None:
                continue
            name = destination.name_of(tag, request_id)
            first = named.get((sink, name))
            if first is None:
                check = partial(
                    self._check_place, sink, partial(destination.check, tag, request_id)
                )
                named[sink, name] = NamedCapture(index, destination.names, name, request_id, check)
            elif places[first.index] != places[index]:
                raise SpecError(
                    f"capture[{index}].request_id",
                    f"capture[{first.index}] has {show(request_id)} too, with another tag; the "
                    f"sink {sink} stores rows of one request under an id",
                )
        return RequestNames([*named.values()]) if named else None

    def _check_answers(self, name: str) -> None:
        why, hanging = self._queues[name].stalled, self._hanging.get(name)
        if hanging is not None and not hanging.done():
            why = "check has not returned"
        if why:
            raise BusyError(f"the sink {show(name)} stores nothing now: {why}", _RETRY_SECONDS)

    def _check_place(self, name: str, check: Callable[[], None]) -> None:
        """Call a sink's `check`, in a thread of its own: its file system may not answer."""
        call = begin(check)
        if not wait((call,), CHECK_SECONDS).done:
            self._hanging[name] = call
            self._check_answers(name)
        call.result(0)

    def check_metadata(self, capture: ReadOut) -> None:
        """Check that the metadata of a capture have no key that its sink reserves."""
        sink = self._sinks.get(capture.sink)
        for key in () if sink is None else sink.reserved:
            if key in capture.metadata:
                raise SpecError(
                    "metadata",
                    f"the sink {show(capture.sink)} reserves the key {show(key)} for its own data; "
                    "use another",
                )

    def kept(self) -> KeptRows:
        """Return the sink that keeps rows of server-wide captures; opened with the first call."""
        if self._kept is None:
            if KEPT in self._sinks:
                raise SpecError("sink", f"missing; this engine has a sink of its own named {KEPT}")
            self._kept = KeptRows()
            self._kept.open(self._origin)
            self._queues[KEPT] = SinkQueue(KEPT, self._kept, QUEUE_BYTES)
        return self._kept

    def queue(self, name: str) -> SinkQueue:
        """Return the queue of a sink other than `memory`."""
        return self._queues[name]

    def pace(self, name: str) -> Pace | None:
        """Return the pace of a sink for running requests; None if it gets rows at their end."""
        sink = self._sinks.get(name)
        if sink is None or sink.wants != "rows":
            return None
        return Pace(sink.piece_seconds, sink.piece_bytes)

    @property
    def unwritten(self) -> dict[str, int]:
        """Bytes by sink that were delivered and are not durable yet."""
        return {name: queue.unwritten for name, queue in list(self._queues.items())}

    def drain(self) -> None:
        """Write and flush all pending deliveries without waiting for more. Does not block."""
        for queue in list(self._queues.values()):
            queue.drain()

    def close(self) -> None:
        """Write and flush all pending deliveries and close the sinks. Blocks until done."""
        for queue in list(self._queues.values()):
            queue.close()
