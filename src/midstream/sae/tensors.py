"""Tensors of sparse autoencoders: which each architecture has, and what they come down to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from midstream.errors import SpecError
from midstream.validation import listed, show

if TYPE_CHECKING:
    from torch import Tensor

Arrays = dict[str, "Tensor"]

_COMMON = ("W_enc", "b_enc", "W_dec", "b_dec")
_GATED = ("W_enc", "W_dec", "b_dec", "b_gate", "r_mag", "b_mag")
# By architecture: the tensors that there must be. Thresholds are checked against the configuration.
ARCHITECTURES: Mapping[str, tuple[str, ...]] = {
    "standard": _COMMON,
    "jumprelu": _COMMON,
    "gated": _GATED,
    "topk": _COMMON,
    "batchtopk": _COMMON,
    "matryoshka_batchtopk": _COMMON,
    "transcoder": _COMMON,
    "skip_transcoder": (*_COMMON, "W_skip"),
    "jumprelu_transcoder": _COMMON,
    "jumprelu_skip_transcoder": (*_COMMON, "W_skip"),
}
_THRESHOLDS = ("threshold", "topk_threshold")


def has_threshold(architecture: str) -> bool:
    return architecture.startswith("jumprelu") or architecture.endswith("batchtopk")


def check_names(names: list[str], architecture: str | None) -> None:
    """Check that there are the tensors of an architecture (None: unknown), and no others."""
    if architecture is None:
        architecture = "gated" if "b_gate" in names else "standard"
    required = ARCHITECTURES[architecture]
    known = (*required, *_THRESHOLDS[: 1 + architecture.endswith("batchtopk")], "scaling_factor")
    for name in required:
        if name not in names:
            raise SpecError("", f"missing tensor `{name}`; found {listed(sorted(names)[:8])}")
    for name in names:
        if name not in known:
            raise SpecError(
                "",
                f"unknown tensor {show(name)}, which might change the features; expected "
                f"{listed(known)}",
            )


def check_shapes(shapes: Mapping[str, tuple[int, ...]], is_transcoder: bool) -> None:
    """Check that the shapes of an SAE's tensors fit each other."""
    encoder = shapes["W_enc"]
    if len(encoder) != 2:
        raise SpecError("W_enc", f"expected shape [width, features], got {list(encoder)}")
    width, features = encoder
    written = shapes["b_dec"][0] if is_transcoder and len(shapes["b_dec"]) == 1 else width
    wanted: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("b_enc", *_THRESHOLDS, "b_gate", "r_mag", "b_mag"), (features,)
    )
    wanted |= {"W_dec": (features, written), "b_dec": (written,), "W_skip": (written, width)}
    for name, shape in wanted.items():
        if name in _THRESHOLDS and shapes.get(name) in ((), (1,)):
            continue
        if name in shapes and shapes[name] != shape:
            raise SpecError(
                name,
                f"expected shape {list(shape)} to match W_enc {list(encoder)}, got "
                f"{list(shapes[name])}",
            )


def reduced(tensors: Arrays, rescales: bool, scale: float) -> Arrays:
    """Return W_enc, b_enc, W_dec, b_dec, W_skip and threshold of a JumpReLU SAE. A gated SAE's
    magnitudes are m = e^r · x W_enc + b_mag, and its gate is open where m > b_mag − e^r · b_gate
    (arXiv:2404.16014).
    """
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    if "b_gate" in weights:
        factor = weights["r_mag"].exp()
        weights["W_enc"] = weights["W_enc"] * factor
        weights["b_enc"] = weights["b_mag"]
        weights["threshold"] = weights["b_mag"] - factor * weights["b_gate"]
    if "topk_threshold" in weights:
        weights["threshold"] = weights["topk_threshold"]
    if "threshold" in weights:
        weights["threshold"] = weights["threshold"].expand_as(weights["b_enc"])
    if rescales:
        norms = weights["W_dec"].norm(dim=1)
        weights["W_enc"] = weights["W_enc"] * norms
        weights["b_enc"] = weights["b_enc"] * norms
        weights["W_dec"] = weights["W_dec"] / norms[:, None]
    if scale != 1:
        weights["W_enc"] = weights["W_enc"] * scale
        weights["W_dec"], weights["b_dec"] = weights["W_dec"] / scale, weights["b_dec"] / scale
    names = ("W_enc", "b_enc", "W_dec", "b_dec", "threshold", "W_skip")
    return {name: weights[name].float().contiguous() for name in names if name in weights}
