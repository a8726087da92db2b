"""Where keys are in vLLM's KV cache, which differs by backend: found by writing numbered ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from midstream.errors import UnsupportedError

# Largest base of digits that a dtype represents exactly.
_BASES = {
    torch.float32: 1 << 20,
    torch.float16: 1 << 10,
    torch.bfloat16: 1 << 7,
    torch.float8_e4m3fn: 1 << 4,
    torch.float8_e5m2: 1 << 3,
}
# Formats of numbers in quantised caches, by vLLM's name, with one scale for all keys of a layer.
_QUANTISED = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
_NULL_BLOCK = 0


@dataclass(frozen=True, slots=True, eq=False)
class KeyLayout:
    """Where the keys of a block are, in elements."""

    dim: int  # dimension of the cache that counts blocks
    offset: int  # from the begin of a block to its first key
    size: int
    strides: tuple[int, int, int] | None  # between tokens, heads and numbers; None: irregular
    index: Tensor | None  # int64 [tokens, heads, head_dim], from `offset` on; None: see `strides`
    heads: int
    head_dim: int
    dtype: torch.dtype  # vLLM may store it as bytes; without the layer's scale
    span: int = 0  # from the first number of a key to the last; only with `index`

    def view(self, cache: Tensor) -> Tensor | None:
        """Return a view of the cache, [blocks, tokens, heads, head_dim]; None if there is none."""
        if self.strides is None:
            return None
        shape = (cache.shape[self.dim], self.size, self.heads, self.head_dim)
        start = cache.storage_offset() + self.offset
        keys = cache.as_strided(shape, (cache.stride(self.dim), *self.strides), start)
        return keys.view(self.dtype)

    def read(self, cache: Tensor, blocks: Tensor) -> Tensor:
        """Return the keys of blocks [requests, blocks] as [requests, tokens, heads, head_dim]."""
        view = self.view(cache)
        if view is not None:
            keys = view[blocks]
        else:
            assert self.index is not None
            count, stride = cache.shape[self.dim], cache.stride(self.dim)
            start = cache.storage_offset() + self.offset
            flat = cache.as_strided((count, self.span), (stride, 1), start)
            keys = flat[blocks[..., None], self.index.view(-1)].view(self.dtype)
        requests, per_request = blocks.shape
        return keys.reshape(requests, per_request * self.size, self.heads, self.head_dim)


def measure(attention: Any, num_blocks: int, size: int) -> KeyLayout:
    """Return where keys are in a layer's KV cache, unchanged after. No step may be in progress."""
    cache = cache_of(attention)
    write = getattr(attention.impl, "do_kv_cache_update", None)
    backend = attention.attn_backend.get_name()
    if write is None:
        raise UnsupportedError(f"the backend {backend} writes keys only while it attends")
    dtype = _format_of(attention, cache)
    shape = size, attention.num_kv_heads, attention.head_size
    for dim, count in enumerate(cache.shape):
        # Before vLLM 0.32 a block of the scheduler may be several of the backend.
        if count % num_blocks:
            continue
        block = cache.select(dim, _NULL_BLOCK)
        before = block.clone()
        try:
            codes = _written(attention, write, cache, block, size, dtype)
        finally:
            block.copy_(before)
        layout = _layout(block, codes, dim, shape, dtype)
        if layout is not None:
            return layout
    raise UnsupportedError(
        f"the backend {backend} stores keys in a form that midstream does not know"
    )


def cache_of(attention: Any) -> Tensor:
    kv_cache = attention.kv_cache
    cache: Tensor = kv_cache[0] if isinstance(kv_cache, (list, tuple)) else kv_cache
    return cache


def scale_of(attention: Any, of: str) -> float:
    """Return the factor of the numbers that a layer stores or reads; `of` is `k`, `v` or `q`."""
    if attention.kv_cache_dtype not in _QUANTISED:
        return 1.0
    scale = getattr(attention, f"_{of}_scale", None)
    if scale is None or scale.numel() != 1 or getattr(attention, "calculate_kv_scales", False):
        raise UnsupportedError(
            f"its KV cache has the dtype {attention.kv_cache_dtype} without one scale for all "
            "heads that is known when the engine starts"
        )
    return float(scale)


