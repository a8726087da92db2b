"""Reconstruction of vectors by a sparse autoencoder (SAE): the reference in PyTorch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from midstream.ops.sae import layout

# Numbers of the activations that are computed at a time.
CODE_NUMBERS = 1 << 26
_LEAST_ROWS = 64


@dataclass(frozen=True, eq=False)
class SaeBuffers:
    """What the op needs for SAEs besides `SiteBuffers`."""

    weights: Tensor  # float32 [numbers], see `midstream.ops.sae.layout`
    decoded: Tensor  # float32 [rows, width], what SAEs make of each row
    codes: Tensor  # float32 [n, features], activations of n rows at a time; not used on a CPU

    @staticmethod
    def allocate(weights: Tensor, rows: int, width: int, features: int) -> SaeBuffers:
        """Return zeroed buffers; `rows` are the most of a forward pass, padding included."""
        device = weights.device
        at_once = min(-(-rows // _LEAST_ROWS) * _LEAST_ROWS, code_rows(features))
        on_gpu = device.type == "cuda"
        return SaeBuffers(
            weights,
            torch.zeros(rows, width, device=device),
            torch.zeros(at_once if on_gpu else 0, features, device=device),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of device memory besides the weights."""
        return int(self.decoded.nbytes + self.codes.nbytes)


def code_rows(features: int) -> int:
    """Return of how many rows activations are computed at a time, a multiple of 64."""
    return max(CODE_NUMBERS // features // _LEAST_ROWS, 1) * _LEAST_ROWS


def reconstruct(h: Tensor, description: Tensor, weights: Tensor) -> Tensor:
    """Return what an SAE makes of vectors, float32 [n, width]: decode(changed code) in the place
    and scale of h; with `ERROR`, decode(changed code) − decode(code), without the bias.
    `description` begins with the numbers of a `CODE` instruction; `weights` is the memory for
    registered weights.
    """
    high, low = float(description[layout.HIGH]), float(description[layout.LOW])
    sae = _Sae.at(layout.place_of(high, low), h.shape[1], weights)
    normed, mean, scale = sae.normalized(h)
    code = sae.encode(normed)
    is_error = bool(description[layout.ERROR])
    count = int(description[layout.CHANGES])
    stop = layout.DESCRIPTION + layout.CHANGE * count
    ids, factors, shifts = description[layout.DESCRIPTION : stop].view(-1, layout.CHANGE).unbind(1)
    chosen = ids.long()
    changed = code[:, chosen] * factors + shifts
    if is_error:
        decoded = (changed - code[:, chosen]) @ sae.w_dec[chosen]
        return decoded if sae.transcodes else decoded * scale
    code[:, chosen] = changed
    decoded = code @ sae.w_dec + sae.b_dec
    if sae.w_skip is not None:
        decoded += (h - mean if sae.centered else h) @ sae.w_skip
    return decoded if sae.transcodes else decoded * scale + mean


class _Sae(NamedTuple):
    w_enc: Tensor
    b_enc: Tensor
    threshold: Tensor
    w_dec: Tensor
    b_dec: Tensor
    w_skip: Tensor | None
    top_k: int
    normalize: int
    centered: bool
    transcodes: bool

    @staticmethod
    def at(place: int, width: int, weights: Tensor) -> _Sae:
        begin = place * layout.ALIGN
        header = [int(number) for number in weights[begin : begin + layout.ALIGN].tolist()]
        count = header[layout.FEATURES]
        begin += layout.ALIGN

        def take(*shape: int) -> Tensor:
            nonlocal begin
            begin += math.prod(shape)
            return weights[begin - math.prod(shape) : begin].view(shape)

        return _Sae(
            take(width, count),
            take(count),
            take(count),
            take(count, width),
            take(width),
            take(width, width) if header[layout.SKIPS] else None,
            header[layout.TOP_K],
            header[layout.NORMALIZE],
            bool(header[layout.CENTERED]),
            bool(header[layout.TRANSCODES]),
        )

    def normalized(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return x, which the encoder reads, and (mean, scale), [n, 1]: h = x · scale + mean."""
        mean, scale = torch.zeros(len(h), 1), torch.ones(len(h), 1)
        if self.centered or self.normalize == layout.LAYER_NORM:
            mean = h.mean(-1, keepdim=True)
            h = h - mean
        if self.normalize == layout.RESCALED:
            scale = h.norm(dim=-1, keepdim=True) / h.shape[-1] ** 0.5
            h = h / scale
        elif self.normalize == layout.LAYER_NORM:
            scale = h.std(-1, keepdim=True)
            h = h / (scale + layout.EPSILON)
        return h, mean, scale

    def encode(self, normed: Tensor) -> Tensor:
        """Return the activations of normalised vectors, [n, features]."""
        activations = normed @ self.w_enc
        activations += self.b_enc
        # Thresholds are not negative: what passes is positive.
        activations = torch.where(activations > self.threshold, activations, 0.0)
        if 0 < self.top_k < activations.shape[1]:
            values, ids = activations.topk(self.top_k, -1)
            activations = torch.zeros_like(activations).scatter_(1, ids, values)
        return activations
