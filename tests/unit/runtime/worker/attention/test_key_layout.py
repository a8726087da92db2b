"""Layouts of KV caches are found by writing numbered keys, whatever they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from midstream.errors import UnsupportedError
from midstream.runtime.worker.attention.key_layout import measure

BLOCKS, SIZE, HEADS, DIM = 6, 8, 3, 16
PACKED = torch.randperm(SIZE * DIM, generator=torch.Generator().manual_seed(0))


class Backend:
    """A cache in one of the layouts of vLLM's backends."""

    def __init__(self, layout: str, dtype: torch.dtype) -> None:
        shapes = {
            "blocks, tokens, heads": (BLOCKS, 2, SIZE, HEADS, DIM),
            "blocks, heads, tokens": (BLOCKS, 2, HEADS, SIZE, DIM),
            "keys, blocks": (2, BLOCKS, SIZE, HEADS, DIM),
            "beside values": (BLOCKS, SIZE, HEADS, 2 * DIM),
            "transposed": (BLOCKS, HEADS, 2 * SIZE, DIM),
            "packed": (BLOCKS, HEADS, 2 * SIZE, DIM),
        }
        self.layout = layout
        draw = torch.Generator().manual_seed(1)
        # With the pages of another layer between its own.
        self.cache = torch.randn(2, *shapes[layout], generator=draw).to(dtype)[1]
        if layout == "blocks, heads, tokens":
            self.cache = self.cache.transpose(2, 3)

    def write(self, _: Any, keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
        for key, value, slot in zip(keys, values, slots.tolist(), strict=True):
            block, token = divmod(slot, SIZE)
            if self.layout in ("blocks, tokens, heads", "blocks, heads, tokens"):
                cache[block, 0, token], cache[block, 1, token] = key, value
            elif self.layout == "keys, blocks":
                cache[0, block, token], cache[1, block, token] = key, value
            elif self.layout == "beside values":
                cache[block, token] = torch.cat((key, value), -1)
            else:
                both = cache[block].unflatten(1, (2, SIZE))
                both[:, 1, token] = value
                mine = both[:, 0].flatten(1)
                places = torch.arange(DIM) * SIZE + token
                mine[:, PACKED[places] if self.layout == "packed" else places] = key

    def attention(self, **changed: Any) -> Any:
        given = {
            "kv_cache": self.cache,
            "impl": SimpleNamespace(do_kv_cache_update=self.write),
            "attn_backend": SimpleNamespace(get_name=lambda: "MINE"),
            "dtype": self.cache.dtype,
            "kv_cache_dtype": "auto",
            "num_kv_heads": HEADS,
            "head_size": DIM,
            "head_size_v": DIM,
        }
        return SimpleNamespace(**{**given, **changed})


LAYOUTS = (
    "blocks, tokens, heads",
    "blocks, heads, tokens",
    "keys, blocks",
    "beside values",
    "transposed",
    "packed",
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_are_read_where_the_backend_writes_them(layout: str, dtype: torch.dtype) -> None:
    backend = Backend(layout, dtype)
    before = backend.cache.clone()
    found = measure(backend.attention(), BLOCKS, SIZE)
    assert torch.equal(backend.cache, before)
    assert (found.strides is None) == (layout == "packed")
    keys = torch.randn(BLOCKS * SIZE, HEADS, DIM).to(dtype)
    backend.write(None, keys, -keys, backend.cache, torch.arange(BLOCKS * SIZE))
    blocks = torch.tensor([[3, 1], [0, 5]])
    expected = keys.unflatten(0, (BLOCKS, SIZE))[blocks].flatten(1, 2)
    assert torch.equal(found.read(backend.cache, blocks), expected)


def test_a_backend_that_stores_something_else_is_refused_by_name() -> None:
    backend = Backend("keys, blocks", torch.float32)

    def write(_: Any, keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
        backend.write(_, keys.flip(-1) / 2, values, cache, slots)

    impl = SimpleNamespace(do_kv_cache_update=write)
    before = backend.cache.clone()
    with pytest.raises(UnsupportedError, match="the backend MINE stores keys in a form"):
        measure(backend.attention(impl=impl), BLOCKS, SIZE)
    assert torch.equal(backend.cache, before)
    with pytest.raises(UnsupportedError, match="the backend MINE writes keys only while"):
        measure(backend.attention(impl=SimpleNamespace()), BLOCKS, SIZE)
    quantised = backend.attention(kv_cache=backend.cache.to(torch.uint8), kv_cache_dtype="fp8")
    with pytest.raises(UnsupportedError, match="has the dtype fp8"):
        measure(quantised, BLOCKS, SIZE)


@pytest.mark.skipif(not hasattr(torch.ops, "_C"), reason="vLLM's operations are not built")
@pytest.mark.parametrize(
    ("isa", "dtype", "size", "dim", "is_regular"),
    [
        ("vec", torch.float32, 128, 32, True),
        ("vec", torch.bfloat16, 32, 64, True),
        ("vec16", torch.float16, 16, 80, True),
        ("amx", torch.bfloat16, 32, 64, False),
    ],
)
def test_the_layouts_of_vllms_cpu_backend_are_found(
    isa: str, dtype: torch.dtype, size: int, dim: int, is_regular: bool
) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

    if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
        pytest.skip("this vLLM is not built for the CPU")
    impl: Any = SimpleNamespace(attn_type="decoder", kv_cache_dtype="auto")
    impl.do_kv_cache_update = lambda *given: CPUAttentionBackendImpl.do_kv_cache_update(
        impl, *given
    )
    cache = torch.randn(5, HEADS, size, 2 * dim).to(dtype)
    attention = SimpleNamespace(
        impl=impl, attn_backend=CPUAttentionBackend, kv_cache=cache, kv_cache_dtype="auto",
        dtype=dtype, num_kv_heads=HEADS, head_size=dim, head_size_v=dim, isa=isa,
        _k_scale_float=1.0, _v_scale_float=1.0,
    )  # fmt: skip
    found = measure(attention, 5, size)
    assert (found.strides is not None) == is_regular
    keys = torch.randn(5 * size, HEADS, dim).to(dtype)
    impl.do_kv_cache_update(attention, keys, keys, cache, torch.arange(5 * size))
    expected = keys.unflatten(0, (5, size))[[4, 2]].flatten(0, 1)
    assert torch.equal(found.read(cache, torch.tensor([[4, 2]]))[0], expected)
