"""Guards of a server: their exchanges, and the attribute `guards` of both clients."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

from midstream.client.protocol import SITES, STATUS, Exchange, call
from midstream.errors import SpecError
from midstream.plan.argument_names import other_argument
from midstream.plan.probe import Probe
from midstream.plan.shape import ModelShape
from midstream.validation import at, kind

GUARDS = "/v1/midstream/guards"

T = TypeVar("T")
Versions = list[dict[str, Any]]


def put(name: str, probe: Any, fields: Mapping[str, Any]) -> Exchange[dict[str, Any]]:
    """Define a guard; return its new version."""
    yield from _check_model(probe)
    body = {field: _plain(value) for field, value in fields.items() if value is not None}
    if "for_" in body:
        body["for"] = body.pop("for_")
    if probe is not None:
        body["probe"] = _plain(probe)
        if not isinstance(body["probe"], (str, Mapping)):
            raise SpecError(
                "probe",
                "expected Probe(vector, layer=14), its dict, or the name of registered vectors, "
                f"got {kind(probe)}{other_argument(probe)}",
            )
    version: dict[str, Any] = yield from call("PUT", path_of(name), body)
    return version


def listing(full: bool) -> Exchange[list[dict[str, Any]]]:
    guards: list[dict[str, Any]] = (yield from call("GET", _query(GUARDS, full)))["guards"]
    return guards


def show(name: str, full: bool) -> Exchange[dict[str, Any]]:
    version: dict[str, Any] = yield from call("GET", _query(path_of(name), full))
    return version


def promote(name: str) -> Exchange[dict[str, Any]]:
    version: dict[str, Any] = yield from call("POST", path_of(name, "/promote"))
    return version


def rollback(name: str, to: int | None) -> Exchange[dict[str, Any]]:
    body = {} if to is None else {"version": to}
    version: dict[str, Any] = yield from call("POST", path_of(name, "/rollback"), body)
    return version


def history(name: str, full: bool) -> Exchange[list[dict[str, Any]]]:
    answer = yield from call("GET", _query(path_of(name, "/history"), full))
    versions: list[dict[str, Any]] = answer["versions"]
    return versions


def remove(name: str) -> Exchange[None]:
    yield from call("DELETE", path_of(name))


def path_of(name: str, more: str = "") -> str:
    return f"{GUARDS}/{quote(name, safe='')}{more}"


def _query(path: str, full: bool) -> str:
    return f"{path}?full=true" if full else path


def _check_model(probe: Any) -> Exchange[None]:
    """Check a probe's `info`, which no request has, against the model of the server."""
    if not isinstance(probe, Probe) or probe.info is None:
        return
    model = (yield from call("GET", STATUS))["model"]
    table = yield from call("GET", SITES)
    with at("probe"):
        probe.info.check(model, ModelShape(table["num_layers"], table["hidden_size"], ()))


def _plain(value: Any) -> Any:
    if isinstance(value, Probe):
        return {name: part for name, part in value.to_dict().items() if name != "op"}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value.to_dict() if hasattr(value, "to_dict") else value


class RunGuards(Protocol):
    """Runs an exchange with the server."""

    def __call__(self, exchange: Exchange[T], /) -> T: ...


class AsyncRunGuards(Protocol):
    """Runs an exchange with the server."""

    def __call__(self, exchange: Exchange[T], /) -> Awaitable[T]: ...


class ServedGuards:
    """Guards of a server: named, versioned probes of its requests, which act."""

    def __init__(self, run: RunGuards) -> None:
        self._run = run

    def put(self, name: str, probe: Any = None, **fields: Any) -> dict[str, Any]:
        """Define a guard, as a new version; return it.

        Args:
            name: 1 to 40 of the characters A–Z a–z 0–9 _ . -, the first no dot
            probe: a Probe, its dict, or the name of vectors that the server has; None: only a guard
                with `when` has none.
            **fields: `above` or `below`, `for_`, `pool`, `output`, `action`, `edits`, `webhook`,
                `scope`, `when`, `if_unavailable`, `message`, `visible`, `text`, `training`; see the
                page on guards.

        Raises:
            SpecError: the `info` of the Probe names another model than the server's.
            ServerError: 400, a field is malformed; 401 or 403, this client may not change guards;
                507, there is no room.
        """
        return self._run(put(name, probe, fields))

    def list(self, full: bool = False) -> list[dict[str, Any]]:
        """Return the guards that are active; with vectors if `full`."""
        return self._run(listing(full))

    def show(self, name: str, full: bool = False) -> dict[str, Any]:
        """Return one guard. ServerError, 404: there is none."""
        return self._run(show(name, full))

    def promote(self, name: str) -> dict[str, Any]:
        """Take the next action of shadow, flag, stop; return the new version."""
        return self._run(promote(name))

    def rollback(self, name: str, version: int | None = None) -> dict[str, Any]:
        """Make a new version that equals an old one; None: the one before."""
        return self._run(rollback(name, version))

    def history(self, name: str, full: bool = False) -> Versions:
        """Return the last versions of a guard, also of a deleted one."""
        return self._run(history(name, full))

    def remove(self, name: str) -> None:
        """Delete a guard; its history stays."""
        self._run(remove(name))


class AsyncGuards:
    """Guards of a server; see `ServedGuards`."""

    def __init__(self, run: AsyncRunGuards) -> None:
        self._run = run

    async def put(self, name: str, probe: Any = None, **fields: Any) -> dict[str, Any]:
        """Define a guard."""
        return await self._run(put(name, probe, fields))

    async def list(self, full: bool = False) -> list[dict[str, Any]]:
        """Return the guards that are active."""
        return await self._run(listing(full))

    async def show(self, name: str, full: bool = False) -> dict[str, Any]:
        """Return one guard."""
        return await self._run(show(name, full))

    async def promote(self, name: str) -> dict[str, Any]:
        """Take the next action of shadow, flag, stop."""
        return await self._run(promote(name))

    async def rollback(self, name: str, version: int | None = None) -> dict[str, Any]:
        """Make a new version that equals an old one."""
        return await self._run(rollback(name, version))

    async def history(self, name: str, full: bool = False) -> Versions:
        """Return the last versions of a guard."""
        return await self._run(history(name, full))

    async def remove(self, name: str) -> None:
        """Delete a guard."""
        await self._run(remove(name))
