"""Registry of a server's guards: named, versioned probes of requests, with the history of each."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import NamedTuple

from midstream.errors import NoRoomError, SpecError
from midstream.plan.probe import Probe
from midstream.steering.changes import Changes
from midstream.steering.guard_definition import (
    LADDER,
    GuardDefinition,
    read_definition,
    read_guard_name,
)
from midstream.steering.registry import VectorRegistry
from midstream.validation import at, is_int, kind, listed, show

# Far above practical use; they limit what clients can fill and what a request is checked for.
MAX_GUARDS, MAX_HISTORIES, KEPT_VERSIONS = 32, 256, 32
_MOST_WHO = 64  # characters


@dataclass(frozen=True, slots=True)
class GuardVersion:
    """One version of a guard.

    Attributes:
        number: 1 of the first; it only grows, also past a deletion.
        change: "put", "promote", "rollback" or "delete".
        time: of the change, ISO 8601 in UTC.
        who: fingerprint of the key of the client that made it, or its address.
        definition: None: it was deleted.
        digest: SHA-256 of the definition, in hex, equal if and only if these are; empty: deleted.
        nbytes: of the definition as JSON.
    """

    number: int
    change: str
    time: str
    who: str
    definition: GuardDefinition | None
    digest: str = ""
    nbytes: int = 0

    def of(self, definition: GuardDefinition | None) -> GuardVersion:
        """Return the version with a definition, its digest and its size."""
        content = b"" if definition is None else definition.content.encode()
        digest = hashlib.sha256(content).hexdigest() if content else ""
        return replace(self, definition=definition, digest=digest, nbytes=len(content))

    def to_dict(self, full: bool = False) -> dict[str, object]:
        """Return the JSON form, without vectors unless it is `full`."""
        form: dict[str, object] = {
            "version": self.number, "change": self.change, "time": self.time, "who": self.who,
        }  # fmt: skip
        if self.definition is None:
            return form
        return {**form, "digest": self.digest, **self.definition.to_dict(full)}


class ActiveGuard(NamedTuple):
    """A guard as requests get it."""

    name: str
    version: int
    definition: GuardDefinition
    probe: Probe | None  # of the requests; None: it runs when they have ended
    later: Probe | None  # of the ended request


@dataclass(frozen=True, slots=True)
class GuardState:
    """The guards by name, each with its last versions, ascending.

    Attributes:
        dropped: the highest number of a version of a name whose history was dropped.
    """

    histories: Mapping[str, tuple[GuardVersion, ...]]
    dropped: int = 0

    def active(self) -> tuple[ActiveGuard, ...]:
        return tuple(
            ActiveGuard(
                name,
                last.number,
                last.definition,
                last.definition.acting_probe(name, last.number),
                last.definition.later_probe(name, last.number),
            )
            for name, versions in sorted(self.histories.items())
            if (last := versions[-1]).definition is not None
        )


class Guards:
    """`llm.guards` of a server: probes that score requests and act, by name. Thread-safe.

    A request keeps the versions that are active at its admission.
    """

    def __init__(
        self, registry: VectorRegistry, check: Callable[[tuple[Probe, ...]], None] | None = None
    ) -> None:
        """Create an empty registry; `check` raises SpecError for probes that requests cannot have
        together.
        """
        self._registry = registry
        self._check = check
        # Where changes hold; `shared_folder` replaces it, and the state.
        self.changes = Changes()
        self.state = GuardState({})
        self._active: tuple[GuardState, tuple[ActiveGuard, ...]] = (self.state, ())
        self._lock = threading.Lock()

    def put(self, name: str, form: object, who: str = "", room: int | None = None) -> GuardVersion:
        """Define a guard, replacing what the name stood for; return its new version.

        Args:
            name: 1 to 40 of the characters A–Z a–z 0–9 _ . -, the first no dot
            form: see `guard_definition.read_definition`. Names of vectors are resolved now.
            who: made the change.
            room: limit for all versions of all guards together, in bytes of JSON; None: none.
        """
        with at("name"):
            read_guard_name(name)
        definition = read_definition(form).bound(self._registry.lookup, self._registry.shape)
        return self._change(name, "put", who, lambda _: definition, room)

    def promote(self, name: str, who: str = "") -> GuardVersion:
        """Take the next action of shadow, flag, stop; return the new version."""

        def next_action(versions: tuple[GuardVersion, ...]) -> GuardDefinition:
            definition = self._defined(name, versions)
            if definition.action not in LADDER[:-1]:
                raise SpecError(
                    "action",
                    f"{show(definition.action)} cannot be promoted; promotion goes along "
                    f"{listed(LADDER)}",
                )
            return replace(definition, action=LADDER[LADDER.index(definition.action) + 1])

        return self._change(name, "promote", who, next_action)

    def rollback(
        self, name: str, version: object = None, who: str = "", room: int | None = None
    ) -> GuardVersion:
        """Make a new version that equals an old one: `version`, or None: the last definition before
        the present one. A deleted guard can be rolled back.
        """

        def old(versions: tuple[GuardVersion, ...]) -> GuardDefinition:
            if not versions:
                raise self._unknown(name)
            if version is None:
                earlier = [kept.definition for kept in versions[:-1] if kept.definition is not None]
                if not earlier:
                    raise SpecError("version", f"`{name}` has no earlier version")
                return earlier[-1]
            if not is_int(version):
                raise SpecError("version", f"expected a number, got {kind(version)}")
            for kept in versions:
                if kept.number == version and kept.definition is not None:
                    return kept.definition
            numbers = [str(kept.number) for kept in versions if kept.definition is not None]
            known = ", ".join(numbers)
            raise SpecError("version", f"`{name}` has the versions {known}, not {version}")

        return self._change(name, "rollback", who, old, room)

    def remove(self, name: str, who: str = "") -> GuardVersion:
        """Delete a guard; its history stays. Requests that were admitted before keep it."""

        def none(versions: tuple[GuardVersion, ...]) -> None:
            self._defined(name, versions)

        return self._change(name, "delete", who, none)

    def show(self, name: str) -> GuardVersion:
        """Return the active version of a guard."""
        versions = self._current().histories.get(name, ())
        self._defined(name, versions)
        return versions[-1]

    def history(self, name: str) -> tuple[GuardVersion, ...]:
        """Return the last versions of a guard, ascending; of a deleted one too."""
        versions = self._current().histories.get(name)
        if versions is None:
            raise self._unknown(name)
        return versions

    def active(self) -> tuple[ActiveGuard, ...]:
        """Return the guards of a request that is admitted now, sorted by name."""
        state = self._current()
        known, guards = self._active
        if known is not state:
            guards = state.active()
            self._active = state, guards
        return guards

    def __len__(self) -> int:
        return len(self.active())

    def __repr__(self) -> str:
        return f"Guards({len(self)} guards)"

    def _current(self) -> GuardState:
        self.changes.refresh()
        return self.state

    def _change(
        self,
        name: str,
        change: str,
        who: str,
        make: Callable[[tuple[GuardVersion, ...]], GuardDefinition | None],
        room: int | None = None,
    ) -> GuardVersion:
        with self._lock, self.changes.changing():
            before = self.state
            versions = before.histories.get(name, ())
            definition = make(versions)
            time = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
            number = 1 + (versions[-1].number if versions else before.dropped)
            made = GuardVersion(number, change, time, who[:_MOST_WHO], None).of(definition)
            histories = dict(before.histories)
            histories[name] = (*versions, made)[-KEPT_VERSIONS:]
            after = _limited(GuardState(histories, before.dropped))
            guards = after.active()
            self._check_together(guards)
            if room is not None:
                _check_room(after, room)
            self.state = after
        return made

    def _check_together(self, guards: tuple[ActiveGuard, ...]) -> None:
        if len(guards) > MAX_GUARDS:
            raise NoRoomError("name", f"the limit of {MAX_GUARDS} guards is reached; delete one")
        check_stages(guards)
        if self._check is not None:
            with at("probe"):
                self._check(tuple(guard.probe for guard in guards if guard.probe is not None))

    def _defined(self, name: str, versions: tuple[GuardVersion, ...]) -> GuardDefinition:
        if not versions or versions[-1].definition is None:
            raise self._unknown(name)
        return versions[-1].definition

    def _unknown(self, name: object) -> SpecError:
        known = [guard.name for guard in self.active()] if isinstance(name, str) else []
        return SpecError(
            "name", f"there is no guard {show(name)}; there are {listed(known) or 'none'}"
        )


def check_stages(guards: Iterable[ActiveGuard]) -> None:
    """Check that the first stage of each guard is a guard that scores the request itself."""
    by_name = {guard.name: guard for guard in guards}
    for guard in by_name.values():
        when = guard.definition.when
        if when is None:
            continue
        first = by_name.get(when.guard)
        if first is None:
            raise SpecError(
                "when.guard", f"`{guard.name}` runs after the guard `{when.guard}`, which is needed"
            )
        if first.probe is None:
            raise SpecError(
                "when.guard",
                f"`{when.guard}` has a first stage itself; `{guard.name}` needs one without",
            )


def _limited(state: GuardState) -> GuardState:
    """Return a state without the oldest histories of deleted guards, if there are too many."""
    histories, dropped = dict(state.histories), state.dropped
    deleted = [
        (versions[-1].time, name)
        for name, versions in histories.items()
        if versions[-1].definition is None
    ]
    for _, name in sorted(deleted)[: max(0, len(histories) - MAX_HISTORIES)]:
        dropped = max(dropped, histories.pop(name)[-1].number)
    return GuardState(histories, dropped)


def _check_room(state: GuardState, room: int) -> None:
    every = (version for versions in state.histories.values() for version in versions)
    total = sum({version.digest: version.nbytes for version in every}.values())
    if total > room:
        raise NoRoomError(
            "probe",
            f"the versions of all guards have {total} bytes, more than the limit of {room}; give "
            "smaller probes",
        )
