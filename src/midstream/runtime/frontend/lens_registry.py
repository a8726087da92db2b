"""Lenses that requests name, and where their maps are in the workers' memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from midstream.errors import BusyError, SpecError
from midstream.lenses import LinearLens
from midstream.runtime.protocol.rpc import WriteLenses
from midstream.spec import ModelShape
from midstream.spec.lens import LOGIT
from midstream.spec.resolve.resolved import LensMap
from midstream.spec.sink_target import read_name
from midstream.validation import at, kind, show

# Bytes of one message to the workers.
_MESSAGE_BYTES = 16 << 20


def _no_workers(message: WriteLenses) -> None:
    raise AssertionError("the engine is not ready")


@dataclass(frozen=True, slots=True)
class RegisteredLens:
    """A lens whose maps the workers have.

    Attributes:
        first, stop: its numbers in the memory for maps.
        maps: by depth; see `midstream.lenses`.
    """

    first: int
    stop: int
    maps: dict[int, LensMap]


class LensRegistry:
    """The registered lenses of an engine. Their memory is one tensor of the setting `lens_bytes` on
    each worker that has the last layer; here is decided what is where in it.

    Attributes:
        write: sends a message to all workers; with an asynchronous engine, what it returns is to be
            awaited.
    """

    def __init__(
        self,
        nbytes: int,
        shape: ModelShape,
        in_use: Callable[[str], bool],
        changed: Callable[[], None],
    ) -> None:
        """Args:
        nbytes: the setting `lens_bytes`.
        shape: the model.
        in_use: returns whether a running request has a lens of this name.
        changed: is called after the meaning of a name has changed.
        """
        self._dtype: torch.dtype = getattr(torch, shape.dtype)
        self._nbytes = nbytes
        self._shape = shape
        self._in_use = in_use
        self._changed = changed
        self.write: Callable[[WriteLenses], Any] = _no_workers
        self._lenses: dict[str, RegisteredLens] = {}
        self._writing: list[RegisteredLens] = []

    @property
    def names(self) -> tuple[str, ...]:
        """The registered names, in order."""
        return tuple(self._lenses)

    def maps_of(self, name: str, depths: list[int]) -> tuple[LensMap, ...]:
        """Return the map of each of some depths. After the last layer there need be none.

        Raises:
            SpecError: there is no such lens, or it has no map of a depth.
        """
        lens = self._lenses.get(name)
        if lens is None:
            known = ", ".join(map(show, (LOGIT, *self._lenses)))
            raise SpecError(
                "kind",
                f"there is no lens {show(name)}; there is {known}; register it with "
                "llm.lenses.register(name, lens)",
            )
        found = []
        for depth in depths:
            one = lens.maps.get(depth)
            if one is None and depth < self._shape.num_layers:
                raise SpecError(
                    "layers",
                    f"the lens {show(name)} has no map of the stream after {depth} layers; it has "
                    f"those after {', '.join(map(str, sorted(lens.maps)))} (resid_post of layer i "
                    "is after i + 1, resid_pre after i)",
                )
            found.append(one or LensMap())
        return tuple(found)

    @contextmanager
    def adding(self, name: str, lens: LinearLens) -> Iterator[Iterator[WriteLenses]]:
        """Register a lens. In the `with` block, all messages that it yields are to be sent.

        Args:
            name: its name; one that is registered is replaced.
            lens: the lens.

        Raises:
            SpecError: the name or the lens is malformed, the lens is of another model, or there is
                no memory for it.
            BusyError: a running request uses the lens of this name.
        """
        with at("name"):
            read_name(name, may_be_empty=False)
            if name == LOGIT:
                raise SpecError("", f"{show(LOGIT)} is the lens without maps; use another name")
        self._check(lens)
        self._check_free(name)
        made = self._placed(lens, self._lenses.get(name))
        self._lenses.pop(name, None)
        self._changed()
        self._writing.append(made)
        try:
            yield self._messages(made, lens)
            self._lenses[name] = made
        finally:
            self._writing.remove(made)
            self._changed()

    def remove(self, name: str) -> None:
        """Forget a lens; its memory is used for others.

        Raises:
            SpecError: there is no such lens.
            BusyError: a running request uses it.
        """
        if name not in self._lenses:
            raise SpecError("name", f"there is no lens {show(str(name))}")
        self._check_free(name)
        del self._lenses[name]
        self._changed()

    def _check_free(self, name: str) -> None:
        if name in self._lenses and self._in_use(name):
            raise BusyError(f"running requests use the lens {show(name)}; wait until they end", 1)

    def _check(self, lens: LinearLens) -> None:
        with at("lens"):
            if not isinstance(lens, LinearLens):
                raise SpecError("", f"expected a TunedLens or a JacobianLens, got {kind(lens)}")
            width, layers = self._shape.hidden_size, self._shape.num_layers
            if lens.width != width:
                raise SpecError("", f"it is {lens.width} wide, and the model {width}")
            for depth in lens.matrices:
                if not 0 <= depth <= layers:
                    raise SpecError("", f"the model has {layers} layers, and the lens one more")

    def _placed(self, lens: LinearLens, replaced: RegisteredLens | None) -> RegisteredLens:
        """Return the lens with a place in the memory: the first that is large enough.

        Raises:
            SpecError: there is none.
        """
        width = self._shape.hidden_size
        of_one = width * width + (width if lens.biases else 0)
        size, limit = of_one * len(lens.matrices), self._nbytes // self._dtype.itemsize
        others = [one for one in self._lenses.values() if one is not replaced]
        taken = sorted((one.first, one.stop) for one in (*others, *self._writing))
        first = 0
        for begin, end in (*taken, (limit, limit)):
            if begin - first >= size:
                break
            first = max(first, end)
        else:
            raise SpecError(
                "lens",
                f"its maps take {size * self._dtype.itemsize} bytes, and midstream's setting "
                f"lens_bytes is {self._nbytes}, of which "
                f"{sum(end - begin for begin, end in taken) * self._dtype.itemsize} are in use; "
                "raise it, or remove a lens",
            )
        maps = {}
        for nth, depth in enumerate(sorted(lens.matrices)):
            at_matrix = first + nth * of_one
            bias = at_matrix + width * width if lens.biases else -1
            maps[depth] = LensMap(at_matrix, bias, lens.adds)
        return RegisteredLens(first, first + size, maps)

    def _messages(self, made: RegisteredLens, lens: LinearLens) -> Iterator[WriteLenses]:
        for depth, one in made.maps.items():
            parts: list[tuple[int, Any]] = [(one.matrix, lens.matrices[depth])]
            if one.bias >= 0:
                parts.append((one.bias, lens.biases[depth]))
            for start, tensor in parts:
                numbers = tensor.detach().to("cpu", self._dtype).contiguous().view(-1)
                data = numbers.view(torch.uint8).numpy()
                for first in range(0, data.size, _MESSAGE_BYTES):
                    some = data[first : first + _MESSAGE_BYTES].tobytes()
                    yield WriteLenses(start * self._dtype.itemsize + first, some)
