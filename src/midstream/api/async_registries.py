"""What an asynchronous engine keeps for all of its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from midstream.api.registered import AsyncLenses, AsyncSaes
from midstream.sinks.server_captures import ServerCaptures
from midstream.steering import VectorRegistry
from midstream.steering.tiers import Steering

if TYPE_CHECKING:
    from midstream.runtime.frontend.async_frontend import AsyncFrontEnd


class AsyncRegistries:
    """Registries of an `AsyncLLM`: named vectors, lenses, SAEs, server-wide edits and captures."""

    @property
    def _front(self) -> AsyncFrontEnd:
        raise NotImplementedError

    @property
    def vectors(self) -> VectorRegistry:
        """Named vectors: register, list, remove. Raises RuntimeError before `ready()`."""
        return self._front.vectors

    @property
    def steering(self) -> Steering:
        """Server-wide edits: set, clear, show. Raises RuntimeError before `ready()`."""
        return self._front.steering

    @property
    def lenses(self) -> AsyncLenses:
        """Registered lenses: register, remove, names. Raises RuntimeError before `ready()`."""
        return AsyncLenses(self._front)

    @property
    def saes(self) -> AsyncSaes:
        """Registered SAEs: register, remove, names. Raises RuntimeError before `ready()`."""
        return AsyncSaes(self._front.saes)

    @property
    def captures(self) -> ServerCaptures:
        """Server-wide captures: set, clear, list, collect."""
        return self._front.captures
