"""Reference model: transformers in float32 with plain hooks, with and without edits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from midstream.sites import ENDS, INNER, OUTER, Tap
from midstream.tools.doctor.end_reference import EndReference
from midstream.tools.doctor.inner_reference import InnerReference
from midstream.tools.doctor.layers_kept import COUNTS
from midstream.tools.doctor.site_finder import ModuleCall, Places, SitePlace, find

# An edit as a function of the activations at its tap, [T, H], in any float dtype.
Change = Callable[[Tensor], Tensor]
_DEEPEST = 3
_STREAMS = ("hidden_states", "x", "hidden", "inputs_embeds")


@dataclass(frozen=True)
class ForwardPass:
    """Results of one forward pass over all tokens of a request.

    Attributes:
        logits: float32 [T, V].
        values: float32 [T, H] by tap, after the edits at that tap.
        before: float32 [T, H] by edited tap, before the edits at that tap.
    """

    logits: Tensor
    values: dict[Tap, Tensor]
    before: dict[Tap, Tensor]


class Reference:
    """A transformers model, run without a KV cache.

    Attributes:
        model: the model.
        layers: its decoder layers.
        width: width of the residual stream.
        vocabulary: number of token ids.
        places: locations of each layer's sites, set by `find_sites`.
        inner: those inside attention and the MLP, likewise.
        ends: those without a layer, likewise.
    """

    def __init__(self, folder: str | Path) -> None:
        """Load the model.

        Raises:
            ValueError, ImportError: transformers cannot load it, or its decoder layers were not
                found.
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
        self.inner = InnerReference(self.layers, text)
        self.ends = EndReference(self.model, self.layers)

    @torch.no_grad()
    def find_sites(self, tokens: Sequence[int]) -> None:
        """Find all sites in four plain forward passes over `tokens`."""
        recorder = _CallRecorder(self.width)
        handles = [
            handle
            for index, layer in enumerate(self.layers)
            for path, module in [("", layer), *_inside(layer)]
            for handle in recorder.attach(module, (index, path))
        ]
        try:
            self.model(torch.tensor([list(tokens)]), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        self.places = [recorder.places(index) for index in range(len(self.layers))]
        branches = [places.found.get("mlp_out") for places in self.places]
        self.inner.find(
            lambda: self.model(torch.tensor([list(tokens)]), use_cache=False),
            len(tokens),
            [None if place is None else place.path for place in branches],
        )
        self.ends.find(tokens)

    def missing(self, tap: Tap) -> str | None:
        """Return why a tap cannot be compared; None if it can."""
        site, layer = tap
        if site in ENDS:
            return self.ends.missing.get(site)
        if site in INNER:
            return self.inner.places[layer].missing.get(site)
        if site in ("resid_pre", "resid_post") or site in self.places[layer].found:
            return None
        return self.places[layer].missing.get(site, "it was not found in transformers' layer")

    def heads(self, tap: Tap) -> int:
        """Return the number of heads that the vectors at a tap are of; 0: they are not of heads."""
        site, layer = tap
        return self.inner.places[layer].found[site].heads if site in INNER else 0

    def is_fixed(self, tap: Tap) -> bool:
        """Return whether transformers' values at a tap can be read, but not edited."""
        site, layer = tap
        return site in INNER and self.inner.places[layer].found[site].fixed

    @torch.no_grad()
    def run(
        self, tokens: Sequence[int], changes: Mapping[Tap, Change] | None = None
    ) -> ForwardPass:
        """Run one forward pass.

        Args:
            tokens: all token ids of the request.
            changes: edits by tap.
        """
        forward = ForwardPass(torch.empty(0), {}, {})
        handles = [
            handle
            for index, layer in enumerate(self.layers)
            for handle in self._hooks(layer, index, changes or {}, forward)
        ]
        handles += self.ends.hooks(partial(_record, forward, changes or {}))
        inner = {
            (site, index): partial(_record, forward, changes or {}, (site, index))
            for index, places in enumerate(self.inner.places)
            for site in places.found
        }
        try:
            with self.inner.recording(inner):
                logits = self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        finally:
            for handle in handles:
                handle.remove()
        return ForwardPass(logits.float(), forward.values, forward.before)

    def generate(
        self, prompt: Sequence[int], count: int, changes: Mapping[Tap, Change] | None = None
    ) -> tuple[list[int], ForwardPass]:
        """Generate greedily, with the whole request recomputed for each token.

        Args:
            prompt: token ids.
            count: number of tokens to generate, at least 1.
            changes: edits by tap.

        Returns:
            (generated token ids, the last forward pass, which covers all but the last of them).
        """
        tokens = list(prompt)
        for _ in range(count):
            forward = self.run(tokens, changes)
            tokens.append(int(forward.logits[-1].argmax()))
        return tokens[len(prompt) :], forward

    def _hooks(
        self, layer: nn.Module, index: int, changes: Mapping[Tap, Change], forward: ForwardPass
    ) -> list[Any]:
        """Register hooks on one layer that record into `forward`; return their handles."""

        def record(site: str, hidden: Tensor) -> Tensor | None:
            return _record(forward, changes, (site, index), hidden)

        found = [
            layer.register_forward_pre_hook(
                _entry(lambda hidden: record("resid_pre", hidden)), with_kwargs=True
            )
        ]
        for site in OUTER:
            place = self.places[index].found.get(site)
            if place is None:
                continue
            module = layer.get_submodule(place.path)
            found.append(_hook(module, place, partial(record, site), site))
        found.append(layer.register_forward_hook(_exit(lambda h: record("resid_post", h))))
        return found


def _record(
    forward: ForwardPass, changes: Mapping[Tap, Change], tap: Tap, hidden: Tensor
) -> Tensor | None:
    """Record the values at a tap; return what an edit makes of them, or None without one."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    change = changes.get(tap)
    if change is None:
        forward.values[tap] = rows.clone()
        return None
    forward.before[tap] = rows.clone()
    forward.values[tap] = change(rows).to(rows.dtype)
    return forward.values[tap].reshape(hidden.shape).clone()


def _hook(
    module: nn.Module, place: SitePlace, record: Callable[[Tensor], Tensor | None], site: str
) -> Any:
    """Register the hook of one site and return its handle."""
    if not place.entry:
        return module.register_forward_hook(_exit(record))
    if site != "resid_mid":
        return module.register_forward_pre_hook(_entry(record), with_kwargs=True)

    def in_place(hidden: Tensor) -> None:
        # The layer uses this same tensor for its skip connection.
        changed = record(hidden)
        if changed is not None:
            hidden.copy_(changed)

    return module.register_forward_pre_hook(_entry(in_place), with_kwargs=True)


def _entry(record: Callable[[Tensor], Tensor | None]) -> Callable[..., Any]:
    """Return a pre-forward hook that replaces the module's first tensor argument."""

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and isinstance(args[0], Tensor):
            changed = record(args[0])
            return None if changed is None else ((changed, *args[1:]), kwargs)
        name = next(name for name in _STREAMS if isinstance(kwargs.get(name), Tensor))
        changed = record(kwargs[name])
        return None if changed is None else (args, {**kwargs, name: changed})

    return hook


def _exit(record: Callable[[Tensor], Tensor | None]) -> Callable[..., Any]:
    """Return a forward hook that replaces the module's first result."""

    def hook(_module: nn.Module, _args: tuple[Any, ...], out: Any) -> Any:
        changed = record(out[0] if isinstance(out, tuple) else out)
        if changed is None:
            return None
        return (changed, *out[1:]) if isinstance(out, tuple) else changed

    return hook


def _decoder_layers(model: nn.Module, config: Any) -> list[nn.Module]:
    """Return the outermost module list whose length is the configured number of layers.

    Raises:
        ValueError: there is none.
    """
    counts = [getattr(config, name) for name in COUNTS if hasattr(config, name)]
    lists = [
        (name.count("."), list(module))
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) in counts
    ]
    if not lists:
        raise ValueError(
            f"{type(model).__name__}: no module list has the configured number of layers {counts}"
        )
    return min(lists, key=lambda found: found[0])[1]


def _inside(layer: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (path, module) of the layer's sub-modules, up to a nesting depth of `_DEEPEST`."""
    return [
        (name, module)
        for name, module in layer.named_modules()
        if name and name.count(".") < _DEEPEST
    ]


class _CallRecorder:
    """Records the calls of the layers' sub-modules in one plain forward pass."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._clock = 0
        self._entered: dict[tuple[int, str], tuple[int, Tensor | None]] = {}
        self._calls: dict[int, list[ModuleCall]] = {}
        self._ends: dict[int, tuple[Tensor, Tensor]] = {}

    def attach(self, module: nn.Module, where: tuple[int, str]) -> list[Any]:
        """Register hooks on one module and return their handles.

        Args:
            module: the module.
            where: (layer, path of the module within it); the layer itself has the path "".
        """

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
            call = ModuleCall(path, type(_module).__name__, entered, self._clock, given, returned)
            self._calls.setdefault(index, []).append(call)

        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after),
        ]

    def places(self, index: int) -> Places:
        """Return the locations of one layer's sites.

        Raises:
            ValueError: the layer's input or output is not a residual stream.
        """
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