def _format_of(attention: Any, cache: Tensor) -> torch.dtype:
    name = attention.kv_cache_dtype
    dtype = _QUANTISED.get(name)
    if dtype is not None and cache.dtype in (torch.uint8, dtype):
        return dtype
    if dtype is None and cache.dtype == attention.dtype and cache.dtype in _BASES:
        return cache.dtype
    raise UnsupportedError(
        f"its KV cache has the dtype {name}; only the model's own dtype, "
        f"{', '.join(_QUANTISED)} are supported"
    )


def _written(
    attention: Any, write: Any, cache: Tensor, block: Tensor, size: int, dtype: torch.dtype
) -> Tensor:
    """Write numbered keys into the null block; return each element's number, −1 where no key is."""
    base = _BASES[dtype]
    nothing = torch.full((), -1.0, device=cache.device).to(dtype).view(block.dtype)
    shape = (size, attention.num_kv_heads, attention.head_size)
    numbers = torch.arange(torch.Size(shape).numel(), device=cache.device).view(shape)
    slots = _NULL_BLOCK * size + torch.arange(size, device=cache.device)
    values = torch.full((*shape[:2], attention.head_size_v), -2.0, device=cache.device)
    values *= scale_of(attention, "v")
    scale = scale_of(attention, "k")
    if attention.kv_cache_dtype in _QUANTISED:
        scale *= 1 + 2**-6  # some backends round down: digits become what they are either way
    element_numbers = torch.zeros(block.shape, dtype=torch.int64, device=cache.device)
    is_key = torch.ones(block.shape, dtype=torch.bool, device=cache.device)
    digit = 1
    while digit < numbers.numel():
        block.copy_(nothing)
        keys = (numbers // digit % base * scale).to(attention.dtype)
        write(attention, keys, values.to(attention.dtype), cache, slots)
        stored = block.view(dtype).float()
        is_key &= stored >= 0
        element_numbers += torch.where(stored >= 0, stored, 0).to(torch.int64) * digit
        digit *= base
    return torch.where(is_key, element_numbers, -1)


def _layout(
    block: Tensor,
    codes: Tensor,
    dim: int,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
) -> KeyLayout | None:
    """Return the layout of the keys with these numbers; None if not each is there once."""
    size, heads, head_dim = shape
    places = torch.zeros((), dtype=torch.int64)
    for count, stride in zip(block.shape, block.stride(), strict=True):
        places = places[..., None] + torch.arange(count) * stride
    codes = codes.cpu()
    held = codes >= 0
    numbers, offsets = codes[held], places[held]
    if numbers.numel() != size * heads * head_dim or numbers.unique().numel() != numbers.numel():
        return None
    index = torch.empty(numbers.numel(), dtype=torch.int64)
    index[numbers] = offsets
    index = index.view(size, heads, head_dim)
    first = int(index.min())
    index -= first
    strides = _strides(index)
    if strides is not None:
        first += int(index[0, 0, 0])
        return KeyLayout(dim, first, size, strides, None, heads, head_dim, dtype)
    span = int(index.max()) + 1
    index = index.to(block.device)
    return KeyLayout(dim, first, size, None, index, heads, head_dim, dtype, span)


def _strides(index: Tensor) -> tuple[int, int, int] | None:
    """Return the strides of offsets [tokens, heads, head_dim]; None if they have none."""
    origin = int(index[0, 0, 0])
    strides = []
    for dim, count in enumerate(index.shape):
        after = [0, 0, 0]
        after[dim] = min(1, count - 1)
        strides.append(int(index[tuple(after)]) - origin)
    regular = torch.full((), origin)
    for count, stride in zip(index.shape, strides, strict=True):
        regular = regular[..., None] + torch.arange(count) * stride
    dim_strides = (strides[0], strides[1], strides[2])
    # as_strided takes no negative strides.
    return dim_strides if torch.equal(regular, index) and min(dim_strides) >= 0 else None
