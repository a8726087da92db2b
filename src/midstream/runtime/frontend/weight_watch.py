"""Calls of an engine's client by which a front end learns that weights may be other ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from midstream.results.receipt import WeightVersion
from midstream.runtime.protocol.results import WeightState
from midstream.runtime.protocol.rpc import RPC

# Those of asynchronous clients end with "_async".
_CALLS = ("add_lora", "collective_rpc", "reset_prefix_cache", "wake_up")


def watch_client(client: Any, forget: Callable[[], None]) -> None:
    """Call `forget` after each call of a client that may have changed the weights."""
    for name in _CALLS:
        _after(client, name, forget)


def watch_async_client(client: Any, forget: Callable[[], None]) -> None:
    """As `watch_client`, of a client with an event loop."""
    for name in _CALLS:
        _after_awaited(client, f"{name}_async", forget)


def latest(states: Iterable[WeightState]) -> WeightVersion:
    """Return the version of the weights of several workers: the highest."""
    state = max(states, key=lambda state: state.number)
    return WeightVersion(state.number, state.name)


def _after(client: Any, name: str, forget: Callable[[], None]) -> None:
    original = getattr(client, name)

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            if RPC not in args:  # midstream's own
                forget()

    setattr(client, name, run)


def _after_awaited(client: Any, name: str, forget: Callable[[], None]) -> None:
    original = getattr(client, name)

    @functools.wraps(original)
    async def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return await original(*args, **kwargs)
        finally:
            if RPC not in args:
                forget()

    setattr(client, name, run)
