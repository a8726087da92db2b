"""Which layers' attention can be computed again, and why the others' cannot."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention

from midstream.runtime.models.decoder import Decoder, DecoderLayer
from midstream.runtime.models.inner_sites import MLA, NO_ROPE
from midstream.runtime.worker.readouts.layers import RankAttention

BLOCKS, SIZE, HEADS, GROUPS, DIM = 5, 4, 4, 2, 8
BOTH = {("rot_q", 0): 3, ("q", 0): 1}


class Chunked(Attention):
    """As vLLM's classes of attention that are not plain."""

    __module__ = "vllm.somewhere"


def write(_: Any, keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
    for key, value, slot in zip(keys, values, slots.tolist(), strict=True):
        cache[slot // SIZE, 0, slot % SIZE], cache[slot // SIZE, 1, slot % SIZE] = key, value


def write8(_: Any, keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
    keys, values = ((each / 2).to(torch.float8_e4m3fn) for each in (keys, values))
    write(_, keys, values, cache.view(torch.float8_e4m3fn), slots)


BYTES: dict[str, Any] = {"kv_cache": torch.zeros(BLOCKS, 2, SIZE, GROUPS, DIM).byte()}
ONES: dict[str, Any] = {"kv_cache_dtype": "fp8", "_v_scale": torch.tensor(2.0)}
PER_TENSOR = SimpleNamespace(group_shape=(-1, -1))


def attention(kind: type[Attention] = Attention, **changed: Any) -> Any:
    """vLLM's own class with a plain cache; arguments that begin with `impl_` are its backend's."""
    impl = {
        "scale": 0.5,
        "logits_soft_cap": None,
        "alibi_slopes": None,
        "do_kv_cache_update": write,
    }
    impl |= {name[5:]: value for name, value in changed.items() if name.startswith("impl_")}
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    own = {
        "impl": SimpleNamespace(**{name: value for name, value in impl.items() if value != "no"}),
        "attn_backend": SimpleNamespace(get_name=lambda: "MINE"),
        "kv_cache": torch.zeros(BLOCKS, 2, SIZE, GROUPS, DIM),
        "kv_cache_dtype": "auto",
        "dtype": torch.float32,
        "num_heads": HEADS,
        "num_kv_heads": GROUPS,
        "head_size": DIM,
        "head_size_v": DIM,
        "attn_type": "decoder",
        "layer_name": "layers.0.attn",
        "sliding_window": None,
        "query_quant": None,
    }
    own |= {name: value for name, value in changed.items() if not name.startswith("impl_")}
    for name, value in own.items():
        setattr(module, name, value)
    return module


def found(
    module: Any = None,
    *,
    taps: Any = None,
    lacking: Any = None,
    ranks: int = 1,
    groups: Any = (["layers.0.attn"],),
) -> RankAttention:
    layer = nn.Module()
    layer.attn = attention() if module is None else module
    decoder = Decoder(1, (DecoderLayer(0, layer, None),), lacking or {})  # type: ignore[arg-type]
    config = SimpleNamespace(
        num_blocks=BLOCKS, kv_cache_groups=[SimpleNamespace(layer_names=each) for each in groups]
    )
    runner = SimpleNamespace(kv_cache_config=config)
    return RankAttention(decoder, BOTH if taps is None else taps, runner, ranks, lambda group: SIZE)


def test_a_layer_is_read_with_its_own_attributes() -> None:
    module = attention(
        sliding_window=7,
        impl_logits_soft_cap=2.5,
        impl_alibi_slopes=[0.5, 0.25, 0.125, 0.0625],
        impl_sinks=torch.arange(4.0).bfloat16(),
    )
    every = found(module, groups=(["layers.1.attn"], ["layers.0.attn"]))
    assert every.reasons == {}
    layer = every.at(3)
    assert every.at(1) is layer
    assert (layer.group, layer.key_heads.tolist()) == (1, [0, 0, 1, 1])
    form = layer.form
    assert (form.scale, form.soft_cap, form.window) == (0.5, 2.5, 7)
    assert form.of_heads(torch.tensor([2])).slopes.tolist() == [0.125]
    assert form.of_heads(torch.tensor([1, 3])).sinks.tolist() == [1, 3]
    assert layer.layout.strides == (GROUPS * DIM, DIM, 1)


def test_sinks_of_other_weights_are_read_anew() -> None:
    module = attention(impl_sinks=torch.arange(4.0).bfloat16())
    every = found(module)
    heads = torch.tensor([1, 3])
    assert every.at(3).form.of_heads(heads).sinks.tolist() == [1, 3]
    module.impl.sinks += 4
    every.forget()
    assert every.at(3).form.of_heads(heads).sinks.tolist() == [5, 7]
    assert every.reasons == {}


def test_quantised_keys_and_queries_are_read_with_their_scales() -> None:
    given: dict[str, Any] = {**BYTES, **ONES, "_k_scale": torch.tensor(2.0)}
    given["impl_do_kv_cache_update"] = write8
    plain = found(attention(**given)).at(3)
    assert (plain.layout.dtype, plain.form.scale) == (torch.float8_e4m3fn, 0.5 * 2)
    queries = torch.tensor([0.3, -7.9, 5000.0], dtype=torch.bfloat16)
    assert plain.queries(queries) is queries
    layer = found(attention(**given, query_quant=PER_TENSOR, _q_scale=torch.tensor(4.0))).at(3)
    assert layer.form.scale == 0.5 * 2 * 4
    assert torch.equal(layer.queries(queries), torch.tensor([0.078125, -2.0, 448.0]).bfloat16())
    keys = layer.all_keys()
    assert keys is not None
    assert keys.dtype == torch.float8_e4m3fn


def test_models_without_rotary_embedding_are_read_at_q() -> None:
    lacking = {("rot_q", 0): NO_ROPE.format("q")}
    assert found(lacking=lacking, taps={("q", 0): 1}).at(1).group == 0


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"taps": {("resid_post", 0): 0, ("q", 0): 1}}, 'add "rot_q" to midstream'),
        (
            {"lacking": {("rot_q", 0): NO_ROPE.format("q")}, "taps": {("rot_q", 0): 0}},
            'or "q" for a model without',
        ),
        ({"lacking": {("rot_q", 0): NO_ROPE.format("q") + " and then q_norm"}}, "then q_norm"),
        ({"lacking": {("rot_q", 0): MLA}}, "there is no rot_q: multi-head latent attention"),
        (
            {
                "lacking": {("rot_q", 0): NO_ROPE.format("q"), ("q", 0): "it is hidden"},
                "taps": {("k", 0): 0},
            },
            "there is no q: it is hidden",
        ),
        ({"ranks": 2}, "context parallelism"),
        ({"groups": (["layers.1.attn"],)}, "no KV cache for it"),
        ({"module": attention(Chunked)}, "its attention is a Chunked"),
        ({"module": nn.Linear(1, 1)}, "0 modules that attend"),
        ({"module": attention(attn_type="encoder_only")}, "not causal"),
        ({"module": attention(use_mm_prefix=True)}, "tokens of an image"),
        ({"module": attention(use_alibi_sqrt=True)}, "square roots"),
        (
            {"module": attention(query_quant=SimpleNamespace(group_shape=(-1, 16)))},
            "queries are quantised with a scale for each head",
        ),
        ({"module": attention(impl_chunk_lookback=2)}, "by chunks"),
        ({"module": attention(impl_logits_soft_cap="no")}, "MINE does not say its logits_soft_cap"),
        ({"module": attention(has_sink=True)}, "MINE does not say its sinks"),
        ({"module": attention(impl_do_kv_cache_update="no")}, "MINE writes keys only while"),
        (
            {"module": attention(**BYTES, kv_cache_dtype="nvfp4")},
            "the dtype nvfp4; only the model's own dtype, fp8, fp8_e4m3, fp8_e5m2 are",
        ),
        (
            {"module": attention(**BYTES, **ONES, _k_scale=torch.ones(2))},
            "the dtype fp8 without one scale for all heads",
        ),
        (
            {
                "module": attention(
                    **BYTES, **ONES, impl_do_kv_cache_update=write8, query_quant=PER_TENSOR
                )
            },
            "the dtype fp8 without one scale",
        ),
    ],
)
def test_layers_whose_attention_cannot_be_computed_again_say_why(given: Any, reason: str) -> None:
    reasons = found(**given).reasons
    assert list(reasons) == [0]
    assert reason in reasons[0]
