"""The sites without a layer in a transformers model, found by arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from midstream.lab.attribution.hooked.inner_hooks import Record, removing
from midstream.sites import Tap

EMBED, FINAL_NORM = "embed", "final_norm"
COMPARED = (EMBED, FINAL_NORM)
# Relative to the largest value.
_CLOSE = 1e-5


class EndHooks:
    """The embedding and the final norm of a model; `missing` says what it lacks, and why."""

    def __init__(self, model: Any, layers: Sequence[nn.Module]) -> None:
        self._model = model
        self._layers = layers
        self._embedding: nn.Module = model.get_input_embeddings()
        # The model multiplies the embedding by this before anything else is added.
        self._scale = 1.0
        self._norm: nn.Module | None = None
        self.missing = dict.fromkeys(COMPARED, "it was not looked for")

    def find(self, tokens: Sequence[int]) -> None:
        """Find both sites in two plain forward passes over `tokens`, once in reverse order."""
        self.missing = {}
        calls = self._calls(tokens)
        self._find_embedding(calls, self._calls(tokens[::-1]))
        self._norm = next(
            (module for module, out in reversed(calls.outs) if _same(out, calls.read)), None
        )
        if self._norm is None:
            self.missing[FINAL_NORM] = "no module returns what transformers' head reads"

    def hooks(self, records: Mapping[Tap, Record]) -> list[Any]:
        """Register functions of rows [T, H] that return others, or None; return handles."""
        handles = []
        for (site, _), record in records.items():
            module, scale = (self._embedding, self._scale) if site == EMBED else (self._norm, 1.0)
            assert module is not None
            handles.append(module.register_forward_hook(partial(_after, record, scale)))
        return handles

    def _find_embedding(self, calls: _Calls, reverse: _Calls) -> None:
        embedded, entering = calls.embedded, calls.entering
        if embedded is None or entering is None or embedded.shape != entering.shape:
            self.missing[EMBED] = "transformers' embedding is not as wide as its stream"
            return
        scale = float((embedded * entering).sum() / (embedded * embedded).sum())
        if _same(scale * embedded, entering):
            self._scale = scale
            return
        # What is added must depend on the position alone.
        assert reverse.embedded is not None
        assert reverse.entering is not None
        if not _same(entering - embedded, reverse.entering - reverse.embedded):
            self.missing[EMBED] = "transformers' model changes the embedding before its first layer"

    def _calls(self, tokens: Sequence[int]) -> _Calls:
        """Return what the modules outside the layers give each other in one forward pass."""
        calls = _Calls()
        inside = {module for layer in self._layers for module in layer.modules()}

        def keep(module: nn.Module, _args: Any, out: Any) -> None:
            if isinstance(out, Tensor) and module is not head:
                calls.outs.append((module, out.detach().clone()))
                if module is self._embedding:
                    calls.embedded = calls.outs[-1][1]

        def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden_states = args[0] if args else kwargs.get("hidden_states")
            calls.entering = (
                hidden_states.detach().clone() if isinstance(hidden_states, Tensor) else None
            )

        def read(_module: nn.Module, args: tuple[Any, ...]) -> None:
            calls.read = args[0].detach().clone()

        head = self._model.get_output_embeddings()
        handles = [
            module.register_forward_hook(keep)
            for module in self._model.modules()
            if module not in inside
        ]
        handles.append(self._layers[0].register_forward_pre_hook(enter, with_kwargs=True))
        if head is not None:
            handles.append(head.register_forward_pre_hook(read))
        with removing(handles):
            self._model(torch.tensor([list(tokens)]), use_cache=False)
        return calls


@dataclass
class _Calls:
    """Values of one forward pass: returned by modules, in order, and at both ends."""

    outs: list[tuple[nn.Module, Tensor]] = field(default_factory=list)
    embedded: Tensor | None = None
    entering: Tensor | None = None
    read: Tensor | None = None


def _after(
    record: Record, scale: float, _module: nn.Module, _args: Any, out: Tensor
) -> Tensor | None:
    """Return a module's output, replaced after it is scaled; None if it stays."""
    changed = record(scale * out.reshape(-1, out.shape[-1]))
    return None if changed is None else (changed / scale).reshape(out.shape)


def _same(a: Tensor, b: Tensor | None) -> bool:
    if b is None or a.shape != b.shape:
        return False
    return float((a - b).abs().max()) <= _CLOSE * float(b.abs().max())
