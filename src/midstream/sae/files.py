"""Files and objects of sparse autoencoders, as arguments of `SAE`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from midstream.errors import MissingExtraError, SpecError
from midstream.sae.other_tools import OTHER_FILES, OtherSae, read_other
from midstream.sae.saelens import (
    AVERAGE,
    CONFIG,
    WEIGHTS,
    SaeConfig,
    checked,
    config_of,
    read_config,
    read_weights,
)
from midstream.sae.tensors import Arrays, check_names, has_threshold, reduced
from midstream.torch_file import save_copies
from midstream.validation import at, check_regular, kind, listed, read_float32, show

# The file of Gemma Scope.
_PARAMS = "params.npz"
# What is downloaded of a repository.
HUB_FILES = (CONFIG, WEIGHTS, _PARAMS, *OTHER_FILES)
_MOST_NAMES = 8  # of a folder's files in a message
_PICKLES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".npy")


def load_sae(path: Path, subtract: bool | None, scale: float | None) -> dict[str, Any]:
    """Read an SAE; see `SAE.load`."""
    scale = _read_scale(scale)
    other = None if is_saelens(path) else read_other(path)
    if other is not None:
        for name, value in (("apply_b_dec_to_input", subtract), ("input_scale", scale)):
            if value is not None:
                raise SpecError(name, f"{path} specifies it; must be omitted")
        with at(str(path)):
            return _of_other(other)
    if path.is_dir():
        path = _in_folder(path)
    weights = path / WEIGHTS if path.is_dir() else path
    if weights.suffix == ".npz":
        return _gemma_scope(weights, subtract, scale)
    if weights.suffix != ".safetensors":
        raise SpecError("", _not_safetensors(weights))
    config_path = weights.with_name(CONFIG)
    config: SaeConfig | None = None
    try:
        if path.is_dir() or config_path.exists():
            with at(str(config_path)):
                config = read_config(config_path)
        with at(str(weights)):
            tensors = read_weights(weights, config)
    except OSError as error:
        raise SpecError("", f"{error.filename or weights}: {error.strerror or error}") from None
    if config is None:
        with at(str(weights)):
            return _without_config(tensors, subtract, scale)
    if subtract is not None:
        raise SpecError(
            "apply_b_dec_to_input", f"already specified by {config_path}; must be omitted"
        )
    with at(str(config_path)):
        return _made(config, tensors, scale)


def is_saelens(folder: Path) -> bool:
    return (folder / WEIGHTS).exists() and (folder / CONFIG).exists()


def _of_other(other: OtherSae) -> dict[str, Any]:
    arguments = _made(other.config, checked(other.tensors, other.config), other.scale)
    if other.scale_out != other.scale:
        for name in ("w_dec", "b_dec"):
            arguments[name] = arguments[name] * (other.scale / other.scale_out)
    return arguments


def _in_folder(folder: Path) -> Path:
    """Return what is read of a folder: itself in SAELens's layout, its file in Gemma Scope's."""
    if is_saelens(folder):
        return folder
    if (folder / _PARAMS).exists():
        return folder / _PARAMS
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise SpecError("", f"{folder}: {error.strerror or error}") from None
    more = len(names) - _MOST_NAMES
    there = f"it has {listed(names[:_MOST_NAMES])}" if names else "it is empty"
    there += f" and {more} more" if more > 0 else ""
    raise SpecError(
        "",
        f"{folder}: {there}; a folder has `{CONFIG}` and `{WEIGHTS}`, as SAELens saves them, or "
        f"`{_PARAMS}`, as Gemma Scope does; or the files of dictionary_learning, sparsify, Gemma "
        "Scope 2, Llama Scope or circuit-tracer. Load another tool's SAE with that tool, and pass "
        "its tensors: SAE(w_enc, b_enc, w_dec, b_dec, …)",
    )


def sae_of(sae: Any, scale: float | None) -> dict[str, Any]:
    """Read an object of the package `sae_lens`; see `SAE.from_saelens`."""
    scale = _read_scale(scale)
    config, state = getattr(sae, "cfg", None), getattr(sae, "state_dict", None)
    to_dict = getattr(config, "to_dict", None)
    if not callable(state) or not callable(to_dict):
        raise SpecError("", f"expected an SAE of the package sae_lens, got {kind(sae)}")
    fields = dict(to_dict())
    architecture = fields.get("architecture", getattr(config, "architecture", "standard"))
    fields["architecture"] = architecture() if callable(architecture) else architecture
    more = fields.get("metadata")
    if more is not None and not isinstance(more, Mapping):
        more = getattr(more, "__dict__", {})
    fields["metadata"] = dict(more or {})
    with at("cfg"):
        sae_config = config_of(fields)
    tensors = {name: tensor.detach().cpu().float() for name, tensor in state().items()}
    check_names(list(tensors), sae_config.architecture)
    return _made(sae_config, checked(tensors, sae_config), scale)


def from_release(release: str, sae_id: str) -> Any:
    """Return an SAE of a release, as an object of the package `sae_lens`."""
    try:
        import sae_lens
    except ModuleNotFoundError as error:
        if error.name != "sae_lens":
            raise
        raise MissingExtraError(
            "SAE.load(release, sae_id) needs the package sae_lens: pip install sae-lens; or "
            "download the SAE, and give its folder",
            name=error.name,
        ) from None
    try:
        return sae_lens.SAE.from_pretrained(release, sae_id, device="cpu")
    except (ValueError, KeyError, OSError) as error:
        # A KeyError's text is its key in quotes.
        why = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise SpecError("", f"{release}: sae_lens cannot load {show(sae_id)}: {why}") from error


def _read_scale(value: object) -> float | None:
    """Read `input_scale`, by which weights are divided."""
    if value is None:
        return None
    with at("input_scale"):
        scale = read_float32(value)
        if not 1e-9 <= scale <= 1e9:  # far beyond any use; float32 overflows elsewhere
            raise SpecError("", f"expected a number from 1e-9 to 1e9, got {scale:g}")
        return scale


def _gemma_scope(path: Path, subtract: bool | None, scale: float | None) -> dict[str, Any]:
    """Read a file of Gemma Scope: JumpReLU SAEs, which do not subtract b_dec."""
    import numpy as np
    import torch

    with at(str(path)):
        try:
            check_regular(path)
            with np.load(path, allow_pickle=False) as file:
                check_names(list(file.files), "jumprelu")
                tensors = {
                    name: torch.from_numpy(np.asarray(file[name], np.float32))
                    for name in file.files
                }
        except SpecError:
            raise
        # A damaged or malicious file makes zipfile, its decompressors and numpy raise almost any
        # exception; a size in a header makes numpy ask for memory that there is not.
        except Exception as error:  # noqa: BLE001
            raise SpecError("", f"expected a .npz file of arrays: {error}") from None
        config = SaeConfig("jumprelu", None, bool(subtract))
        return _made(config, checked(tensors, config), scale)


def _without_config(tensors: Arrays, subtract: bool | None, scale: float | None) -> dict[str, Any]:
    if subtract is None:
        if bool(tensors["b_dec"].any()):
            raise SpecError(
                "",
                f"missing {CONFIG}, which specifies whether b_dec is subtracted from the input; "
                "give `apply_b_dec_to_input`",
            )
        subtract = False
    architecture = "jumprelu" if "threshold" in tensors else "standard"
    return _made(SaeConfig(architecture, None, subtract), tensors, scale)


def _made(config: SaeConfig, tensors: Arrays, scale: float | None) -> dict[str, Any]:
    jumps = has_threshold(config.architecture)
    if jumps != any(name in tensors for name in ("threshold", "topk_threshold")):
        has = "there is no tensor" if jumps else "there is a tensor"
        raise SpecError("architecture", f"`{config.architecture}`, but {has} `threshold`")
    width, features = tensors["W_enc"].shape
    sizes = (("d_in", config.width, width), ("d_sae", config.features, features))
    for name, declared, size in sizes:
        if declared is not None and declared != size:
            raise SpecError(name, f"{declared}, but W_enc has shape {[width, features]}")
    if config.normalize == AVERAGE and scale is None:
        raise SpecError(
            "normalize_activations",
            f"{AVERAGE}: the file does not have the factor; give `input_scale`, √width / the mean "
            "norm of the vectors in training",
        )
    arrays = reduced(tensors, config.rescales, 1.0 if scale is None else scale)
    return {
        "w_enc": arrays["W_enc"],
        "b_enc": arrays["b_enc"],
        "w_dec": arrays["W_dec"],
        "b_dec": arrays["b_dec"],
        "threshold": arrays.get("threshold"),
        "apply_b_dec_to_input": config.apply_b_dec_to_input,
        "centered": config.centered,
        "hook_name": config.hook_name,
        "top_k": config.top_k,
        "normalize": "none" if config.normalize == AVERAGE else config.normalize,
        "is_transcoder": "transcoder" in config.architecture,
        "hook_name_out": config.hook_name_out,
        "w_skip": arrays.get("W_skip"),
    }


def _not_safetensors(path: Path) -> str:
    if path.suffix in _PICKLES:
        return (
            f"{path}: {path.suffix} files are unsupported, since they can contain pickles, which "
            "can run code; save the tensors with safetensors.torch.save_file"
        )
    expected = f"{path}: expected a folder with {CONFIG} and {WEIGHTS}, or a .safetensors file"
    if path.exists():
        return expected
    return (
        f"{expected}, and there is no such path; of a release of SAELens, give its id too: "
        "SAE.load(release, sae_id)"
    )


def save_sae(sae: Any, folder: Path) -> None:
    """Write an SAE's folder in SAELens's layout; see `SAE.to_folder`."""
    words = "topk" if sae.top_k else "standard" if sae.threshold is None else "jumprelu"
    if sae.is_transcoder:
        if sae.top_k:
            raise SpecError("top_k", "SAELens has no transcoder with TopK")
        plain = "transcoder" if sae.w_skip is None else "skip_transcoder"
        words = plain if sae.threshold is None else f"jumprelu_{plain}"
    width, features = sae.w_enc.shape
    more: dict[str, Any] = {"hook_name": sae.hook_name}
    config: dict[str, Any] = {
        "architecture": words,
        "d_in": width,
        "d_sae": features,
        "dtype": "float32",
        "apply_b_dec_to_input": sae.apply_b_dec_to_input,
        "normalize_activations": sae.normalize,
        "reshape_activations": "none",
        "metadata": more,
    }
    if sae.top_k:
        config |= {"k": sae.top_k, "rescale_acts_by_decoder_norm": False}
    if sae.is_transcoder:
        config["d_out"] = sae.w_dec.shape[1]
        more["hook_name_out"] = sae.hook_name_out
    if sae.centered:
        more["model_from_pretrained_kwargs"] = {"center_writing_weights": True}
    tensors = {"W_enc": sae.w_enc, "b_enc": sae.b_enc, "W_dec": sae.w_dec, "b_dec": sae.b_dec}
    tensors |= {"threshold": sae.threshold, "W_skip": sae.w_skip}
    (folder / CONFIG).write_text(json.dumps(config), "utf-8")
    present = {name: value for name, value in tensors.items() if value is not None}
    save_copies(present, folder / WEIGHTS)
