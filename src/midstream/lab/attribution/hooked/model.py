"""`HookedModel`: a transformers model, read and edited at midstream's sites."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from midstream.lab.attribution.hooked.call_recorder import CallRecorder
from midstream.lab.attribution.hooked.end_hooks import EndHooks
from midstream.lab.attribution.hooked.inner_hooks import (
    InnerHooks,
    Record,
    entry_hook,
    exit_hook,
    removing,
)
from midstream.lab.attribution.hooked.precision import in_float32
from midstream.lab.attribution.hooked.site_finder import Places, SitePlace
from midstream.sites import ENDS, INNER, OUTER, Tap

# Fields of configurations with the number of layers.
COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# Parts of the names of towers.
TOWERS = ("visual", "vision", "audio")
_DEEPEST = 3


class HookedModel:
    """A transformers model, run on one request at a time and without a KV cache."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        text = model.config.get_text_config(decoder=True)
        self.layers = _decoder_layers(model, text)
        self.width = int(text.hidden_size)
        self.vocabulary = int(text.vocab_size)
        self.max_length: int | None = getattr(text, "max_position_embeddings", None)
        self.places: list[Places] = []
        self.inner = InnerHooks(self.layers, text)
        self.ends = EndHooks(model, self.layers)

    def ids(self, tokens: Sequence[int]) -> Tensor:
        """Return token ids as the model's input, int64 [1, T]."""
        return torch.tensor([list(tokens)], device=self.model.get_input_embeddings().weight.device)

    @torch.no_grad()
    def find_sites(self, tokens: Sequence[int]) -> None:
        """Find the sites of all layers in two plain passes in float32: sums are compared."""
        recorder = CallRecorder(self.width)
        handles = [
            handle
            for index, layer in enumerate(self.layers)
            for path, module in [("", layer), *_inside(layer)]
            for handle in recorder.attach(module, (index, path))
        ]
        with removing(handles), in_float32(self.layers):
            self.model(self.ids(tokens), use_cache=False)
        self.places = [recorder.places(index) for index in range(len(self.layers))]
        branches = [places.found.get("mlp_out") for places in self.places]
        with in_float32(self.layers):
            self.inner.find(
                lambda: self.model(self.ids(tokens), use_cache=False),
                len(tokens),
                [None if place is None else place.path for place in branches],
            )

    def missing(self, tap: Tap) -> str | None:
        """Return why a tap can be neither read nor replaced; None if it can."""
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
        """Return whether the values at a tap can be read, but not replaced."""
        site, layer = tap
        return site in INNER and self.inner.places[layer].found[site].fixed

    @contextmanager
    def recording(self, records: Mapping[Tap, Record]) -> Iterator[None]:
        """Call functions of the rows [T, W] at taps, which return what replaces these, or None."""
        handles: list[Any] = []
        with removing(handles):
            for (site, layer), record in records.items():
                if site in OUTER:
                    handles.append(self._hook(site, layer, record))
            handles += self.ends.hooks({tap: records[tap] for tap in records if tap[0] in ENDS})
            inner = {tap: record for tap, record in records.items() if tap[0] in INNER}
            with self.inner.recording(inner):
                yield

    def _hook(self, site: str, index: int, record: Record) -> Any:
        layer, as_given = self.layers[index], partial(_replaced, record)
        if site == "resid_pre":
            return layer.register_forward_pre_hook(entry_hook(as_given), with_kwargs=True)
        if site == "resid_post":
            return layer.register_forward_hook(exit_hook(as_given))
        place = self.places[index].found[site]
        return _hook_inside(layer.get_submodule(place.path), place, as_given, site)


def _replaced(record: Record, hidden: Tensor) -> Tensor | None:
    """Return a stream [..., H] after a function of its rows; None if it stays."""
    changed = record(hidden.reshape(-1, hidden.shape[-1]))
    return None if changed is None else changed.reshape(hidden.shape).clone()


def _hook_inside(module: nn.Module, place: SitePlace, replaced: Record, site: str) -> Any:
    if not place.entry:
        return module.register_forward_hook(exit_hook(replaced))
    if site != "resid_mid":
        return module.register_forward_pre_hook(entry_hook(replaced), with_kwargs=True)

    def in_place(hidden: Tensor) -> None:
        # The layer uses this same tensor for its skip connection.
        changed = replaced(hidden)
        if changed is not None:
            hidden.copy_(changed)

    return module.register_forward_pre_hook(entry_hook(in_place), with_kwargs=True)


def _decoder_layers(model: nn.Module, config: Any) -> list[nn.Module]:
    """Return the outermost module list whose length is the configured number of layers, of those
    that are not in a tower.
    """
    counts = [getattr(config, name) for name in COUNTS if hasattr(config, name)]
    lists = [
        (name.count("."), list(module))
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) in counts
        and not any(part in name for part in TOWERS)
    ]
    if not lists:
        raise ValueError(
            f"{type(model).__name__}: no module list has the configured number of layers {counts}"
        )
    return min(lists, key=lambda candidate: candidate[0])[1]


def _inside(layer: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (path, module) of the layer's sub-modules, up to a nesting depth of `_DEEPEST`."""
    return [
        (name, module)
        for name, module in layer.named_modules()
        if name and name.count(".") < _DEEPEST
    ]
