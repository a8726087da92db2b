"""Layouts of KV caches are found by writing numbered keys, whatever they are."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from midstream.errors import UnsupportedError
from midstream.runtime.worker.readouts.key_layout import measure

BLOCKS, SIZE, HEADS, DIM = 6, 8, 3, 16
PACKED = torch.randperm(SIZE * DIM, generator=torch.Generator().manual_seed(0))


class Backend:
    """A cache in one of the layouts of vLLM's backends."""

    def __init__(self, layout: str, dtype: torch.dtype, of: torch.dtype | None = None) -> None:
        """Args:
        layout: one of `LAYOUTS`.
        dtype: the numbers that are stored.
        of: the model's dtype, if the cache is quantised, with a scale; vLLM stores bytes then.
        """
        shapes = {
            "blocks, tokens, heads": (BLOCKS, 2, SIZE, HEADS, DIM),
            "blocks, heads, tokens": (BLOCKS, 2, HEADS, SIZE, DIM),
            "keys, blocks": (2, BLOCKS, SIZE, HEADS, DIM),
            "beside values": (BLOCKS, SIZE, HEADS, 2 * DIM),
            "transposed": (BLOCKS, HEADS, 2 * SIZE, DIM),
            "packed": (BLOCKS, HEADS, 2 * SIZE, DIM),
        }
        self.layout, self.dtype, self.model = layout, dtype, of or dtype
        self.scale = 1.0 if of is None else 0.37
        draw = torch.Generator().manual_seed(1)
        # With the pages of another layer between its own.
        self.cache = torch.randn(2, *shapes[layout], generator=draw).to(dtype)[1]
        if layout == "blocks, heads, tokens":
            self.cache = self.cache.transpose(2, 3)
        if of is not None:
            self.cache = self.cache.view(torch.uint8)

    def write(self, _: Any, keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
        assert keys.dtype == values.dtype == self.model
        keys, values = (
            (each.float() / scale).to(self.dtype)
            for each, scale in ((keys, self.scale), (values, 900 * self.scale))
        )
        cache = cache.view(self.dtype)
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
            "dtype": self.model,
            "kv_cache_dtype": "auto" if self.dtype == self.model else FP8[self.dtype],
            "_k_scale": torch.tensor(self.scale),
            "_v_scale": torch.tensor(900 * self.scale),
            "num_kv_heads": HEADS,
            "head_size": DIM,
            "head_size_v": DIM,
        }
        return SimpleNamespace(**{**given, **changed})


