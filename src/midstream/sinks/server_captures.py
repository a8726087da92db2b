"""Server-wide captures: those of every request, by name, changed while the engine runs."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from midstream.errors import ConfigError, SpecError
from midstream.plan.plan import Plan
from midstream.plan.readouts.capture import Capture
from midstream.plan.shape import ModelShape
from midstream.plan.sink_target import MEMORY, read_name
from midstream.plan.tap_lookup import find_taps
from midstream.sinks.kept_rows import KEPT, Collected
from midstream.sinks.sink_set import SinkSet
from midstream.validation import at, hint, kind, listed, show

MAX_NAMES = 64


@dataclass(frozen=True, slots=True)
class ServerCapture:
    """A name and its captures."""

    name: str
    captures: tuple[Capture, ...]
    kept: Mapping[str, int] | None  # for `collect`; None: the rows go to another sink

    def to_dict(self) -> dict[str, object]:
        fields: dict[str, object] = {
            "name": self.name,
            "capture": [capture.to_dict() for capture in self.captures],
        }
        return fields if self.kept is None else {**fields, "kept": dict(self.kept)}


class ServerCaptures:
    """`llm.captures`: captures of every request from its admission. Thread-safe."""

    def __init__(
        self,
        sinks: SinkSet,
        shape: ModelShape,
        check: Callable[[tuple[Capture, ...]], None] = lambda _: None,
    ) -> None:
        """Begin with the captures in the sinks' settings, under the sinks' names."""
        self._sinks = sinks
        self._shape = shape
        self._check = check
        # A change holds the first one while captures are checked, which may take seconds. Readers,
        # such as an event loop, wait for the second one alone, which nobody holds for long.
        self._changing, self._lock = threading.Lock(), threading.Lock()
        by_name: dict[str, tuple[Capture, ...]] = {}
        for capture in sinks.captures:
            try:
                find_taps(capture.layers, capture.sites, shape, "layers", "sites")
                sinks.check_metadata(capture)
            except SpecError as error:
                where = f"midstream.sinks.{capture.sink}.capture"
                raise ConfigError(f"{where}.{error}") from None
            by_name[capture.sink] = (*by_name.get(capture.sink, ()), capture)
        self._by_name: Mapping[str, tuple[Capture, ...]] = by_name
        # How often rows were to be kept for a name, also for one that is not set any more.
        self._times_kept: Counter[str] = Counter()

    @property
    def current(self) -> tuple[Capture, ...]:
        """The captures that a request admitted now has after its own."""
        return tuple(chain.from_iterable(self._by_name.values()))

    def set(self, name: str, capture: object, sink: str | None = None) -> ServerCapture:
        """Capture for every request from now on, replacing what the name stood for. Rows that were
        kept for it, and those of requests that still run, are discarded.

        Args:
            name: 1 to 128 of A-Z a-z 0-9 _ . -
            capture: a Capture or its dict, or a list of these, without `stream` and `request_id`.
                All server-wide captures have one `codec` and one `return`.
            sink: destination of the rows: "memory", the output of each request; a sink that the
                engine was started with; None: that of the captures if they name one, else the rows
                are kept in memory until `collect`.
        """
        with at("name"):
            name = read_name(name, may_be_empty=False)
        captures = self._read(name, capture, sink)
        with self._changing:
            before = self._by_name.get(name, ())
            if _keeps(captures):
                # Another each time: rows of requests that still run must not mix with the new ones.
                times = self._times_kept[name]
                tag = hashlib.sha256(f"{name} {times}".encode()).hexdigest() if times else name
                captures = tuple(_with_tag(named_capture, tag) for named_capture in captures)
            new = {**self._by_name, name: captures}
            if len(new) > MAX_NAMES:
                raise SpecError("name", f"the limit of {MAX_NAMES} names is reached; clear one")
            self._check(
                tuple(named_capture for several in new.values() for named_capture in several)
            )
            with self._lock:
                if _keeps(captures):
                    self._sinks.kept().begin(tag)
                    self._times_kept[name] += 1
                if _keeps(before):
                    self._sinks.kept().end(_tag_of(before))
                self._by_name = new
        return self.show(name)

    def clear(self, name: str | None = None) -> None:
        """Capture no longer for new requests, and discard kept rows; None: of every name."""
        with self._changing, self._lock:
            names = tuple(self._by_name) if name is None else (self._known(name),)
            before = self._by_name
            self._by_name = {
                other: captures for other, captures in before.items() if other not in names
            }
            for cleared in names:
                if _keeps(before[cleared]):
                    self._sinks.kept().end(_tag_of(before[cleared]))

    def list(self) -> tuple[ServerCapture, ...]:
        with self._lock:
            return tuple(self._describe(name) for name in sorted(self._by_name))

    def show(self, name: str) -> ServerCapture:
        with self._lock:
            return self._describe(self._known(name))

    def collect(self, name: str, most_bytes: int | None = None) -> Collected:
        """Return the kept rows of the requests that ended since the last call, oldest first.

        Each is a `midstream.sinks.base.Delivery`, kept no longer. At most 1 GiB is kept for a name:
        beyond that the oldest are dropped, and `dropped` of the result is their number.
        """
        with self._lock:
            captures = self._by_name[self._known(name)]
            if not _keeps(captures):
                raise SpecError(
                    "",
                    f"the rows of `{name}` go to {listed({c.sink for c in captures})}; only "
                    "captures that are set without a sink are collected here",
                )
            return self._sinks.kept().take(_tag_of(captures), most_bytes)

    def put_back(self, collected: Collected) -> None:
        """Keep again what `collect` returned, unless its name was set anew or cleared since."""
        self._sinks.kept().put_back(collected)

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def __repr__(self) -> str:
        return f"ServerCaptures({', '.join(self._by_name)})"

    def _describe(self, name: str) -> ServerCapture:
        captures = self._by_name[name]
        if not _keeps(captures):
            return ServerCapture(name, captures, None)
        kept = self._sinks.kept().usage(_tag_of(captures))
        return ServerCapture(name, tuple(_with_tag(capture, name) for capture in captures), kept)

    def _known(self, name: object) -> str:
        if not isinstance(name, str):
            raise SpecError("", f"expected `str`, got {kind(name)}")
        if name not in self._by_name:
            names = tuple(self._by_name)
            raise SpecError(
                "",
                f"no capture is set as {show(name)}{hint(name, names)}; set: "
                f"{listed(names) if names else 'none'}",
            )
        return name

    def _read(self, name: str, value: object, sink: str | None) -> tuple[Capture, ...]:
        several = isinstance(value, (list, tuple))
        values: Sequence[object] = value if isinstance(value, (list, tuple)) else [value]
        if not values:
            raise SpecError("capture", "the list is empty; expected a capture")
        captures = []
        for index, part in enumerate(values):
            with at(f"capture[{index}]" if several else "capture"):
                captures.append(self._read_one(name, part, sink))
        stored = tuple(capture for capture in captures if capture.sink != KEPT)
        if stored:
            plan = Plan(captures=stored)
            self._sinks.check(plan)
            self._sinks.check_places(plan)
        Plan(captures=tuple(captures))  # checks that they differ
        return tuple(captures)

    def _read_one(self, name: str, part: object, sink: str | None) -> Capture:
        capture = Capture.parse(part)
        for field in ("stream", "request_id", "reduce"):
            if getattr(capture, field):
                raise SpecError(field, "must be omitted in a capture of every request")
        find_taps(capture.layers, capture.sites, self._shape, "layers", "sites")
        if capture.sink == KEPT and capture.tag in ("", name):  # as `list` shows it
            capture = replace(capture, sink=MEMORY, tag="")
        sink = None if sink == KEPT else sink
        # "memory" is the default of a capture.
        if sink is not None and capture.sink not in (MEMORY, sink):
            raise SpecError("sink", f"{show(capture.sink)}, and `sink` is {show(sink)}")
        if sink is not None:
            return replace(capture, sink=sink)
        if capture.sink != MEMORY:
            return capture
        if capture.tag:
            raise SpecError("tag", "must be omitted without a sink; rows are collected by name")
        return replace(capture, sink=KEPT, tag=name)


def _keeps(captures: Sequence[Capture]) -> bool:
    return any(capture.sink == KEPT for capture in captures)


def _tag_of(captures: Sequence[Capture]) -> str:
    return next(capture.tag for capture in captures if capture.sink == KEPT)


def _with_tag(capture: Capture, tag: str) -> Capture:
    return replace(capture, tag=tag) if capture.sink == KEPT else capture
