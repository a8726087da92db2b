"""Sparse autoencoders: loading, encoding, decoding, and edits of features."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from midstream.errors import SpecError
from midstream.sae.saelens import CONFIG, WEIGHTS, SaeConfig, hook_tap, read_config, read_weights
from midstream.spec.forms import LayersLike, NumberLike, PhaseLike, PositionsLike, SitesLike
from midstream.spec.operations import Feature
from midstream.validation import at, read_int

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    Array = TypeVar("Array", NDArray[np.float32], Tensor)

_PICKLES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".npy")


@dataclass(frozen=True, slots=True, eq=False)
class SAE:
    """A sparse autoencoder: a = act((x − b_dec?) W_enc + b_enc), x̂ = a W_dec + b_dec.

    act is ReLU; with thresholds it is a where a > threshold, else 0 (JumpReLU: Rajamanoharan et
    al. 2024, arXiv:2407.14435). Tensors are float32, on the host.

    Attributes:
        w_enc: [width, features].
        b_enc: [features].
        w_dec: [features, width].
        b_dec: [width].
        threshold: [features], for JumpReLU; None for ReLU.
        apply_b_dec_to_input: whether b_dec is subtracted from x first.
        centered: whether the mean of x is subtracted first: the SAE was trained on a model whose
            residual stream TransformerLens had centered (`center_writing_weights`), as it does
            for models with LayerNorm.
        hook_name: TransformerLens's name of the hook point; None if unknown.
    """

    w_enc: Tensor = field(repr=False)
    b_enc: Tensor = field(repr=False)
    w_dec: Tensor = field(repr=False)
    b_dec: Tensor = field(repr=False)
    threshold: Tensor | None = field(repr=False)
    apply_b_dec_to_input: bool
    centered: bool = False
    hook_name: str | None = None

    @staticmethod
    def load(path: str | os.PathLike[str], apply_b_dec_to_input: bool | None = None) -> SAE:
        """Load an SAE from a folder in the format of SAELens, or from a file of tensors.

        Args:
            path: a folder with `cfg.json` and `sae_weights.safetensors`, or a safetensors file
                with W_enc, b_enc, W_dec, b_dec and, for JumpReLU, threshold. A `cfg.json` in the
                same folder is read too.
            apply_b_dec_to_input: whether b_dec is subtracted before the encoder. Only for a file
                without `cfg.json`, and optional if b_dec is zero.

        Raises:
            SpecError: the file does not exist or is not safetensors; the architecture, activation
                or normalisation is unsupported; or shapes do not match. The message starts with
                the file and the field.
        """
        given = Path(path)
        weights = given / WEIGHTS if given.is_dir() else given
        if weights.suffix != ".safetensors":
            raise SpecError("", _not_safetensors(weights))
        config_path = weights.with_name(CONFIG)
        config: SaeConfig | None = None
        try:
            if given.is_dir() or config_path.exists():
                with at(str(config_path)):
                    config = read_config(config_path)
            with at(str(weights)):
                tensors = read_weights(weights)
        except OSError as error:
            raise SpecError("", f"{error.filename or weights}: {error.strerror or error}") from None
        if config is None:
            with at(str(weights)):
                return _without_config(tensors, apply_b_dec_to_input)
        if apply_b_dec_to_input is not None:
            raise SpecError(
                "apply_b_dec_to_input", f"already specified by {config_path}; must be omitted"
            )
        with at(str(config_path)):
            _check(config, tensors)
        return SAE(
            *_in_order(tensors), config.apply_b_dec_to_input, config.centered, config.hook_name
        )

    @property
    def width(self) -> int:
        """Size of the encoded vectors, H."""
        return int(self.w_enc.shape[0])

    @property
    def num_features(self) -> int:
        """Number of features, F."""
        return int(self.w_enc.shape[1])

    def encode(self, x: Array) -> Array:
        """Return the activations of the features.

        Args:
            x: [..., width], vectors of the site that the SAE was trained on.

        Returns:
            float32 [..., features], a tensor or array like `x`.
        """
        import torch

        h = torch.as_tensor(x).to(self.w_enc)
        if self.centered:
            h = h - h.mean(-1, keepdim=True)
        if self.apply_b_dec_to_input:
            h = h - self.b_dec
        found = torch.relu(h @ self.w_enc + self.b_enc)
        if self.threshold is not None:
            found = found * (found > self.threshold)
        result: Array = _like(x, found)
        return result

    def decode(self, a: Array) -> Array:
        """Return the vectors reconstructed from activations.

        Args:
            a: [..., features].

        Returns:
            float32 [..., width], a tensor or array like `a`.
        """
        import torch

        result: Array = _like(a, torch.as_tensor(a).to(self.w_dec) @ self.w_dec + self.b_dec)
        return result

    def feature(
        self,
        index: int,
        mode: Literal["set", "add", "scale", "ablate"] = "set",
        value: NumberLike | None = None,
        layer: LayersLike | None = None,
        site: SitesLike | None = None,
        positions: PositionsLike = "all",
        phase: PhaseLike | None = None,
        exclude: PositionsLike | None = None,
    ) -> Feature:
        """Return an edit of one feature.

        Args:
            index: 0 … features − 1.
            mode, value: as for Feature.
            layer, site: the tap; taken from `hook_name` by default.
            positions, phase, exclude: as for Feature.

        Raises:
            SpecError: the feature does not exist, a field is malformed, or `layer` or `site` is
                omitted and `hook_name` does not determine it.
        """
        with at("index"):
            nth = read_int(index)
            if not 0 <= nth < self.num_features:
                raise SpecError("", f"expected 0 to {self.num_features - 1}, got {nth}")
        if layer is None or site is None:
            if self.hook_name is None:
                raise SpecError(
                    "layer", "the SAE has no hook_name; specify both `layer` and `site`"
                )
            hook_site, hook_layer = hook_tap(self.hook_name)
            layer = hook_layer if layer is None else layer
            site = hook_site if site is None else site
        encoder, bias = self._encoder(nth)
        threshold = None if self.threshold is None else float(self.threshold[nth])
        return Feature(
            encoder,
            self.w_dec[nth],
            layer,
            mode,
            value,
            bias=bias,
            # The ReLU before the threshold makes a negative threshold equivalent to 0.
            threshold=None if threshold is None else max(threshold, 0.0),
            site=site,
            positions=positions,
            phase=phase,
            exclude=exclude,
        )

    def _encoder(self, index: int) -> tuple[Tensor, float]:
        """Return a feature's encoder row, float64 [width], and its bias with b_dec folded in."""
        row = self.w_enc[:, index].double()
        bias = float(self.b_enc[index])
        if self.apply_b_dec_to_input:
            bias -= float(row @ self.b_dec.double())
        # ⟨x − mean(x), row⟩ = ⟨x, row − mean(row)⟩
        return (row - row.mean() if self.centered else row), bias


