"""Registered lenses of an engine, as the caller manages them."""

from __future__ import annotations

from midstream.lenses import LinearLens
from midstream.runtime.frontend.lens_registry import LensRegistry


class Lenses:
    """Registered lenses: register, remove, names. Requests use them as `Lens(kind=name)`."""

    def __init__(self, registry: LensRegistry) -> None:
        self._registry = registry

    @property
    def names(self) -> tuple[str, ...]:
        """The registered names."""
        return self._registry.names

    def register(self, name: str, lens: LinearLens) -> None:
        """Send the maps of a lens to the workers. They are stored in the model's dtype, in the
        memory of the setting `lens_bytes`.

        Args:
            name: its name; one that is registered is replaced.
            lens: a `TunedLens` or a `JacobianLens`.

        Raises:
            SpecError: the name is malformed, the lens is of another model, or there is no memory
                for it.
            BusyError: a running request uses the lens of this name.
        """
        with self._registry.adding(name, lens) as messages:
            for one in messages:
                self._registry.write(one)

    def remove(self, name: str) -> None:
        """Forget a lens.

        Raises:
            SpecError: there is none of this name.
            BusyError: a running request uses it.
        """
        self._registry.remove(name)


class AsyncLenses:
    """Registered lenses of an `AsyncLLM`; see `Lenses`."""

    def __init__(self, registry: LensRegistry) -> None:
        self._registry = registry

    @property
    def names(self) -> tuple[str, ...]:
        """The registered names."""
        return self._registry.names

    async def register(self, name: str, lens: LinearLens) -> None:
        """Send the maps of a lens to the workers of all replicas; see `Lenses.register`."""
        with self._registry.adding(name, lens) as messages:
            for one in messages:
                await self._registry.write(one)

    def remove(self, name: str) -> None:
        """Forget a lens; see `Lenses.remove`."""
        self._registry.remove(name)
