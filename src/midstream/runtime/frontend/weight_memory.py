"""Weights that are registered by name, and where they are in the workers' memory for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from midstream.config.config import KEY
from midstream.errors import BusyError, ConfigError, SpecError
from midstream.plan.sink_target import read_name
from midstream.runtime.protocol.rpc import WriteWeights
from midstream.runtime.vllm.additional_config import Settings
from midstream.validation import at, show

T = TypeVar("T")
Weights = TypeVar("Weights")

# Bytes of one message to the workers.
_MESSAGE_BYTES = 16 << 20


def _no_workers(message: WriteWeights) -> None:
    raise AssertionError("the engine is not ready")


@dataclass(eq=False)
class WeightMemory:
    """One tensor of the setting `readout_bytes` on each worker: here is decided what is where."""

    nbytes: int
    in_use: Callable[[tuple[str, str]], bool]  # whether a running request reads (kind, name)
    changed: Callable[[], None]  # called after the meaning of a name has changed
    write: Callable[[WriteWeights], Any] = _no_workers  # to all workers; may be awaitable
    taken: set[tuple[int, int]] = field(default_factory=set)  # parts in use, (first byte, stop)

    def find(
        self, size: int, align: int, kind: str, old_place: tuple[int, int] | None
    ) -> tuple[int, int]:
        """Return the first place of `size` bytes, (first byte, stop), aligned to `align` bytes."""
        taken = sorted(self.taken - {old_place})
        first = 0
        for begin, end in (*taken, (self.nbytes, self.nbytes)):
            if begin - first >= size:
                return first, first + size
            first = max(first, -(-end // align) * align)
        raise SpecError(
            kind,
            f"its weights take {size} bytes, and midstream's setting readout_bytes is "
            f"{self.nbytes}, of which {sum(end - begin for begin, end in taken)} are in use; raise "
            "it, or remove a lens or an SAE",
        )


class WeightPart(NamedTuple):
    """A tensor of weights in the memory."""

    offset: int
    dtype: torch.dtype
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class StoredWeights(Generic[T]):
    """Weights that the workers have."""

    place: tuple[int, int]
    made: T


class NamedWeights(Generic[Weights, T]):
    """Weights by name, in a `WeightMemory`. Subclasses say what is stored of them."""

    kind: str
    word: str
    setting: str
    load: Callable[[str], Weights]

    def __init__(self, memory: WeightMemory) -> None:
        self._memory = memory
        self._registered: dict[str, StoredWeights[T]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._registered)

    @property
    def write(self) -> Callable[[WriteWeights], Any]:
        return self._memory.write

    def from_settings(self, vllm_config: Any) -> Iterator[WriteWeights]:
        """Register what the setting names, and yield the messages, which are to be sent."""
        settings = vllm_config.additional_config[KEY]
        if not isinstance(settings, Settings):
            return
        for name, path in getattr(settings, self.setting).items():
            try:
                with self.adding(name, self.load(path)) as messages:
                    yield from messages
            except (SpecError, OSError) as error:
                raise ConfigError(f"{KEY}.{self.setting}.{name}: {error}") from None

    @contextmanager
    def adding(self, name: str, weights: Weights) -> Iterator[Iterator[WriteWeights]]:
        """Register weights by name. In the block, all messages that it yields are to be sent."""
        with at("name"):
            read_name(name, may_be_empty=False)
            self.check_name(name)
        with at(self.kind):
            self.check(weights)
        self._check_free(name)
        old = self._registered.get(name)
        size, align = self.size(weights)
        place = self._memory.find(size, align, self.kind, old.place if old else None)
        made, parts = self.laid_out(place[0], weights)
        if old:
            self._forget(name)
        self._memory.taken.add(place)
        try:
            yield _messages(parts)
        except BaseException:
            self._memory.taken.discard(place)
            raise
        if name in self._registered:
            # By a call at the same time.
            self._forget(name)
        self._registered[name] = StoredWeights(place, made)
        self._memory.changed()

    def remove(self, name: str) -> None:
        """Forget weights; their memory is used for others."""
        if name not in self._registered:
            raise SpecError("name", f"there is no {self.word} {show(str(name))}")
        self._check_free(name)
        self._forget(name)

    def check_name(self, name: str) -> None:
        """Raise SpecError if a name is not to be used."""

    def check(self, weights: Weights) -> None:
        """Raise SpecError if weights are none of this model."""
        raise NotImplementedError

    def size(self, weights: Weights) -> tuple[int, int]:
        """Return the bytes that weights take, and what their first byte is a multiple of."""
        raise NotImplementedError

    def laid_out(self, first: int, weights: Weights) -> tuple[T, list[WeightPart]]:
        """Return what plans say of weights that begin at a byte, and the weights."""
        raise NotImplementedError

    def _check_free(self, name: str) -> None:
        if name in self._registered and self._memory.in_use((self.kind, name)):
            raise BusyError(
                f"running requests use the {self.word} {show(name)}; wait until they end", 1
            )

    def _forget(self, name: str) -> None:
        self._memory.taken.discard(self._registered.pop(name).place)
        self._memory.changed()


def from_settings(
    registries: Sequence[NamedWeights[Any, Any]], vllm_config: Any
) -> Iterator[WriteWeights]:
    for registry in registries:
        yield from registry.from_settings(vllm_config)


def _messages(parts: list[WeightPart]) -> Iterator[WriteWeights]:
    for offset, dtype, tensor in parts:
        numbers = tensor.detach().to("cpu", dtype).contiguous().view(-1)
        data = numbers.view(torch.uint8).numpy()
        for first in range(0, data.size, _MESSAGE_BYTES):
            yield WriteWeights(offset + first, data[first : first + _MESSAGE_BYTES].tobytes())
