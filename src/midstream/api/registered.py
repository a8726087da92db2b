"""Registered lenses and SAEs of an engine, as the caller manages them."""

from __future__ import annotations

import asyncio
from os import PathLike
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from midstream.lenses import LinearLens, load_lens
from midstream.plan.tokens import LOGIT
from midstream.runtime.frontend.request.token_directions import DirectionCache
from midstream.runtime.frontend.weight_memory import NamedWeights
from midstream.sae.sae import SAE

if TYPE_CHECKING:
    from midstream.runtime.frontend.async_frontend import AsyncFrontEnd

Weights = TypeVar("Weights")
_PATHS = (str, PathLike)


class _Names(Generic[Weights]):
    def __init__(self, registry: NamedWeights[Weights, Any]) -> None:
        self._registry = registry

    @property
    def names(self) -> tuple[str, ...]:
        """The registered names."""
        return self._registry.names

    def remove(self, name: str) -> None:
        """Forget weights."""
        self._registry.remove(name)


class Registered(_Names[Weights]):
    """Weights by name: register, remove, names."""

    def register(self, name: str, weights: Weights) -> None:
        """Send weights to the workers, in place of others of that name; see `readout_bytes`."""
        with self._registry.adding(name, weights) as messages:
            for message in messages:
                self._registry.write(message)


class AsyncRegistered(_Names[Weights]):
    """Weights by name of an `AsyncLLM`; see `Registered`."""

    async def register(self, name: str, weights: Weights) -> None:
        """Send weights to the workers of all replicas; see `Registered.register`."""
        with self._registry.adding(name, weights) as messages:
            for message in messages:
                await self._registry.write(message)


class Lenses(Registered[LinearLens]):
    """Registered lenses, stored in the model's dtype, for `Lens(kind=name)`."""

    def __init__(self, registry: NamedWeights[LinearLens, Any], directions: DirectionCache) -> None:
        super().__init__(registry)
        self._directions = directions

    def register(self, name: str, weights: LinearLens | str | PathLike[str]) -> None:
        """Send a lens, or the one that a path has, to the workers, in place of another of that
        name; see `readout_bytes`. A folder is read by `TunedLens.load`, a file by
        `JacobianLens.load`.
        """
        super().register(name, load_lens(weights) if isinstance(weights, _PATHS) else weights)

    def direction(
        self, token: int | str, layer: int, lens: str = LOGIT, site: str = "resid_post"
    ) -> Tensor:
        """Return the direction along which a lens reads a token; see `Steer.token`.

        Args:
            token: a token's id, or a text that is one token.
            layer: index of a layer.
            lens: "logit", or the name of a registered lens.
            site: "resid_post" or "resid_pre"; with "logit" also "resid_mid".

        Returns:
            float32 [width], of length 1.
        """
        direction = self._directions.get(self._directions.place(token, layer, lens, site))
        return torch.from_numpy(direction.numpy().copy())


class AsyncLenses(AsyncRegistered[LinearLens]):
    """Registered lenses of an `AsyncLLM`; see `Lenses`."""

    def __init__(self, front: AsyncFrontEnd) -> None:
        super().__init__(front.lenses)
        self._front = front

    async def register(self, name: str, weights: LinearLens | str | PathLike[str]) -> None:
        """Send a lens to the workers of all replicas; see `Lenses.register`."""
        if isinstance(weights, _PATHS):
            weights = await asyncio.to_thread(load_lens, weights)
        await super().register(name, weights)

    async def direction(
        self, token: int | str, layer: int, lens: str = LOGIT, site: str = "resid_post"
    ) -> Tensor:
        """Return the direction along which a lens reads a token; see `Lenses.direction`."""
        directions = self._front.directions
        key = directions.place(token, layer, lens, site)
        await directions.fetch({key: ""})
        return torch.from_numpy(directions.get(key).numpy().copy())


class Saes(Registered[SAE]):
    """Registered SAEs, whose encoders are stored in float32, for `Features(sae=name)`."""

    def register(self, name: str, weights: SAE | str | PathLike[str]) -> None:
        """Send an SAE, or the one that `SAE.load` reads at a path, to the workers, in place of
        another of that name; see `readout_bytes`.
        """
        super().register(name, SAE.load(weights) if isinstance(weights, _PATHS) else weights)


class AsyncSaes(AsyncRegistered[SAE]):
    """Registered SAEs of an `AsyncLLM`; see `Saes`."""

    async def register(self, name: str, weights: SAE | str | PathLike[str]) -> None:
        """Send an SAE to the workers of all replicas; see `Saes.register`."""
        if isinstance(weights, _PATHS):
            weights = await asyncio.to_thread(SAE.load, weights)
        await super().register(name, weights)
