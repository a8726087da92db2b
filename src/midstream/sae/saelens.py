"""Reader of SAELens files: `cfg.json` and `sae_weights.safetensors`.

Two layouts of the configuration are supported: the flat one, and that of SAELens 6, which has the
model's fields under `metadata`. Unsupported fields that would change how features are computed are
rejected by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midstream.errors import SpecError
from midstream.validation import at, kind, listed, read_int, read_json, show

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "cfg.json"
WEIGHTS = "sae_weights.safetensors"
ARCHITECTURES = ("standard", "jumprelu")

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
_REQUIRED = ("W_enc", "b_enc", "W_dec", "b_dec")
_KNOWN = (*_REQUIRED, "threshold", "scaling_factor")


@dataclass(frozen=True, slots=True)
class SaeConfig:
    """Fields of a `cfg.json` that determine how features are computed.

    Attributes:
        architecture: one of `ARCHITECTURES`.
        hook_name: TransformerLens's name of the hook point; None if not specified.
        apply_b_dec_to_input: whether b_dec is subtracted before the encoder.
        centered: whether the SAE was trained on a model whose residual stream has mean 0
            (`center_writing_weights`).
        width, features: H and F; None if not specified.
    """

    architecture: str
    hook_name: str | None
    apply_b_dec_to_input: bool
    centered: bool
    width: int | None
    features: int | None


def read_config(path: Path) -> SaeConfig:
    """Read a `cfg.json`.

    Raises:
        SpecError: the file is not a SAELens configuration, or a field is unsupported. The path is
            the field's.
        OSError: the file cannot be read.
    """
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise SpecError("", f"not a SAELens configuration: more than {_MAX_CONFIG_BYTES} bytes")
    found = read_json(path.read_bytes())
    if not isinstance(found, dict):
        raise SpecError("", f"expected an object, got {kind(found)}")
    more = found.get("metadata", {})
    if not isinstance(more, dict):
        raise SpecError("metadata", f"expected an object, got {kind(more)}")
    fields = {**more, **found}
    _check_supported(fields)
    hook_name = fields.get("hook_name", fields.get("hook_point"))
    if hook_name is not None and not isinstance(hook_name, str):
        raise SpecError("hook_name", f"expected `str`, got {kind(hook_name)}")
    _check_layer(fields.get("hook_layer", fields.get("hook_point_layer")), hook_name)
    subtract = fields.get("apply_b_dec_to_input", True)
    if not isinstance(subtract, bool):
        raise SpecError("apply_b_dec_to_input", f"expected `bool`, got {kind(subtract)}")
    loading = fields.get("model_from_pretrained_kwargs") or {}
    return SaeConfig(
        architecture=str(fields.get("architecture", "standard")),
        hook_name=hook_name,
        apply_b_dec_to_input=subtract,
        centered=isinstance(loading, Mapping) and loading.get("center_writing_weights") is True,
        width=_size(fields, "d_in"),
        features=_size(fields, "d_sae"),
    )


def hook_tap(hook_name: str) -> tuple[str, int]:
    """Return the (site, layer) of a TransformerLens hook, for example `blocks.8.hook_resid_pre`.

    Raises:
        SpecError: the hook has no corresponding site.
    """
    match = _HOOK.fullmatch(hook_name)
    if match is None or match[2] not in HOOKS:
        raise SpecError(
            "hook_name",
            f"unsupported hook {show(hook_name)}; expected `blocks.<layer>.` and one of "
            f"{listed(HOOKS)}; specify `layer` and `site` if it corresponds to a site",
        )
    return HOOKS[match[2]], int(match[1])


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read W_enc [H, F], b_enc [F], W_dec [F, H], b_dec [H] and, if present, threshold [F].

    Tensors are float32 on the host.

    Raises:
        SpecError: the file is damaged, or a tensor is missing, unknown or has a wrong shape. The
            path is the tensor's name.
        OSError: the file cannot be read.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            _check_names(names)
            tensors = {name: file.get_tensor(name).to(torch.float32) for name in names}
    except SafetensorError as error:
        raise SpecError("", f"expected a safetensors file: {error}") from None
    scaling = tensors.pop("scaling_factor", None)
    if scaling is not None and not bool((scaling == 1).all()):
        raise SpecError("scaling_factor", "unsupported; all factors must be 1")
    _check_shapes({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    return tensors


def _check_supported(fields: Mapping[str, Any]) -> None:
    architecture = fields.get("architecture", "standard")
    if architecture not in ARCHITECTURES:
        raise SpecError(
            "architecture",
            f"expected one of {listed(ARCHITECTURES)}, got {_shown(architecture)}: in other "
            "architectures a feature may depend on more than its own encoder row",
        )
    activation = fields.get("activation_fn", fields.get("activation_fn_str", "relu"))
    if activation not in ("relu", "jumprelu"):
        raise SpecError("activation_fn", f"expected `relu`, got {_shown(activation)}")
    # Older files have a bool; False means "none".
    normalize = fields.get("normalize_activations", "none")
    if normalize not in ("none", None, False):
        raise SpecError(
            "normalize_activations",
            f"expected `none`, got {_shown(normalize)}: fold the normalisation into the weights "
            "and save the SAE again",
        )
    for name, right in (
        ("reshape_activations", "none"),
        ("finetuning_scaling_factor", False),
        ("rescale_acts_by_decoder_norm", False),
        ("hook_head_index", None),
        ("hook_point_head_index", None),
    ):
        value = fields.get(name)
        if value is not None and value != right:
            raise SpecError(name, f"expected {_shown(right)}, got {_shown(value)}")


def _check_layer(layer: object, hook_name: str | None) -> None:
    """Check that the two fields which specify the layer agree."""
    if layer is None or hook_name is None:
        return
    match = _HOOK.fullmatch(hook_name)
    with at("hook_layer"):
        if match is not None and int(match[1]) != read_int(layer):
            raise SpecError("", f"{layer} contradicts `hook_name`, {show(hook_name)}")


def _check_names(names: list[str]) -> None:
    for name in _REQUIRED:
        if name not in names:
            raise SpecError("", f"missing tensor `{name}`; found {listed(sorted(names)[:8])}")
    for name in names:
        if name not in _KNOWN:
            raise SpecError(
                "",
                f"unknown tensor {show(name)}, which might change the features; expected "
                f"{listed(_KNOWN)}",
            )


def _check_shapes(shapes: Mapping[str, tuple[int, ...]]) -> None:
    encoder = shapes["W_enc"]
    if len(encoder) != 2:
        raise SpecError("W_enc", f"expected shape [width, features], got {list(encoder)}")
    width, features = encoder
    wanted = {
        "b_enc": (features,),
        "W_dec": (features, width),
        "b_dec": (width,),
        "threshold": (features,),
    }
    for name, shape in wanted.items():
        if name in shapes and shapes[name] != shape:
            raise SpecError(
                name,
                f"expected shape {list(shape)} to match W_enc {list(encoder)}, got "
                f"{list(shapes[name])}",
            )


def _size(fields: Mapping[str, Any], name: str) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    with at(name):
        return read_int(value)


def _shown(value: object) -> str:
    if isinstance(value, (str, int, float)):
        return show(value)
    return kind(value)
