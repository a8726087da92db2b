"""Small random checkpoints with quantised weights, as the tools that quantise write them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from midstream.sites import INNER, OUTER

HIDDEN, WIDE, LAYERS, VOCAB = 256, 512, 3, 512
HEADS, KV_HEADS, HEAD = 4, 2, 64
EXPERTS, RANK, GROUP = 4, 8, 128
_STD = 0.08  # of the weights; each layer then changes the stream by about as much as there is
Tensors = dict[str, Tensor]
ROUTED = ("mlp_pre", "mlp_pre_linear", "mlp_act")  # a mixture of experts lacks them


@dataclass(frozen=True)
class Method:
    """One way to quantise.

    Attributes:
        pack: the stored tensors of a matrix [out, in], by the end of their name; None: as it is.
        settings: `quantization_config` of the checkpoint.
        engine: arguments of the engine.
        shape: `llama`, `qwen3_moe` or `gpt_oss`.
        lora: whether requests have an adapter.
        lacking: sites that the model lacks.
        cpu: whether vLLM's CPU build has it.
    """

    pack: Callable[[Tensor], Tensors] | None = None
    settings: Mapping[str, Any] | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    shape: str = "llama"
    lora: bool = False
    lacking: tuple[str, ...] = ("router",)
    cpu: bool = False

    def sites(self) -> list[str]:
        """Return the sites that the model has, in every layer."""
        return [site for site in (*OUTER, *INNER) if site not in self.lacking]


def _fp8_rows(weight: Tensor) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def _fp8_whole(weight: Tensor) -> Tensors:
    scale = weight.abs().max() / 448
    return {
        "weight": (weight / scale).to(torch.float8_e4m3fn),
        "weight_scale": scale.reshape(1),
        "input_scale": torch.tensor([0.02]),
    }


def _int8_rows(weight: Tensor) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def _words(*shape: int) -> Tensor:
    """Return random int32: eight random numbers of four bits each."""
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def _scales(*shape: int, size: float) -> Tensor:
    return (size * (0.5 + torch.rand(shape))).bfloat16()


def _packed(weight: Tensor) -> Tensors:
    rows, columns = weight.shape
    return {
        "weight_packed": _words(rows, columns // 8),
        "weight_scale": _scales(rows, columns // GROUP, size=_STD / 4.6),
        "weight_shape": torch.tensor([rows, columns]),
    }


def _awq(weight: Tensor) -> Tensors:
    rows, columns = weight.shape
    return {
        "qweight": _words(columns, rows // 8),
        "qzeros": torch.full((columns // GROUP, rows // 8), -0x77777778, dtype=torch.int32),
        "scales": _scales(columns // GROUP, rows, size=_STD / 4.6),
    }


def _gptq(weight: Tensor) -> Tensors:
    rows, columns = weight.shape
    return {
        "qweight": _words(columns // 8, rows),
        "qzeros": torch.full((columns // GROUP, rows // 8), 0x77777777, dtype=torch.int32),
        "scales": _scales(columns // GROUP, rows, size=_STD / 4.6),
        "g_idx": torch.arange(columns, dtype=torch.int32) // GROUP,
    }


def _nvfp4(weight: Tensor) -> Tensors:
    rows, columns = weight.shape
    scale = _scales(rows, columns // 16, size=4.0).float()
    return {
        "weight_packed": torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8),
        "weight_scale": scale.to(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([4.0 * 2.9 / _STD]),
        "input_global_scale": torch.tensor([100.0]),
    }


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> Any:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def _args(bits: int, kind: str, strategy: str, dynamic: bool = False, **more: Any) -> Any:
    named = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True}
    return {**named, "dynamic": dynamic, **more}


_FP8 = Method(
    _fp8_rows,
    _compressed(
        "float-quantized", _args(8, "float", "channel"), _args(8, "float", "token", dynamic=True)
    ),
    cpu=True,
)
METHODS: dict[str, Method] = {
    "bf16": Method(cpu=True),
    "fp8": _FP8,
    "fp8-static": Method(
        _fp8_whole,
        _compressed("float-quantized", _args(8, "float", "tensor"), _args(8, "float", "tensor")),
        # vLLM's CUDA kernel computes the activation in the quantised numbers.
        lacking=("router", "mlp_act"),
    ),
    "fp8-online": Method(engine={"quantization": "fp8"}),
    "fp8-online-experts": Method(
        engine={"quantization": "fp8"}, shape="qwen3_moe", lacking=ROUTED
    ),
    "int8": Method(
        _int8_rows,
        _compressed(
            "int-quantized", _args(8, "int", "channel"), _args(8, "int", "token", dynamic=True)
        ),
        cpu=True,
    ),
    "w4a16": Method(
        _packed,
        _compressed("pack-quantized", _args(4, "int", "group", group_size=GROUP), None),
        cpu=True,
    ),
    "awq": Method(
        _awq,
        {
            "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True,
            "version": "gemm",
        },
        cpu=True,
    ),
    "gptq": Method(
        _gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
        cpu=True,
    ),
    "mxfp4": Method(
        None,
        {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                "lm_head",
            ],
        },
        shape="gpt_oss",
        lacking=ROUTED,
    ),
    "nvfp4": Method(
        _nvfp4,
        _compressed(
            "nvfp4-pack-quantized",
            _args(4, "float", "tensor_group", group_size=16),
            _args(4, "float", "tensor_group", dynamic="local", group_size=16),
        ),
    ),
    "fp8-kv": Method(engine={"kv_cache_dtype": "fp8"}, cpu=True),
    "fp8-lora": Method(
        _FP8.pack,
        _FP8.settings,
        {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 2},
        lora=True,
        cpu=True,
    ),
}  # fmt: skip


def make(name: str, folder: Path) -> Path:
    """Write the checkpoint of a method, and beside it its adapter; return its folder."""
    method = METHODS[name]
    path = folder / name
    path.mkdir(parents=True)
    torch.manual_seed(sum(map(ord, name)))
    config = _config(method.shape)
    if method.settings is not None:
        config["quantization_config"] = method.settings
    (path / "config.json").write_text(json.dumps(config))
    save_file(_weights(method), path / "model.safetensors", metadata={"format": "pt"})
    if method.lora:
        _write_adapter(adapter(path))
    return path


def adapter(path: Path) -> Path:
    """Return the folder of a checkpoint's adapter."""
    return path.with_name(f"{path.name}-adapter")


