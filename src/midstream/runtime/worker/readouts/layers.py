"""Attention of the layers of one rank: which of them can be computed again, and with what."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from midstream.errors import UnsupportedError
from midstream.plan.readouts.attention import NO_QUERIES, QUERY_SITES
from midstream.runtime.models.decoder import Decoder, DecoderLayer
from midstream.runtime.models.forward_source import Types
from midstream.runtime.models.inner_sites import NO_ROPE
from midstream.runtime.worker.readouts.key_layout import KeyLayout, cache_of, measure, scale_of
from midstream.runtime.worker.readouts.weights import AttentionForm
from midstream.sites import Tap

_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max

# Returns the number of tokens of a block of a group of layers, by the group's number.
BlockSize = Callable[[int], int]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayer:
    """Attention of one layer, `module` being vLLM's `Attention`."""

    module: Any
    group: int  # number of its KV cache group, whose layers share a block table
    layout: KeyLayout
    form: AttentionForm
    key_heads: Tensor  # int64 [heads], key-value head of each query head
    query_scale: float | None = None  # attention reads queries as fp8, with this scale

    def queries(self, queries: Tensor) -> Tensor:
        """Return queries as attention reads them, without the scale."""
        if self.query_scale is None:
            return queries
        scaled = queries.float() * (1 / self.query_scale)
        return scaled.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).to(queries.dtype)

    def keys(self, blocks: Tensor) -> Tensor:
        """Return the keys of some blocks; see `KeyLayout.read`."""
        return self.layout.read(cache_of(self.module), blocks)

    def all_keys(self) -> Tensor | None:
        """Return the keys of all blocks; see `KeyLayout.view`."""
        return self.layout.view(cache_of(self.module))


class RankAttention:
    """Attention of the layers of one rank. To be used once the KV cache is allocated."""

    def __init__(
        self,
        decoder: Decoder,
        taps: Mapping[Tap, int],
        runner: Any,
        context_parallel: int,
        block_size: BlockSize,
    ) -> None:
        self._decoder = decoder
        self._taps = taps
        self._runner = runner
        self._context_parallel = context_parallel
        self._block_size = block_size

    def at(self, tap: int) -> AttentionLayer:
        """Return the attention that reads the queries of a tap, by its index."""
        return self._by_tap[tap]

    def forget(self) -> None:
        """Read anew, when it is next needed, what layers have of the model's weights: sinks of
        attention, and scales of keys.
        """
        for name in ("_by_tap", "_found"):
            vars(self).pop(name, None)

    @functools.cached_property
    def reasons(self) -> dict[int, str]:
        """For each layer whose attention cannot be computed again, by number, why not."""
        return self._found[1]

    @functools.cached_property
    def _by_tap(self) -> dict[int, AttentionLayer]:
        return {
            index: self._found[0][layer]
            for (site, layer), index in self._taps.items()
            if site in QUERY_SITES and layer in self._found[0]
        }

    @functools.cached_property
    def _found(self) -> tuple[dict[int, AttentionLayer], dict[int, str]]:
        readable: dict[int, AttentionLayer] = {}
        reasons: dict[int, str] = {}
        for layer in self._decoder.layers:
            try:
                _check_queries(self._decoder, layer.index, self._taps)
                if self._context_parallel > 1:
                    raise UnsupportedError("with context parallelism each rank has some keys only")
                readable[layer.index] = _attention_of(layer, self._runner, self._block_size)
            except UnsupportedError as error:
                reasons[layer.index] = str(error)
        return readable, reasons


def _check_queries(decoder: Decoder, layer: int, taps: Mapping[Tap, int]) -> None:
    """Check that a tap has the queries as attention reads them."""
    rotated, plain = QUERY_SITES
    why = decoder.lacking.get((rotated, layer))
    if why is not None and why != NO_ROPE.format(plain):
        raise UnsupportedError(f"there is no {rotated}: {why}")
    if (rotated if why is None else plain, layer) not in taps:
        reason = decoder.lacking.get((plain, layer))
        raise UnsupportedError(NO_QUERIES if reason is None else f"there is no {plain}: {reason}")


def _attention_of(layer: DecoderLayer, runner: Any, block_size: BlockSize) -> AttentionLayer:
    expected = Types.of_vllm().attention
    modules = [module for module in layer.module.modules() if isinstance(module, expected)]
    if len(modules) != 1:
        raise UnsupportedError(f"it has {len(modules)} modules that attend to keys by head")
    module: Any = modules[0]
    # A tapped module is of a class made at run time.
    kind = next(cls for cls in type(module).__mro__ if cls.__module__.startswith("vllm."))
    if kind is not expected:
        raise UnsupportedError(f"its attention is a {kind.__qualname__}")
    impl, backend = module.impl, module.attn_backend.get_name()
    for name in ("scale", "logits_soft_cap", "alibi_slopes"):
        if not hasattr(impl, name):
            raise UnsupportedError(f"the backend {backend} does not say its {name}")
    if getattr(module, "has_sink", False) and getattr(impl, "sinks", None) is None:
        raise UnsupportedError(f"the backend {backend} does not say its sinks")
    if module.attn_type != "decoder":
        raise UnsupportedError(f"its attention is not causal ({module.attn_type})")
    if getattr(module, "use_mm_prefix", False):
        raise UnsupportedError("tokens of an image attend to later ones of it")
    if getattr(module, "use_alibi_sqrt", False):
        raise UnsupportedError("its ALiBi biases are square roots of distances")
    if getattr(impl, "chunk_lookback", -1) > -1:
        raise UnsupportedError("it attends by chunks")
    quant = getattr(module, "query_quant", None)
    if quant is not None and tuple(getattr(quant, "group_shape", ())) != (-1, -1):
        raise UnsupportedError("its queries are quantised with a scale for each head")
    groups = runner.kv_cache_config.kv_cache_groups
    mine = [index for index, group in enumerate(groups) if module.layer_name in group.layer_names]
    if len(mine) != 1:
        raise UnsupportedError("vLLM has no KV cache for it")
    layout = measure(module, runner.kv_cache_config.num_blocks, block_size(mine[0]))
    device = cache_of(module).device
    per_key = module.num_heads // module.num_kv_heads
    key_heads = torch.arange(module.num_heads, device=device) // per_key
    query_scale = None
    if getattr(module, "query_quant", None) is not None:
        query_scale = scale_of(module, "q")
    scale = scale_of(module, "k") * (query_scale or 1.0)
    form = _form_of(module, device, scale)
    return AttentionLayer(module, mine[0], layout, form, key_heads, query_scale)


def _form_of(module: Any, device: torch.device, scale: float) -> AttentionForm:
    """Return what a layer does with products of numbers that have this scale."""
    impl = module.impl

    def by_head(values: Any) -> Tensor | None:
        if values is None:
            return None
        return torch.as_tensor(values, dtype=torch.float32, device=device).flatten()

    return AttentionForm(
        scale=float(impl.scale) * scale,
        soft_cap=float(impl.logits_soft_cap or 0.0),
        window=int(module.sliding_window or 0),
        slopes=by_head(impl.alibi_slopes),
        sinks=by_head(getattr(impl, "sinks", None)),
    )
