"""Records what the sub-modules of decoder layers read and return in one plain forward pass."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from midstream.lab.attribution.hooked.site_finder import ModuleCall, Places, find

# Names of the argument with the residual stream, where it is not the first one.
STREAMS = ("hidden_states", "x", "hidden", "inputs_embeds")


class CallRecorder:
    """The calls of the layers' sub-modules in one pass."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._clock = 0
        self._entered: dict[tuple[int, str], tuple[int, Tensor | None]] = {}
        self._calls: dict[int, list[ModuleCall]] = {}
        self._ends: dict[int, tuple[Tensor, Tensor]] = {}

    def attach(self, module: nn.Module, where: tuple[int, str]) -> list[Any]:
        """Register hooks on the module at (layer, path within it); return their handles."""

        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs = [*args, *(kwargs[name] for name in STREAMS if name in kwargs)]
            self._clock += 1
            self._entered[where] = self._clock, self._stream(inputs)

        def after(_module: nn.Module, _args: tuple[Any, ...], out: Any) -> None:
            index, path = where
            entered, incoming = self._entered[where]
            returned = self._stream(list(out) if isinstance(out, tuple) else [out])
            self._clock += 1
            if not path:
                assert incoming is not None
                assert returned is not None
                self._ends[index] = incoming, returned
                return
            call = ModuleCall(
                path, type(_module).__name__, entered, self._clock, incoming, returned
            )
            self._calls.setdefault(index, []).append(call)

        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after),
        ]

    def places(self, index: int) -> Places:
        if index not in self._ends:
            raise ValueError(
                f"layer {index}: its input or output is not a residual stream of width "
                f"{self._width}"
            )
        entering, leaving = self._ends[index]
        alike = [
            call
            for call in self._calls.get(index, [])
            if call.given is None or call.given.shape == entering.shape
            if call.returned is None or call.returned.shape == entering.shape
        ]
        return find(entering, leaving, sorted(alike, key=lambda call: call.entered))

    def _stream(self, values: list[Any]) -> Tensor | None:
        """Return a copy of the first value, [T, H], if it is a tensor of the stream's width."""
        if values and isinstance(values[0], Tensor) and values[0].shape[-1:] == (self._width,):
            return values[0].detach().reshape(-1, self._width).clone()
        return None
