"""Sparse autoencoders in the folders of other tools, each by its own formula: dictionary_learning
(`ae.pt`), sparsify (`sae.safetensors`), Gemma Scope 2 (`params.safetensors`), Llama Scope
(`hyperparams.json`) and circuit-tracer (`layer_N.safetensors` beside `config.yaml`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midstream import sites
from midstream.errors import SpecError
from midstream.sae.saelens import HOOKS, SaeConfig
from midstream.sae.tensors import Arrays
from midstream.torch_file import tensors_by_name
from midstream.validation import at, check_regular, kind, listed, read_int, read_json, show

if TYPE_CHECKING:
    from torch import Tensor

_MAX_CONFIG_BYTES = 1 << 20
_LAYER_FILE = re.compile(r"layer_(0|[1-9][0-9]{0,4})\.safetensors")
_SUBMODULE = re.compile(r"resid_post_layer_(0|[1-9][0-9]{0,4})")
_HF_LAYER = re.compile(r"model\.(?:language_model\.)?layers\.(0|[1-9][0-9]{0,4})\.(.+)")
# Gemma Scope 2's names of hook points, and TransformerLens's.
_HF_HOOKS = {
    "output": "hook_resid_post",
    "self_attn.o_proj.input": "attn.hook_z",
    "pre_feedforward_layernorm.output": "mlp.hook_in",
    "post_feedforward_layernorm.output": "hook_mlp_out",
}
_HOOK_OF = {site: hook for hook, site in HOOKS.items()}


@dataclass(frozen=True, slots=True)
class OtherSae:
    """What was read: a configuration and tensors by SAELens's names and in its layout.

    Attributes:
        scale, scale_out: factors of the vectors that it reads, and of those that it was to
            reconstruct, in training.
    """

    config: SaeConfig
    tensors: Arrays
    scale: float = 1.0
    scale_out: float = 1.0


def read_other(path: Path) -> OtherSae | None:
    """Read a folder, or a file of circuit-tracer; None: it is of none of these tools."""
    if _LAYER_FILE.fullmatch(path.name) and path.with_name("config.yaml").exists():
        return _named(path, _circuit_tracer)
    for name, read in _READERS.items():
        if (path / name).exists():
            return _named(path, read)
    return None


def _named(path: Path, read: Callable[[Path], OtherSae]) -> OtherSae:
    with at(str(path)):
        try:
            return read(path)
        except OSError as error:
            raise SpecError("", f"{error.filename or path}: {error.strerror or error}") from None


def _dictionary_learning(folder: Path) -> OtherSae:
    """Read `ae.pt` with the class that `config.json` names, as its `encode` computes."""
    trainer = _section(_json(folder / "config.json"), "trainer")
    name = str(trainer.get("dict_class"))
    if name not in _DICTIONARIES:
        raise SpecError(
            "config.json.trainer.dict_class",
            f"expected one of {listed(_DICTIONARIES)}, got {show(name)}",
        )
    tensors = _pickled(folder / "ae.pt")
    width, features = _size(trainer, "activation_dim"), _size(trainer, "dict_size")
    names, subtract, architecture = _DICTIONARIES[name]
    hook = _SUBMODULE.fullmatch(str(trainer.get("submodule_name", "")))
    config = SaeConfig(
        architecture,
        f"blocks.{hook[1]}.hook_resid_post" if hook else None,
        subtract,
        width=width,
        features=features,
    )
    groups, active = tensors.get("group_sizes"), tensors.get("active_groups")
    if groups is not None and active is not None and int(active) != len(groups):
        raise SpecError(
            "ae.pt.active_groups", f"{int(active)} of {len(groups)}: all must be active"
        )
    weights = {ours: _tensor(tensors, theirs) for ours, theirs in names.items()}
    of_linear = "W_enc" not in tensors
    weights["W_enc"] = _oriented(weights["W_enc"], "W_enc", (width, features), of_linear)
    weights["W_dec"] = _oriented(weights["W_dec"], "W_dec", (features, width), of_linear)
    if architecture == "topk":
        config = replace(config, top_k=int(_tensor(tensors, "k")))
    if "threshold" in weights:
        weights["threshold"] = weights["threshold"].expand(features).clone()
    if name in ("GatedAutoEncoder", "JumpReluAutoEncoder"):
        # Their activations are multiplied by the norms of the decoder's rows, after the gate.
        weights = _times_norms(weights)
    return OtherSae(config, weights)


# By `dict_class`: its names of the tensors, whether b_dec is subtracted, and the architecture.
_LINEAR = {"W_enc": "encoder.weight", "W_dec": "decoder.weight"}
_TOPK = {**_LINEAR, "b_enc": "encoder.bias", "b_dec": "b_dec"}
_PLAIN = {name: name for name in ("W_enc", "b_enc", "W_dec", "b_dec")}
_DICTIONARIES: Mapping[str, tuple[Mapping[str, str], bool, str]] = {
    "AutoEncoder": ({**_LINEAR, "b_enc": "encoder.bias", "b_dec": "bias"}, True, "standard"),
    "AutoEncoderNew": (
        {**_LINEAR, "b_enc": "encoder.bias", "b_dec": "decoder.bias"}, False, "standard"
    ),
    "AutoEncoderTopK": (_TOPK, True, "topk"),
    "BatchTopKSAE": ({**_TOPK, "threshold": "threshold"}, True, "jumprelu"),
    "MatryoshkaBatchTopKSAE": ({**_PLAIN, "threshold": "threshold"}, True, "jumprelu"),
    "JumpReluAutoEncoder": ({**_PLAIN, "threshold": "threshold"}, False, "jumprelu"),
    "GatedAutoEncoder": (
        {**_LINEAR, "b_dec": "decoder_bias", "b_gate": "gate_bias", "b_mag": "mag_bias",
         "r_mag": "r_mag"}, True, "gated"
    ),
}  # fmt: skip


def _times_norms(tensors: Arrays) -> Arrays:
    """Return the SAE whose activations are those of another times the norms of its decoder."""
    norms = tensors["W_dec"].norm(dim=1).clamp(min=1e-12)
    scaled = {**tensors, "W_dec": tensors["W_dec"] / norms[:, None]}
    if "r_mag" in tensors:
        return scaled | {"r_mag": tensors["r_mag"] + norms.log(), "b_mag": tensors["b_mag"] * norms}
    scaled["W_enc"] = tensors["W_enc"] * norms
    return scaled | {name: tensors[name] * norms for name in ("b_enc", "threshold")}


def _sparsify(folder: Path) -> OtherSae:
    """Read `sae.safetensors` with `cfg.json`: TopK of the ReLU."""
    fields = _json(folder / "cfg.json")
    activation = fields.get("activation", "topk")
    if activation != "topk" or fields.get("signed"):
        raise SpecError("cfg.json.activation", f"expected `topk`, got {show(str(activation))}")
    tensors = _saved(folder / "sae.safetensors")
    width = _size(fields, "d_in")
    features = fields.get("num_latents") or width * _size(fields, "expansion_factor")
    is_transcoder = bool(fields.get("transcode"))
    if "W_skip" in tensors and not is_transcoder:
        raise SpecError("cfg.json.skip_connection", "a transcoder alone may have one")
    weights = {"b_enc": _tensor(tensors, "encoder.bias"), "b_dec": _tensor(tensors, "b_dec")}
    encoder = _tensor(tensors, "encoder.weight")
    weights["W_enc"] = _oriented(encoder, "W_enc", (width, features), True)
    weights["W_dec"] = _oriented(_tensor(tensors, "W_dec"), "W_dec", (features, width), False)
    tap = sites.parse(folder.name)
    hook = hook_out = None
    if tap is not None and tap[1] is not None and tap[0] in _HOOK_OF:
        hook = hook_out = f"blocks.{tap[1]}.{_HOOK_OF[tap[0]]}"
    if is_transcoder:
        # It reads the input of the module whose output it reconstructs.
        hook = f"blocks.{tap[1]}.mlp.hook_in" if tap and tap[0] == "mlp_out" else None
        if "W_skip" in tensors:
            weights["W_skip"] = _tensor(tensors, "W_skip")
    words = "skip_transcoder" if "W_skip" in weights else "transcoder"
    config = SaeConfig(
        words if is_transcoder else "topk",
        hook,
        not is_transcoder,
        width=width,
        features=features,
        top_k=_size(fields, "k"),
        hook_name_out=hook_out if is_transcoder else None,
    )
    return OtherSae(config, weights)


def _gemma_scope_2(folder: Path) -> OtherSae:
    """Read `params.safetensors` with `config.json`: JumpReLU SAEs and transcoders."""
    fields = _json(folder / "config.json")
    if fields.get("architecture") != "jump_relu":
        raise SpecError(
            "config.json.architecture",
            f"expected `jump_relu`, got {show(str(fields.get('architecture')))}",
        )
    tensors = _saved(folder / "params.safetensors")
    hook = _hf_hook(fields.get("hf_hook_point_in"))
    hook_out = _hf_hook(fields.get("hf_hook_point_out"))
    has_skip = "affine_skip_connection" in tensors
    told = fields.get("hf_hook_point_out") not in (None, fields.get("hf_hook_point_in"))
    is_transcoder = has_skip or told
    features, width = len(_tensor(tensors, "b_enc")), len(_tensor(tensors, "w_enc"))
    weights = {ours: _tensor(tensors, ours.lower()) for ours in (*_PLAIN, "threshold")}
    if weights["W_enc"].shape != (width, features) or weights["W_dec"].dim() != 2:
        raise SpecError("params.safetensors", "expected the encoder [width, features]")
    if has_skip:
        # [width, width of the output]; ours is its transpose.
        weights["W_skip"] = _tensor(tensors, "affine_skip_connection").T.contiguous()
    words = "jumprelu_skip_transcoder" if has_skip else "jumprelu_transcoder"
    config = SaeConfig(
        words if is_transcoder else "jumprelu",
        hook,
        False,
        hook_name_out=hook_out if is_transcoder else None,
    )
    return OtherSae(config, weights)


def _llama_scope(folder: Path) -> OtherSae:
    """Read `checkpoints/final.safetensors` with `hyperparams.json`. Activations have the units of
    vectors that were brought to the norm √width in the mean.
    """
    fields = _json(folder / "hyperparams.json")
    for name, right in (("act_fn", "jumprelu"), ("use_glu_encoder", False)):
        if fields.get(name, right) != right:
            raise SpecError(f"hyperparams.json.{name}", f"expected {right!r}, got {fields[name]!r}")
    tensors = _saved(folder / "checkpoints" / "final.safetensors")
    width, features = _size(fields, "d_model"), _size(fields, "d_sae")
    weights = {"b_enc": _tensor(tensors, "encoder.bias"), "b_dec": _tensor(tensors, "decoder.bias")}
    encoder, decoder = _tensor(tensors, "encoder.weight"), _tensor(tensors, "decoder.weight")
    weights["W_enc"] = _oriented(encoder, "W_enc", (width, features), True)
    weights["W_dec"] = _oriented(decoder, "W_dec", (features, width), True)
    threshold = weights["b_enc"].new_full((features,), _number(fields, "jump_relu_threshold"))
    norms = weights["W_dec"].norm(dim=1)
    includes = fields.get("sparsity_include_decoder_norm")
    if includes is None and bool(((norms - 1).abs() > 1e-2).any()):
        raise SpecError(
            "hyperparams.json.sparsity_include_decoder_norm",
            "missing, and the decoder's rows are not of length 1: the threshold may be of "
            "activations with these lengths or without",
        )
    weights["threshold"] = threshold / norms if includes else threshold
    hooks = [fields.get(f"hook_point_{end}") for end in ("in", "out")]
    scales = [1.0, 1.0]
    norm = fields.get("norm_activation", "inference")
    if norm == "dataset-wise":
        means = _section(fields, "dataset_average_activation_norm")
        scales = [width**0.5 / _number(means, end) for end in ("in", "out")]
    elif norm != "inference":
        raise SpecError(
            "hyperparams.json.norm_activation", f"expected `dataset-wise`, got {show(str(norm))}"
        )
    is_transcoder = hooks[0] != hooks[1]
    config = SaeConfig(
        "jumprelu_transcoder" if is_transcoder else "jumprelu",
        None if hooks[0] is None else str(hooks[0]),
        bool(fields.get("apply_decoder_bias_to_pre_encoder")),
        width=width,
        features=features,
        hook_name_out=str(hooks[1]) if is_transcoder else None,
    )
    return OtherSae(config, weights, *scales)


def _circuit_tracer(file: Path) -> OtherSae:
    """Read `layer_N.safetensors`, whose encoder is [features, width], with `config.yaml`."""
    import yaml  # type: ignore[import-untyped]

    path = file.with_name("config.yaml")
    with at(path.name):
        try:
            fields = yaml.safe_load(_text(path))
        except yaml.YAMLError:
            raise SpecError("", "expected YAML") from None
        if not isinstance(fields, Mapping):
            raise SpecError("", f"expected an object, got {kind(fields)}")
        hooks = [fields.get(f"feature_{end}_hook") for end in ("input", "output")]
        if not all(isinstance(hook, str) for hook in hooks):
            raise SpecError("feature_input_hook", "expected a text, as of `feature_output_hook`")
    layer = _LAYER_FILE.fullmatch(file.name)
    assert layer is not None
    names = [f"blocks.{layer[1]}.{hook}" for hook in hooks]
    names[1] = names[1].replace(".mlp.hook_out", ".hook_mlp_out")
    tensors = _saved(file)
    weights = {name: _tensor(tensors, name) for name in _PLAIN}
    width, features = len(weights["b_dec"]), len(weights["b_enc"])
    weights["W_enc"] = _oriented(weights["W_enc"], "W_enc", (width, features), True)
    weights["W_dec"] = _oriented(weights["W_dec"], "W_dec", (features, width), False)
    words = "transcoder"
    if "W_skip" in tensors:
        weights["W_skip"], words = _tensor(tensors, "W_skip"), "skip_transcoder"
    if "activation_function.threshold" in tensors:
        threshold = _tensor(tensors, "activation_function.threshold")
        weights["threshold"], words = threshold.flatten(), f"jumprelu_{words}"
    top_k = int(_tensor(tensors, "k")) if "k" in tensors else 0
    return OtherSae(SaeConfig(words, names[0], False, top_k=top_k, hook_name_out=names[1]), weights)


_READERS: Mapping[str, Callable[[Path], OtherSae]] = {
    "ae.pt": _dictionary_learning,
    "sae.safetensors": _sparsify,
    "params.safetensors": _gemma_scope_2,
    "hyperparams.json": _llama_scope,
}
# What is downloaded of a repository.
OTHER_FILES = (
    *_READERS, "config.json", "cfg.json", "checkpoints/final.safetensors", "config.yaml"
)  # fmt: skip


def _oriented(tensor: Tensor, name: str, shape: tuple[int, int], is_transposed: bool) -> Tensor:
    """Return a matrix in SAELens's layout, of this shape; `is_transposed`: the tool's is the other.
    The sizes decide where they differ, else the tool's own layout.

    Raises:
        SpecError: its shape is neither.
    """
    size = tuple(tensor.shape)
    if size not in (shape, shape[::-1]):
        raise SpecError(name, f"expected {list(shape)} or its transpose, got {list(size)}")
    if shape[0] == shape[1]:
        return tensor.T.contiguous() if is_transposed else tensor
    return tensor if size == shape else tensor.T.contiguous()


def _hf_hook(name: object) -> str | None:
    match = _HF_LAYER.fullmatch(name) if isinstance(name, str) else None
    hook = _HF_HOOKS.get(match[2]) if match else None
    return f"blocks.{match[1]}.{hook}" if match and hook else None


def _tensor(tensors: Mapping[str, Any], name: str) -> Tensor:
    value: Tensor | None = tensors.get(name)
    if value is None or not hasattr(value, "detach"):
        there = listed(sorted(map(str, tensors))[:8])
        raise SpecError("", f"missing tensor `{name}`; found {there}")
    return value.detach().float()


def _size(fields: Mapping[str, Any], name: str) -> int:
    with at(name):
        return read_int(fields.get(name))


def _number(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
        raise SpecError(name, f"expected a positive number, got {show(value)}")
    return float(value)


def _section(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = fields.get(name)
    if not isinstance(section, Mapping):
        raise SpecError(name, f"expected an object, got {kind(section)}")
    return section


def _text(path: Path) -> str:
    if check_regular(path).st_size > _MAX_CONFIG_BYTES:
        raise SpecError("", f"{path.name} has more than {_MAX_CONFIG_BYTES} bytes")
    return path.read_text("utf-8")


def _json(path: Path) -> Mapping[str, Any]:
    with at(path.name):
        fields = read_json(_text(path))
        if not isinstance(fields, Mapping):
            raise SpecError("", f"expected an object, got {kind(fields)}")
        return fields


def _saved(path: Path) -> Arrays:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    check_regular(path)
    with at(path.name):
        try:
            return dict(load_file(path))
        except SafetensorError as error:
            raise SpecError("", f"expected a safetensors file: {error}") from None


def _pickled(path: Path) -> Arrays:
    """Read a file of tensors by torch's loader of weights, which executes nothing."""
    with at(path.name):
        return tensors_by_name(path)