def _config(shape: str) -> dict[str, Any]:
    names = {"llama": "Llama", "qwen3_moe": "Qwen3Moe", "gpt_oss": "GptOss"}
    config = {
        "architectures": [f"{names[shape]}ForCausalLM"],
        "model_type": shape,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "bfloat16",
    }
    if shape == "qwen3_moe":
        experts = {"num_experts": EXPERTS, "moe_intermediate_size": WIDE, "norm_topk_prob": True}
        config |= {**experts, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
    if shape == "gpt_oss":
        yarn = {"rope_type": "yarn", "factor": 2.0, "beta_fast": 32.0, "beta_slow": 1.0}
        yarn |= {"original_max_position_embeddings": 256, "rope_theta": 10000.0, "truncate": False}
        config |= {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "swiglu_limit": 7.0}
        config |= {"sliding_window": 128, "rope_parameters": yarn, "rope_scaling": yarn}
        config |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    return config


def _matrix(rows: int, columns: int) -> Tensor:
    return _STD * torch.randn(rows, columns)


def _norm(width: int) -> Tensor:
    return (1 + 0.1 * torch.randn(width)).bfloat16()


def _weights(method: Method) -> Tensors:
    tensors: Tensors = {
        "model.embed_tokens.weight": (0.5 * torch.randn(VOCAB, HIDDEN)).bfloat16(),
        "model.norm.weight": _norm(HIDDEN),
        "lm_head.weight": _matrix(VOCAB, HIDDEN).bfloat16(),
    }
    heads, keys = HEADS * HEAD, KV_HEADS * HEAD
    projections = {"q": (heads, HIDDEN), "k": (keys, HIDDEN), "v": (keys, HIDDEN)}
    projections["o"] = (HIDDEN, heads)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        tensors[f"{at}.input_layernorm.weight"] = _norm(HIDDEN)
        tensors[f"{at}.post_attention_layernorm.weight"] = _norm(HIDDEN)
        for name, shape in projections.items():
            tensors |= _linear(f"{at}.self_attn.{name}_proj", _matrix(*shape), method.pack)
            if method.shape == "gpt_oss":
                bias = 0.1 * torch.randn(shape[0])
                tensors[f"{at}.self_attn.{name}_proj.bias"] = bias.bfloat16()
        if method.shape == "gpt_oss":
            tensors[f"{at}.self_attn.sinks"] = torch.randn(HEADS).bfloat16()
            tensors |= _gpt_oss_experts(f"{at}.mlp")
        elif method.shape == "qwen3_moe":
            tensors[f"{at}.self_attn.q_norm.weight"] = _norm(HEAD)
            tensors[f"{at}.self_attn.k_norm.weight"] = _norm(HEAD)
            tensors[f"{at}.mlp.gate.weight"] = _matrix(EXPERTS, HIDDEN).bfloat16()
            for expert in range(EXPERTS):
                tensors |= _mlp(f"{at}.mlp.experts.{expert}", method.pack)
        else:
            tensors |= _mlp(f"{at}.mlp", method.pack)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _mlp(at: str, pack: Callable[[Tensor], Tensors] | None) -> Tensors:
    shapes = {"gate": (WIDE, HIDDEN), "up": (WIDE, HIDDEN), "down": (HIDDEN, WIDE)}
    tensors: Tensors = {}
    for name, shape in shapes.items():
        tensors |= _linear(f"{at}.{name}_proj", _matrix(*shape), pack)
    return tensors


def _linear(at: str, weight: Tensor, pack: Callable[[Tensor], Tensors] | None) -> Tensors:
    parts = {"weight": weight.bfloat16()} if pack is None else pack(weight)
    return {f"{at}.{name}": value for name, value in parts.items()}


def _gpt_oss_experts(at: str) -> Tensors:
    """Return the router, and experts of random MXFP4 numbers with random exponents."""
    tensors: Tensors = {
        f"{at}.router.weight": _matrix(EXPERTS, HIDDEN).bfloat16(),
        f"{at}.router.bias": (0.1 * torch.randn(EXPERTS)).bfloat16(),
    }
    for name, rows, columns in (("gate_up", 2 * WIDE, HIDDEN), ("down", HIDDEN, WIDE)):
        blocks = EXPERTS, rows, columns // 32
        place = f"{at}.experts.{name}_proj"
        tensors[f"{place}_blocks"] = torch.randint(0, 256, (*blocks, 16), dtype=torch.uint8)
        tensors[f"{place}_scales"] = torch.randint(121, 124, blocks, dtype=torch.uint8)
        tensors[f"{place}_bias"] = (0.1 * torch.randn(EXPERTS, rows)).bfloat16()
    return tensors


def _write_adapter(path: Path) -> None:
    path.mkdir()
    names = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": names}
    settings |= {"bias": "none", "task_type": "CAUSAL_LM", "base_model_name_or_path": ""}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    tensors: Tensors = {}
    for layer in range(LAYERS):
        for name in names:
            rows, columns = {
                "q_proj": (HEADS * HEAD, HIDDEN),
                "v_proj": (KV_HEADS * HEAD, HIDDEN),
                "o_proj": (HIDDEN, HEADS * HEAD),
                "down_proj": (HIDDEN, WIDE),
            }.get(name, (WIDE, HIDDEN))
            block = "self_attn" if name[0] in "qvo" else "mlp"
            at = f"base_model.model.model.layers.{layer}.{block}.{name}"
            tensors[f"{at}.lora_A.weight"] = _matrix(RANK, columns).bfloat16()
            tensors[f"{at}.lora_B.weight"] = _matrix(rows, RANK).bfloat16()
    save_file(tensors, path / "adapter_model.safetensors")
