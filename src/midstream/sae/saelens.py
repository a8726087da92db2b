"""Reader of SAELens files: the flat layout, and that of SAELens 6, with `metadata`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midstream.errors import SpecError
from midstream.sae.tensors import ARCHITECTURES, Arrays, check_names, check_shapes
from midstream.validation import at, check_regular, kind, listed, read_int, read_json, show

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "cfg.json"
WEIGHTS = "sae_weights.safetensors"
AVERAGE = "expected_average_only_in"
NORMALIZATIONS = ("none", AVERAGE, "constant_norm_rescale", "layer_norm")

# TransformerLens hooks that correspond to a site. `hook_attn_in` and `hook_mlp_in` are missing
# because their meaning depends on the version.
HOOKS = {
    "hook_resid_pre": "resid_pre",
    "attn.hook_in": "attn_in",
    "hook_attn_out": "attn_out",
    "hook_resid_mid": "resid_mid",
    "mlp.hook_in": "mlp_in",
    "hook_mlp_out": "mlp_out",
    "hook_resid_post": "resid_post",
}

_HOOK = re.compile(r"blocks\.(0|[1-9][0-9]{0,4})\.([A-Za-z_.0-9]+)")
_MAX_CONFIG_BYTES = 1 << 20
# Fields of an SAE in the layout of SAELens 6; others might change the features.
_FIELDS = (
    "architecture", "d_in", "d_sae", "d_out", "dtype", "device", "apply_b_dec_to_input",
    "normalize_activations", "reshape_activations", "metadata", "k", "rescale_acts_by_decoder_norm",
    "normalize_decoder", "activation_fn", "activation_fn_str", "activation_fn_kwargs",
    "activation_fn_kwargs", "finetuning_scaling_factor", "hook_name", "hook_layer", "hook_point",
    "hook_point_layer", "hook_head_index", "hook_point_head_index", "hook_name_out",
    "hook_layer_out", "hook_head_index_out", "model_name", "model_from_pretrained_kwargs",
    "sae_lens_version", "sae_lens_training_version", "dataset_path", "context_size", "prepend_bos",
    "dataset_trust_remote_code", "neuronpedia_id", "seqpos_slice", "exclude_special_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SaeConfig:
    """Fields of a `cfg.json` that determine how features are computed; None: not specified."""

    architecture: str
    hook_name: str | None
    apply_b_dec_to_input: bool  # it is subtracted before the encoder
    centered: bool = False  # trained on a model whose stream has mean 0 (`center_writing_weights`)
    width: int | None = None
    features: int | None = None
    top_k: int = 0  # number of activations that are kept; 0: all
    normalize: str = "none"
    rescales: bool = False  # activations are multiplied by the norms of the decoder's rows
    hook_name_out: str | None = None


def read_config(path: Path) -> SaeConfig:
    if check_regular(path).st_size > _MAX_CONFIG_BYTES:
        raise SpecError("", f"not a SAELens configuration: more than {_MAX_CONFIG_BYTES} bytes")
    return config_of(read_json(path.read_bytes()))


def config_of(content: object) -> SaeConfig:
    """Return the configuration of the content of a `cfg.json`."""
    if not isinstance(content, dict):
        raise SpecError("", f"expected an object, got {kind(content)}")
    more = content.get("metadata", {})
    if not isinstance(more, dict):
        raise SpecError("metadata", f"expected an object, got {kind(more)}")
    if "metadata" in content:
        for name, value in content.items():
            if name not in _FIELDS and value not in (None, False, "none"):
                raise SpecError(name, "unknown field, which might change the features")
    fields = {**more, **content}
    _check_supported(fields)
    hook_name = _hook("hook_name", fields.get("hook_name", fields.get("hook_point")))
    _check_layer(fields.get("hook_layer", fields.get("hook_point_layer")), hook_name)
    architecture = str(fields.get("architecture", "standard"))
    is_transcoder = "transcoder" in architecture
    subtract = fields.get("apply_b_dec_to_input", not is_transcoder)
    if not isinstance(subtract, bool):
        raise SpecError("apply_b_dec_to_input", f"expected `bool`, got {kind(subtract)}")
    if subtract and is_transcoder:
        raise SpecError("apply_b_dec_to_input", "a transcoder's b_dec is none of its input")
    loading = fields.get("model_from_pretrained_kwargs") or {}
    return SaeConfig(
        architecture=architecture,
        hook_name=hook_name,
        apply_b_dec_to_input=subtract,
        centered=isinstance(loading, Mapping) and loading.get("center_writing_weights") is True,
        width=_size(fields, "d_in"),
        features=_size(fields, "d_sae"),
        top_k=_top_k(fields),
        # Older files have a bool; False means "none".
        normalize=fields.get("normalize_activations") or "none",
        rescales=fields.get("rescale_acts_by_decoder_norm") is True,
        hook_name_out=_hook("hook_name_out", fields.get("hook_name_out"))
        if is_transcoder
        else None,
    )


def hook_tap(hook_name: str) -> tuple[str, int]:
    """Return the (site, layer) of a TransformerLens hook, for example `blocks.8.hook_resid_pre`."""
    match = _HOOK.fullmatch(hook_name)
    if match is None or match[2] not in HOOKS:
        raise SpecError(
            "hook_name",
            f"unsupported hook {show(hook_name)}; expected `blocks.<layer>.` and one of "
            f"{listed(HOOKS)}; specify `layer` and `site` if it corresponds to a site",
        )
    return HOOKS[match[2]], int(match[1])


def read_weights(path: Path, config: SaeConfig | None) -> dict[str, Tensor]:
    """Read the tensors of an SAE, which has a configuration or not: float32, on the host."""
    from safetensors import SafetensorError, safe_open

    check_regular(path)
    try:
        with safe_open(path, framework="pt") as file:
            check_names(list(file.keys()), None if config is None else config.architecture)
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise SpecError("", f"expected a safetensors file: {error}") from None
    return checked(tensors, config)


def checked(tensors: Arrays, config: SaeConfig | None) -> Arrays:
    """Return the tensors that are read, if their shapes fit."""
    scaling = tensors.pop("scaling_factor", None)
    if scaling is not None and not bool((scaling == 1).all()):
        raise SpecError("scaling_factor", "unsupported; all factors must be 1")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    check_shapes(shapes, config is not None and "transcoder" in config.architecture)
    return tensors


def _check_supported(fields: Mapping[str, Any]) -> None:
    architecture = fields.get("architecture", "standard")
    if architecture not in ARCHITECTURES:
        raise SpecError(
            "architecture",
            f"expected one of {listed(ARCHITECTURES)}, got {_shown(architecture)}: how another "
            "architecture computes features is not known",
        )
    activation = _activation(fields)
    if activation not in ("relu", "jumprelu", "topk"):
        raise SpecError("activation_fn", f"expected `relu` or `topk`, got {_shown(activation)}")
    normalize = fields.get("normalize_activations", "none")
    if normalize not in (*NORMALIZATIONS, None, False) or isinstance(normalize, int) and normalize:
        raise SpecError(
            "normalize_activations",
            f"expected one of {listed(NORMALIZATIONS)}, got {_shown(normalize)}",
        )
    rescales = fields.get("rescale_acts_by_decoder_norm")
    if rescales and architecture not in ("topk", "batchtopk", "matryoshka_batchtopk"):
        raise SpecError("rescale_acts_by_decoder_norm", f"expected False, got {_shown(rescales)}")
    for name, right in (
        ("reshape_activations", "none"),
        ("finetuning_scaling_factor", False),
        ("normalize_decoder", False),
        ("hook_head_index", None),
        ("hook_point_head_index", None),
    ):
        value = fields.get(name)
        # Of a standard SAE it says how it was trained: its files have the decoder as it is.
        is_training = name == "normalize_decoder" and architecture != "gated"
        if value is not None and value != right and not is_training:
            raise SpecError(name, f"expected {_shown(right)}, got {_shown(value)}")


def _hook(name: str, value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise SpecError(name, f"expected `str`, got {kind(value)}")
    return value


def _activation(fields: Mapping[str, Any]) -> object:
    return fields.get("activation_fn", fields.get("activation_fn_str", "relu"))


def _top_k(fields: Mapping[str, Any]) -> int:
    """Return the number of activations that are kept; 0: all."""
    if fields.get("architecture") != "topk" and _activation(fields) != "topk":
        return 0
    kwargs = fields.get("activation_fn_kwargs") or {}
    value = fields.get("k", kwargs.get("k") if isinstance(kwargs, Mapping) else None)
    with at("k"):
        if value is None:
            raise SpecError("", "missing: how many activations a TopK SAE keeps")
        top_k = read_int(value)
        if top_k < 1:
            raise SpecError("", f"expected at least 1, got {top_k}")
        return top_k


def _check_layer(layer: object, hook_name: str | None) -> None:
    """Check that the two fields which specify the layer agree."""
    if layer is None or hook_name is None:
        return
    match = _HOOK.fullmatch(hook_name)
    with at("hook_layer"):
        if match is not None and int(match[1]) != read_int(layer):
            raise SpecError("", f"{layer} contradicts `hook_name`, {show(hook_name)}")


def _size(fields: Mapping[str, Any], name: str) -> int | None:
    with at(name):
        return None if fields.get(name) is None else read_int(fields[name])


def _shown(value: object) -> str:
    return show(value) if isinstance(value, (str, int, float)) else kind(value)