FP8 = {torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8_e5m2"}
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
def test_keys_are_read_where_the_backend_writes_them(layout, dtype):
    check_keys_are_read(Backend(layout, dtype))


@pytest.mark.parametrize("dtype", list(FP8))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("of", [torch.bfloat16, torch.float32])
def test_quantised_keys_are_read_where_the_backend_writes_them(layout, dtype, of):
    check_keys_are_read(Backend(layout, dtype, of))


def check_keys_are_read(backend: Backend) -> None:
    before = backend.cache.clone()
    found = measure(backend.attention(), BLOCKS, SIZE)
    assert torch.equal(backend.cache, before)
    assert (found.strides is None) == (backend.layout == "packed")
    keys = torch.randn(BLOCKS * SIZE, HEADS, DIM).to(backend.model)
    backend.write(None, keys, -keys, backend.cache, torch.arange(BLOCKS * SIZE))
    blocks = torch.tensor([[3, 1], [0, 5]])
    expected = (keys.float() / backend.scale).to(backend.dtype).float()
    expected = expected.unflatten(0, (BLOCKS, SIZE))[blocks].flatten(1, 2)
    assert found.dtype == backend.dtype
    assert torch.equal(found.read(backend.cache, blocks).float(), expected)


def test_a_backend_that_stores_something_else_is_refused_by_name():
    backend = Backend("keys, blocks", torch.float32)

    def write(_: Any, keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
        backend.write(_, keys.flip(-1) / 2, values, cache, slots)

    def exact(_: Any, keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
        small.write(_, keys / 2, values, cache, slots)

    impl = SimpleNamespace(do_kv_cache_update=write)
    before = backend.cache.clone()
    with pytest.raises(UnsupportedError, match="the backend MINE stores keys in a form"):
        measure(backend.attention(impl=impl), BLOCKS, SIZE)
    assert torch.equal(backend.cache, before)
    with pytest.raises(UnsupportedError, match="the backend MINE writes keys only while"):
        measure(backend.attention(impl=SimpleNamespace()), BLOCKS, SIZE)
    for name, dtype in (("nvfp4", torch.uint8), ("fp8_per_token_head", torch.uint8),
                        ("fp8_inc", torch.float8_e4m3fn), ("fp8", torch.int8)):  # fmt: skip
        quantised = backend.attention(kv_cache=backend.cache.to(dtype), kv_cache_dtype=name)
        with pytest.raises(UnsupportedError, match=f"has the dtype {name}; only the model's"):
            measure(quantised, BLOCKS, SIZE)
    small = Backend("keys, blocks", torch.float8_e4m3fn, torch.bfloat16)
    for wrong in (
        {"_k_scale": torch.ones(HEADS)},
        {"_v_scale": torch.ones(HEADS)},
        {"_k_scale": None},
        {"calculate_kv_scales": True},
    ):
        with pytest.raises(UnsupportedError, match="fp8 without one scale for all heads"):
            measure(small.attention(**wrong), BLOCKS, SIZE)
    for wrong in (
        {"impl": SimpleNamespace(do_kv_cache_update=exact)},  # as with another exponent's bias
        {"kv_cache_dtype": "fp8_e5m2"},
    ):
        with pytest.raises(UnsupportedError, match="stores keys in a form"):
            measure(small.attention(**wrong), BLOCKS, SIZE)


@pytest.mark.skipif(not hasattr(torch.ops, "_C"), reason="vLLM's operations are not built")
@pytest.mark.parametrize(
    ("isa", "dtype", "size", "dim", "is_regular", "name"),
    [
        ("vec", torch.float32, 128, 32, True, "auto"),
        ("vec", torch.bfloat16, 32, 64, True, "auto"),
        ("vec16", torch.float16, 16, 80, True, "auto"),
        ("amx", torch.bfloat16, 32, 64, False, "auto"),
        ("vec", torch.float32, 64, 32, True, "fp8"),
        ("vec", torch.bfloat16, 32, 64, True, "fp8_e5m2"),
        ("amx", torch.bfloat16, 32, 64, False, "fp8_e4m3"),
    ],
)
def test_the_layouts_of_vllms_cpu_backend_are_found(isa, dtype, size, dim, is_regular, name):
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

    if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
        pytest.skip("this vLLM is not built for the CPU")
    scale = 1.0 if name == "auto" else 0.37
    number = dtype if name == "auto" else torch.float8_e4m3fn
    number = torch.float8_e5m2 if name == "fp8_e5m2" else number
    impl: Any = SimpleNamespace(attn_type="decoder", kv_cache_dtype=name)
    impl.do_kv_cache_update = lambda *given: CPUAttentionBackendImpl.do_kv_cache_update(
        impl, *given
    )
    cache = torch.randn(5, HEADS, size, 2 * dim).to(number)
    cache = cache if name == "auto" else cache.view(torch.uint8)
    attention = SimpleNamespace(
        impl=impl, attn_backend=CPUAttentionBackend, kv_cache=cache, kv_cache_dtype=name,
        dtype=dtype, num_kv_heads=HEADS, head_size=dim, head_size_v=dim, isa=isa,
        _k_scale_float=scale, _v_scale_float=scale, _k_scale=torch.tensor(scale),
        _v_scale=torch.tensor(scale),
    )  # fmt: skip
    try:
        found = measure(attention, 5, size)
    except RuntimeError as error:
        # vLLM's build for a processor without AVX-512 or AMX lacks some of its kernels.
        if "Unsupported CPU attention configuration" not in str(error):
            raise
        pytest.skip(f"{isa} is not of this processor: {error}")
    assert (found.strides is not None) == is_regular
    keys = torch.randn(5 * size, HEADS, dim).to(dtype)
    impl.do_kv_cache_update(attention, keys, keys, cache, torch.arange(5 * size))
    expected = (keys.float() / scale).unflatten(0, (5, size))[[4, 2]].flatten(0, 1)
    mine = found.read(cache, torch.tensor([[4, 2]]))[0].float()
    # It rounds down to a multiple of this much of a number.
    step = 0.0 if name == "auto" else torch.finfo(number).eps
    torch.testing.assert_close(mine, expected, rtol=step, atol=step / 32)
