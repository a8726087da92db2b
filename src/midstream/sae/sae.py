"""Sparse autoencoders: loading, encoding, decoding, and edits of features."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from midstream.errors import SpecError
from midstream.plan.forms import (
    FeaturesLike,
    LayersLike,
    NumberLike,
    PhaseLike,
    PositionsLike,
    SitesLike,
    VectorLike,
)
from midstream.plan.operations import Feature
from midstream.plan.operations.feature import read_index
from midstream.sae.files import from_release, load_sae, sae_of
from midstream.sae.hub_files import SaeFiles
from midstream.sae.saelens import hook_tap
from midstream.sites import Tap
from midstream.validation import at, read_int

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    Array = TypeVar("Array", NDArray[np.float32], Tensor)

# Of layer_norm, as SAELens has it: it is added to the standard deviation.
_EPSILON = 1e-5


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SAE(SaeFiles):
    """A sparse autoencoder: a = act((x − b_dec?) W_enc + b_enc), x̂ = a W_dec + b_dec.

    act is ReLU; with thresholds it is a where a > threshold, else 0 (JumpReLU: Rajamanoharan et
    al. 2024, arXiv:2407.14435); with `top_k` all but the largest become 0 (TopK: Gao et al. 2024,
    arXiv:2406.04093). Gated and BatchTopK SAEs are JumpReLU SAEs here, which give the same.
    Tensors are float32, on the host.

    Attributes:
        w_enc: [width, features].
        b_enc: [features].
        w_dec: [features, width]; of a transcoder [features, width of its output].
        b_dec: [width], likewise.
        threshold: [features], for JumpReLU; None for ReLU.
        apply_b_dec_to_input: whether b_dec is subtracted from x first.
        centered: whether the mean of x is subtracted first: the SAE was trained on a model whose
            residual stream TransformerLens had centered (`center_writing_weights`), as it does
            for models with LayerNorm.
        hook_name: TransformerLens's name of the hook point; None if unknown.
        top_k: number of activations that are kept; 0: all.
        normalize: "none", "constant_norm_rescale" (x is brought to the norm √width), or
            "layer_norm" (to the mean 0 and the standard deviation 1), before b_dec is subtracted.
        is_transcoder: whether what it reconstructs is another vector than it reads.
        hook_name_out: likewise of what a transcoder writes.
        w_skip: [width of the output, width]; W_skip x is added to what a transcoder decodes.
    """

    w_enc: Tensor
    b_enc: Tensor
    w_dec: Tensor
    b_dec: Tensor
    threshold: Tensor | None = None
    apply_b_dec_to_input: bool = False
    centered: bool = False
    hook_name: str | None = None
    top_k: int = 0
    normalize: str = "none"
    is_transcoder: bool = False
    hook_name_out: str | None = None
    w_skip: Tensor | None = None

    @staticmethod
    def load(
        path: str | os.PathLike[str],
        sae_id: str | None = None,
        *,
        apply_b_dec_to_input: bool | None = None,
        hook_name: str | None = None,
        input_scale: float | None = None,
    ) -> SAE:
        """Load an SAE from a folder, a file of tensors, or a release.

        Folders of other tools are read by their own formulas: dictionary_learning (`ae.pt`, whose
        pickle is not executed, with `config.json`), sparsify (`sae.safetensors`, `cfg.json`), Gemma
        Scope 2 (`params.safetensors`, `config.json`), Llama Scope (`hyperparams.json`, in whose
        units activations are), and circuit-tracer (a file `layer_3.safetensors` beside
        `config.yaml`).

        Args:
            path: a folder with `cfg.json` and `sae_weights.safetensors`; a safetensors file of the
                same tensors, where a `cfg.json` in its folder is read too; or a file `.npz` of
                Gemma Scope, or a folder with its `params.npz`. With `sae_id`, the name of a release
                that the package `sae_lens` knows, such as "gemma-scope-2b-pt-res-canonical".
            sae_id: the SAE's id in the release, such as "layer_12/width_16k/canonical". `sae_lens`
                downloads it from the Hugging Face Hub; without an id nothing is downloaded.
            apply_b_dec_to_input: whether b_dec is subtracted before the encoder. Only for a file
                without `cfg.json`, and optional if b_dec is zero.
            hook_name: TransformerLens's name of the hook point, such as
                "blocks.20.hook_resid_post"; None: that of `cfg.json`.
            input_scale: factor of the vectors, for an SAE with the normalisation
                "expected_average_only_in": √width / their mean norm in training.

        Raises:
            SpecError: the file or release does not exist or is of another format; the architecture,
                activation or normalisation is unsupported; or shapes do not match. The message
                starts with the file and the field.
            MissingExtraError: `sae_id` is given, and `sae_lens` is not installed.
        """
        if sae_id is None:
            sae = SAE(**load_sae(Path(path), apply_b_dec_to_input, input_scale))
        else:
            if apply_b_dec_to_input is not None:
                raise SpecError("apply_b_dec_to_input", "the release specifies it; must be omitted")
            sae = SAE.from_saelens(from_release(os.fspath(path), sae_id), input_scale)
        return sae if hook_name is None else replace(sae, hook_name=hook_name)

    @staticmethod
    def from_saelens(sae: Any, input_scale: float | None = None) -> SAE:
        """Return the SAE of an object of the package `sae_lens`, with copies of its tensors.

        Args:
            sae: the object.
            input_scale: as for `load`.

        Raises:
            SpecError: it is none, or is unsupported.
        """
        return SAE(**sae_of(sae, input_scale))

    def __repr__(self) -> str:
        plain = "ReLU" if self.threshold is None else "JumpReLU"
        kind = f"TopK({self.top_k})" if self.top_k else plain
        word = "transcoder" if self.is_transcoder else "SAE"
        where = f" of {self.hook_name}" if self.hook_name else ""
        return f"<{kind} {word}{where}: {self.num_features} features, width {self.width}>"

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

        h = _normalized(self, torch.as_tensor(x).to(self.w_enc))
        if self.apply_b_dec_to_input:
            h = h - self.b_dec
        activations = torch.relu(h @ self.w_enc + self.b_enc)
        if self.threshold is not None:
            activations = activations * (activations > self.threshold)
        if 0 < self.top_k < self.num_features:
            values, ids = activations.topk(self.top_k, -1)
            activations = torch.zeros_like(activations).scatter_(-1, ids, values)
        return cast("Array", _like(x, activations))

    def decode(self, a: Array) -> Array:
        """Return the vectors reconstructed from activations.

        Args:
            a: [..., features].

        Returns:
            float32 [..., width], a tensor or array like `a`.

        Raises:
            SpecError: the vectors were normalised before they were encoded.
        """
        import torch

        if self.normalize != "none":
            raise SpecError("normalize", f"{self.normalize} cannot be undone without the vectors")
        return cast("Array", _like(a, torch.as_tensor(a).to(self.w_dec) @ self.w_dec + self.b_dec))

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
        """Return an edit of one feature, 0 … features − 1; see `features`."""
        with at("index"):
            feature = read_int(index)
        return self.features(feature, mode, value, layer, site, positions, phase, exclude)

    def features(
        self,
        index: FeaturesLike,
        mode: Literal["set", "add", "scale", "ablate"] = "set",
        value: NumberLike | VectorLike | None = None,
        layer: LayersLike | None = None,
        site: SitesLike | None = None,
        positions: PositionsLike = "all",
        phase: PhaseLike | None = None,
        exclude: PositionsLike | None = None,
    ) -> Feature:
        """Return one edit of several features, which all read the same vector.

        Args:
            index: {feature: value}; or the features, with `value`.
            layer, site: the tap; taken from `hook_name` by default.
            mode, value, positions, phase, exclude: as for Feature.

        Raises:
            SpecError: a feature does not exist or is given twice, a field is malformed, or `layer`
                or `site` is omitted and `hook_name` does not determine it; or a feature cannot be
                changed by itself: it depends on others (`top_k`, except in the mode "add"), on the
                norm of h (`normalize`), or h is not what it is decoded to (a transcoder).
        """
        with at("index"):
            ids, values = read_index(index)
        if values is not None:
            if mode == "ablate" or value is not None:
                raise SpecError("index", "has values, and so has `value`, or the mode takes none")
            value = values
        return Feature(
            mode=mode,
            value=value,
            positions=positions,
            phase=phase,
            exclude=exclude,
            **self.weights_of(ids, mode),
            **_place(self, layer, site),
        )

    @property
    def tap(self) -> Tap | None:
        """The site and layer that it was trained on; None: it does not say.

        Raises:
            SpecError: it was trained on what is no site.
        """
        return None if self.hook_name is None else hook_tap(self.hook_name)

    def weights_of(self, ids: Sequence[int], mode: str) -> dict[str, Any]:
        """Return what a `Feature` takes of some features: encoder, decoder, bias and threshold.

        Args:
            ids, mode: the features, and the mode of the edit.

        Raises:
            SpecError: there is no such feature, or it cannot be changed by itself.
        """
        _check_edits(self, mode)
        for feature in ids:
            if not 0 <= feature < self.num_features:
                raise SpecError("index", f"expected 0 to {self.num_features - 1}, got {feature}")
        chosen = list(ids)
        rows = self.w_enc[:, chosen].double().T
        bias = self.b_enc[chosen].double()
        if self.apply_b_dec_to_input:
            bias = bias - rows @ self.b_dec.double()
        if self.centered:
            # ⟨x − mean(x), row⟩ = ⟨x, row − mean(row)⟩
            rows = rows - rows.mean(1, keepdim=True)
        weights = {"encoder": rows, "decoder": self.w_dec[chosen], "bias": bias.tolist()}
        if self.threshold is not None:
            # The ReLU before the threshold makes a negative threshold equivalent to 0.
            weights["threshold"] = self.threshold[chosen].clamp(min=0).tolist()
        return weights


def folded(sae: SAE) -> tuple[Tensor, Tensor]:
    """Return what is added to x W_enc, and what activations must exceed, float32 [features]."""
    import torch

    bias = sae.b_enc.double()
    if sae.apply_b_dec_to_input:
        bias = bias - sae.b_dec.double() @ sae.w_enc.double()
    threshold = torch.zeros_like(sae.b_enc) if sae.threshold is None else sae.threshold
    return bias.float(), threshold.clamp(min=0)


def writes_mlp_out(sae: SAE) -> bool:
    """Return whether a transcoder, as far as it says, writes `mlp_out` where it reads `mlp_in`."""
    try:
        tap = sae.tap
        out = None if sae.hook_name_out is None else hook_tap(sae.hook_name_out)
    except SpecError:
        return False
    if out is None:
        return tap is None or tap[0] == "mlp_in"
    return out[0] == "mlp_out" and tap in (None, ("mlp_in", out[1]))


def _normalized(sae: SAE, h: Tensor) -> Tensor:
    """Return vectors as the encoder takes them, before b_dec is subtracted."""
    if sae.centered or sae.normalize == "layer_norm":
        h = h - h.mean(-1, keepdim=True)
    if sae.normalize == "constant_norm_rescale":
        h = h * (sae.width**0.5 / h.norm(dim=-1, keepdim=True))
    elif sae.normalize == "layer_norm":
        h = h / (h.std(-1, keepdim=True) + _EPSILON)
    return h


def _check_edits(sae: SAE, mode: str) -> None:
    """Check that features of an SAE can be changed by themselves."""
    why = ""
    if sae.is_transcoder:
        why = "a transcoder's features are decoded to another vector than they are read from"
    elif sae.top_k and mode != "add":
        why = (
            "which features of a TopK SAE are active depends on all of them; the mode "
            '"add" does not depend on it'
        )
    elif sae.normalize != "none":
        why = f"its input is normalised ({sae.normalize})"
    if why:
        raise SpecError("", f"a feature cannot be changed by itself: {why}")


def _place(sae: SAE, layer: Any, site: Any) -> dict[str, Any]:
    """Return the layer and site of an edit, by default those where the SAE was trained."""
    if layer is None or site is None:
        tap = sae.tap
        if tap is None:
            raise SpecError("layer", "the SAE has no hook_name; specify both `layer` and `site`")
        site = tap[0] if site is None else site
        layer = tap[1] if layer is None else layer
    return {"layer": layer, "site": site}


def _like(array: Any, tensor: Tensor) -> Any:
    return tensor if hasattr(array, "detach") else tensor.numpy()
