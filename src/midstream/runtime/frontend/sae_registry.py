"""Sparse autoencoders that requests name, and where they are in the workers' memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from midstream.config.config import KEY
from midstream.errors import ConfigError, SpecError
from midstream.ops.sae import layout
from midstream.plan import ModelShape
from midstream.plan.resolved import SaeEncoder
from midstream.plan.vectors.named_lookup import SaeCode
from midstream.plan.vectors.vector import Vector
from midstream.runtime.frontend.weight_memory import NamedWeights, WeightMemory, WeightPart
from midstream.sae.sae import SAE, folded, writes_mlp_out
from midstream.sites import Tap
from midstream.validation import kind, listed, show

# What products of matrices on a GPU want.
_ALIGN = 256
# Sets of features of an SAE whose vectors are kept for the next request that names them.
_KEPT = 64


@dataclass(frozen=True, slots=True)
class RegisteredSae:
    """An SAE whose encoder the workers have, and maybe its decoder."""

    encoder: SaeEncoder
    sae: SAE
    code: SaeCode | None  # how vectors are reconstructed, without a name; None: they cannot be
    reason: str
    name: str = ""
    # What `weights_of` has returned, by features and mode.
    kept: dict[tuple[tuple[int, ...], str], Mapping[str, Any]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def tap(self) -> Tap | None:
        return self.sae.tap

    def weights_of(self, ids: Sequence[int], mode: str) -> Mapping[str, Any]:
        """Return what a `Feature` takes of some features; see `SAE.weights_of`."""
        key = tuple(ids), mode
        feature_weights = self.kept.get(key)
        if feature_weights is None:
            weights = self.sae.weights_of(ids, mode)
            # As vectors, whose digests are computed once.
            rows = {
                name: tuple(map(Vector.parse, weights[name])) for name in ("encoder", "decoder")
            }
            feature_weights = {**weights, **rows}
            if len(self.kept) >= _KEPT:
                self.kept.clear()
            self.kept[key] = feature_weights
        return feature_weights

    def reconstructs(self) -> SaeCode:
        if self.code is None:
            raise SpecError("", f"the SAE `{self.name}` cannot reconstruct: {self.reason}")
        return self.code._replace(name=self.name)


class SaeRegistry(NamedWeights[SAE, RegisteredSae]):
    """The registered SAEs, whole; workers have encoders, by `reconstruct` decoders too, float32."""

    kind = "sae"
    word = "SAE"
    setting = "saes"
    load = staticmethod(SAE.load)

    def __init__(
        self,
        memory: WeightMemory,
        shape: ModelShape,
        reconstructed: Mapping[Tap, int] = MappingProxyType({}),
    ) -> None:
        super().__init__(memory)
        self._shape = shape
        self.reconstructed = reconstructed
        for site, layer in reconstructed:
            if (site, layer) not in shape.taps:
                raise ConfigError(
                    f"{KEY}.reconstruct: {site}:{layer} is not tapped; see the settings `sites` "
                    "and `layers`"
                )
            if streams := shape.num_heads((site, layer)):
                raise ConfigError(
                    f"{KEY}.reconstruct: an SAE reconstructs one stream, and {site}:{layer} has "
                    f"{streams}"
                )

    def get(self, name: str) -> RegisteredSae:
        registered = self._registered.get(name)
        if registered is None:
            known = f"there is {listed(self._registered)}" if self._registered else "there is none"
            raise SpecError(
                "sae",
                f"there is no SAE {show(name)}; {known}; register it with "
                "llm.saes.register(name, sae), or in midstream's setting `saes`",
            )
        return replace(registered.made, name=name)

    def source(self, name: str) -> RegisteredSae:
        """As `get`, with an error that names no field."""
        try:
            return self.get(name)
        except SpecError as error:
            raise SpecError("", error.problem) from None

    def check(self, weights: SAE) -> None:
        if not isinstance(weights, SAE):
            raise SpecError("", f"expected an SAE, such as SAE.load(folder), got {kind(weights)}")
        width = self._shape.hidden_size
        if weights.width != width:
            raise SpecError("", f"it reads vectors of {weights.width} numbers, the model's {width}")
        tensors = {"w_enc": weights.w_enc, "b_enc": weights.b_enc}
        if not self._why_not(weights):
            tensors |= {"w_dec": weights.w_dec, "b_dec": weights.b_dec}
        for name, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise SpecError(name, "has numbers that are not finite")

    def size(self, weights: SAE) -> tuple[int, int]:
        if self._why_not(weights):
            return 4 * weights.num_features * (weights.width + 2), _ALIGN
        skips = weights.w_skip is not None
        return 4 * layout.size(weights.width, weights.num_features, skips), _ALIGN

    def _why_not(self, sae: SAE) -> str:
        """Return why the workers cannot reconstruct vectors with an SAE; empty: they can."""
        places = dict(self.reconstructed)
        if not places:
            return "midstream's setting `reconstruct` names no place"
        try:
            tap = sae.tap
        except SpecError:
            tap = None  # trained on what is no site: requests give another
        if tap is not None:
            if tap not in places:
                return f"midstream's setting `reconstruct` does not name {tap[0]}:{tap[1]}"
            places = {tap: places[tap]}
        most = max(places.values())
        if sae.num_features > most:
            return (
                f"it has {sae.num_features} features, and the setting `reconstruct` allows {most}"
            )
        if sae.w_dec.shape[1] != self._shape.hidden_size:
            return f"it writes vectors of {sae.w_dec.shape[1]} numbers"
        if sae.is_transcoder and not writes_mlp_out(sae):
            return (
                "a transcoder writes mlp_out of the layer whose mlp_in it reads, and this one "
                f"writes {sae.hook_name_out}"
            )
        return ""

    def laid_out(self, first: int, weights: SAE) -> tuple[RegisteredSae, list[WeightPart]]:
        width, count = weights.width, weights.num_features
        bias, threshold = folded(weights)
        reason = self._why_not(weights)
        tensors = [weights.w_enc, bias, threshold]
        matrix = first // 4
        if not reason:
            matrix += layout.ALIGN
            tensors = [_header(weights), *tensors, weights.w_dec, weights.b_dec]
            if weights.w_skip is not None:
                tensors.append(weights.w_skip.T.contiguous())
        parts, begin = [], first
        for tensor in tensors:
            parts.append(WeightPart(begin, torch.float32, tensor))
            begin += 4 * tensor.numel()
        at = matrix + width * count
        encoder = SaeEncoder(
            matrix, count, at, at + count, weights.top_k, weights.normalize, weights.centered
        )
        code = None
        if not reason:
            place = first // 4 // layout.ALIGN
            code = SaeCode("", place, _digest(tensors), count, weights.is_transcoder)
        return RegisteredSae(encoder, weights, code, reason), parts


def _header(sae: SAE) -> torch.Tensor:
    header = torch.zeros(layout.ALIGN)
    header[layout.FEATURES] = sae.num_features
    header[layout.TOP_K] = sae.top_k
    header[layout.NORMALIZE] = layout.NORMALIZATIONS.index(sae.normalize)
    header[layout.CENTERED] = sae.centered
    header[layout.TRANSCODES] = sae.is_transcoder
    header[layout.SKIPS] = sae.w_skip is not None
    return header


def _digest(tensors: Sequence[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()
