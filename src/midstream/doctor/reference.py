"""A transformers model in float32 with plain hooks: what every site holds, edited and not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from midstream.doctor.layers_kept import COUNTS
from midstream.doctor.places import Call, Place, Places, find
from midstream.sites import NAMES

Tap = tuple[str, int]
# What an edit makes of the rows of its tap, [T, H], in any float type.
Change = Callable[[Tensor], Tensor]
_DEEPEST = 3
_STREAMS = ("hidden_states", "x", "hidden", "inputs_embeds")


@dataclass(frozen=True)
class Seen:
    """One pass over all the tokens of a request.

    Attributes:
        logits: float32 [T, V].
        values: float32 [T, H] of each tap, with the edits there in it.
        before: the same without the edits there, of the taps that are edited.
    """

    logits: Tensor
    values: dict[Tap, Tensor]
    before: dict[Tap, Tensor]


class Reference:
    """The model, run without a KV cache.

    Attributes:
        width: of the stream.
        places: of each layer, found by `look`.
    """

    def __init__(self, folder: str | Path) -> None:
        """Loads the model.

        Raises:
            ValueError, ImportError: transformers cannot load it, or its layers are not found.
        """
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        text = self.model.config.get_text_config(decoder=True)
        self.layers = _decoder_layers(self.model, text)
        self.width = int(text.hidden_size)
        self.vocabulary = int(text.vocab_size)
        self.places: list[Places] = []

    @torch.no_grad()
    def look(self, tokens: Sequence[int]) -> None:
        """Finds the sites in every layer, in a plain pass over some tokens."""
        watch = _Watch(self.width)
        handles = [
            handle
            for index, layer in enumerate(self.layers)
            for path, module in [("", layer), *_inside(layer)]
            for handle in watch.on(module, (index, path))
        ]
        try:
            self.model(torch.tensor([list(tokens)]), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        self.places = [watch.places(index) for index in range(len(self.layers))]

    def missing(self, tap: Tap) -> str | None:
        """Why a tap cannot be compared; None where it can."""
        site, layer = tap
        if site in ("resid_pre", "resid_post") or site in self.places[layer].found:
            return None
        return self.places[layer].missing.get(site, "it was not found in transformers' layer")

    @torch.no_grad()
    def run(self, tokens: Sequence[int], changes: Mapping[Tap, Change] | None = None) -> Seen:
        """One pass over all the tokens.

        Args:
            tokens: the whole request.
            changes: edits, by tap.
        """
        seen = Seen(torch.empty(0), {}, {})
        handles = [
            handle
            for index, layer in enumerate(self.layers)
            for handle in self._hooks(layer, index, changes or {}, seen)
        ]
        try:
            logits = self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        finally:
            for handle in handles:
                handle.remove()
        return Seen(logits.float(), seen.values, seen.before)

    def generate(
        self, prompt: Sequence[int], count: int, changes: Mapping[Tap, Change] | None = None
    ) -> tuple[list[int], Seen]:
        """Greedy tokens, the whole request computed anew for each; and the last pass, over all
        but the last of them.
        """
        tokens = list(prompt)
        for _ in range(count):
            seen = self.run(tokens, changes)
            tokens.append(int(seen.logits[-1].argmax()))
        return tokens[len(prompt) :], seen

    def _hooks(
        self, layer: nn.Module, index: int, changes: Mapping[Tap, Change], seen: Seen
    ) -> list[Any]:
        def reach(site: str, hidden: Tensor) -> Tensor | None:
            tap = site, index
            rows = hidden.reshape(-1, hidden.shape[-1])
            change = changes.get(tap)
            if change is None:
                seen.values[tap] = rows.clone()
                return None
            seen.before[tap] = rows.clone()
            seen.values[tap] = change(rows).to(rows.dtype)
            return seen.values[tap].reshape(hidden.shape).clone()

        found = [
            layer.register_forward_pre_hook(
                _entry(lambda hidden: reach("resid_pre", hidden)), with_kwargs=True
            )
        ]
        for site in NAMES:
            place = self.places[index].found.get(site)
            if place is None:
                continue
            module = layer.get_submodule(place.path)
            found.append(_hook(module, place, partial(reach, site), site))
        found.append(layer.register_forward_hook(_exit(lambda h: reach("resid_post", h))))
        return found


def _hook(
    module: nn.Module, place: Place, reach: Callable[[Tensor], Tensor | None], site: str
) -> Any:
    if not place.entry:
        return module.register_forward_hook(_exit(reach))
    if site != "resid_mid":
        return module.register_forward_pre_hook(_entry(reach), with_kwargs=True)

    def in_place(hidden: Tensor) -> None:
        # What the layer keeps for its skip connection is this very tensor.
        changed = reach(hidden)
        if changed is not None:
            hidden.copy_(changed)

    return module.register_forward_pre_hook(_entry(in_place), with_kwargs=True)


def _entry(reach: Callable[[Tensor], Tensor | None]) -> Callable[..., Any]:
    """A hook that puts another tensor in the place of the first one of a call."""

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and isinstance(args[0], Tensor):
            changed = reach(args[0])
            return None if changed is None else ((changed, *args[1:]), kwargs)
        name = next(name for name in _STREAMS if isinstance(kwargs.get(name), Tensor))
        changed = reach(kwargs[name])
        return None if changed is None else (args, {**kwargs, name: changed})

    return hook


def _exit(reach: Callable[[Tensor], Tensor | None]) -> Callable[..., Any]:
    """A hook that puts another tensor in the place of the first one that is returned."""

    def hook(_module: nn.Module, _args: tuple[Any, ...], out: Any) -> Any:
        changed = reach(out[0] if isinstance(out, tuple) else out)
        if changed is None:
            return None
        return (changed, *out[1:]) if isinstance(out, tuple) else changed

    return hook


def _decoder_layers(model: nn.Module, config: Any) -> list[nn.Module]:
    """The outermost list of as many modules as the configuration says there are layers."""
    counts = [getattr(config, name) for name in COUNTS if hasattr(config, name)]
    lists = [
        (name.count("."), list(module))
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) in counts
    ]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of as many layers as it has")
    return min(lists, key=lambda found: found[0])[1]


def _inside(layer: nn.Module) -> list[tuple[str, nn.Module]]:
    return [
        (name, module)
        for name, module in layer.named_modules()
        if name and name.count(".") < _DEEPEST
    ]


class _Watch:
    """What passes each module of the layers in one plain pass."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._clock = 0
        self._entered: dict[tuple[int, str], tuple[int, Tensor | None]] = {}
        self._calls: dict[int, list[Call]] = {}
        self._ends: dict[int, tuple[Tensor, Tensor]] = {}

    def on(self, module: nn.Module, where: tuple[int, str]) -> list[Any]:
        """Hooks on one module."""

        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = [*args, *(kwargs[name] for name in _STREAMS if name in kwargs)]
            self._clock += 1
            self._entered[where] = self._clock, self._stream(given)

        def after(_module: nn.Module, _args: tuple[Any, ...], out: Any) -> None:
            index, path = where
            entered, given = self._entered[where]
            returned = self._stream(list(out) if isinstance(out, tuple) else [out])
            self._clock += 1
            if not path:
                assert given is not None
                assert returned is not None
                self._ends[index] = given, returned
                return
            call = Call(path, type(_module).__name__, entered, self._clock, given, returned)
            self._calls.setdefault(index, []).append(call)

        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after),
        ]

    def places(self, index: int) -> Places:
        """Of one layer.

        Raises:
            ValueError: the layer was not called with a stream, or returned none.
        """
        if index not in self._ends:
            raise ValueError(f"layer {index} takes or returns no stream")
        entering, leaving = self._ends[index]
        alike = [
            call
            for call in self._calls.get(index, [])
            if call.given is None or call.given.shape == entering.shape
            if call.returned is None or call.returned.shape == entering.shape
        ]
        return find(entering, leaving, sorted(alike, key=lambda call: call.entered))

    def _stream(self, values: list[Any]) -> Tensor | None:
        """The first of these, if it is as wide as the stream; a copy, [T, H]."""
        if values and isinstance(values[0], Tensor) and values[0].shape[-1:] == (self._width,):
            return values[0].detach().reshape(-1, self._width).clone()
        return None
