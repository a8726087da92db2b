"""One forward and one backward pass of a transformers model, with the gradients at taps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from midstream.errors import SpecError
from midstream.lab.attribution.hooked.model import HookedModel
from midstream.lab.attribution.logit_functions import LogitFunction
from midstream.sites import Tap, order

# Called with a tap and its rows or gradient, [T, W], in the dtype of the model.
Read = Callable[[Tap, Tensor], None]


@contextmanager
def gradients_enabled() -> Iterator[None]:
    """Record gradients, also where the caller runs in inference mode or under `no_grad`."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def gradient_pass(
    model: HookedModel,
    tokens: Sequence[int],
    metric: LogitFunction,
    taps: Iterable[Tap],
    *,
    gradients: Read,
    rows: Read | None = None,
) -> float:
    """Run a model forward and backward once; return the metric's value.

    The layers' inner values are computed again in the backward pass rather than kept, so the memory
    needed is that of one layer, and of the stream once per layer.
    """
    pending = set(taps)
    starts: dict[Tap, Tensor] = {}

    def record(tap: Tap, values: Tensor) -> Tensor:
        # A copy, as a hook may write it into the tensor that was given.
        node = values.clone()
        is_first = tap in pending  # False: the layer is computed again, for the backward pass
        if is_first:
            pending.remove(tap)
            if rows is not None:
                rows(tap, values.detach())
        if tap in starts or not node.requires_grad:
            node = node.detach().requires_grad_()
            starts.setdefault(tap, node)
        if is_first:
            node.register_hook(partial(gradients, tap))
        return node

    records = {tap: partial(record, tap) for tap in sorted(pending, key=order)}
    with gradients_enabled(), model.recording(records), _recomputed(model.layers):
        value = metric(_logits(model, tokens, metric.last_only))
        if not value.requires_grad:
            raise SpecError(
                "metric", "its value does not depend on the logits, so there is no gradient"
            )
        torch.autograd.grad(value, list(starts.values()), allow_unused=True)
    return float(value.detach())


@torch.no_grad()
def plain_pass(
    model: HookedModel,
    tokens: Sequence[int],
    taps: Iterable[Tap],
    rows: Read,
    *,
    last_only: bool = True,
) -> Tensor:
    """Run a model forward; return the logits, float32 [T, V], or the last token's, [1, V]."""

    def record(tap: Tap, values: Tensor) -> None:
        rows(tap, values)

    with model.recording({tap: partial(record, tap) for tap in taps}):
        return _logits(model, tokens, last_only)


def _logits(model: HookedModel, tokens: Sequence[int], last_only: bool) -> Tensor:
    """Return the logits of all tokens, or of the last one, float32 [T, V]."""
    arguments: dict[str, Any] = {"use_cache": False}
    if last_only and "logits_to_keep" in inspect.signature(model.model.forward).parameters:
        arguments["logits_to_keep"] = 1
    logits: Tensor = model.model(model.ids(tokens), **arguments).logits[0].float()
    return logits[-1:] if last_only else logits


@contextmanager
def _recomputed(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Let layers compute their inner values again in a backward pass, instead of keeping them."""
    for layer in layers:
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