def _in_order(
    tensors: dict[str, Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    return (
        tensors["W_enc"].contiguous(),
        tensors["b_enc"],
        tensors["W_dec"],
        tensors["b_dec"],
        tensors.get("threshold"),
    )


def _without_config(tensors: dict[str, Tensor], subtract: bool | None) -> SAE:
    if subtract is None:
        if bool(tensors["b_dec"].any()):
            raise SpecError(
                "",
                f"missing {CONFIG}, which specifies whether b_dec is subtracted from the input; "
                "give `apply_b_dec_to_input`",
            )
        subtract = False
    return SAE(*_in_order(tensors), subtract)


def _check(config: SaeConfig, tensors: dict[str, Tensor]) -> None:
    jumps = config.architecture == "jumprelu"
    if jumps != ("threshold" in tensors):
        has = "there is no tensor" if jumps else "there is a tensor"
        raise SpecError("architecture", f"`{config.architecture}`, but {has} `threshold`")
    width, features = tensors["W_enc"].shape
    sizes = (("d_in", config.width, width), ("d_sae", config.features, features))
    for name, declared, found in sizes:
        if declared is not None and declared != found:
            raise SpecError(name, f"{declared}, but W_enc has shape {[width, features]}")


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
        f"{expected}, and there is no such path; names of releases are not looked up: download the "
        "SAE from the Hugging Face Hub first, and give its folder"
    )


def _like(given: Any, found: Tensor) -> Any:
    return found if hasattr(given, "detach") else found.numpy()
