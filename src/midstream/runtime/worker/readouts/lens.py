"""First half of a lens: rows of the stream through a map and the norm that the head reads."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from midstream.errors import UnsupportedError
from midstream.plan.resolved import LensMap
from midstream.runtime.models.final_norm import find_final_norm, gain_of, why_no_head
from midstream.runtime.worker.readouts.rank_weights import RankWeights

_ROWS = 256  # of a map that is in float64 at a time


class RankLens:
    """Applies maps and the final norm after a step; `reason` and `no_logits` say why it cannot."""

    def __init__(self, model: Any, weights: RankWeights, dtype: torch.dtype) -> None:
        self._maps = weights.numbers(dtype)
        self._norm: Any = None
        self.reason = self.no_logits = ""
        with suppress(UnsupportedError):
            self.no_logits = why_no_head(model)
        try:
            self._norm = find_final_norm(model)
        except UnsupportedError as error:
            self.reason = str(error)
        if not hasattr(model, "compute_logits") and not self.reason:
            self.reason = f"{type(model).__qualname__} has no head"

    def mapped(self, stream: Tensor, lens_map: LensMap) -> Tensor:
        """Return the images of rows of the stream, [n, hidden]."""
        width = stream.shape[1]
        matrix = self._maps[lens_map.matrix : lens_map.matrix + width * width].view(width, width)
        images = stream @ matrix.T
        if lens_map.bias >= 0:
            images += self._maps[lens_map.bias : lens_map.bias + width]
        return images.add_(stream) if lens_map.adds else images

    def __call__(self, stream: Tensor) -> Tensor:
        """Return what the head reads of rows of the stream, [n, hidden]."""
        # The forward by itself: no tap is called. Without a second half of the stream, no norm
        # returns one.
        normed: Tensor = self._norm.forward(stream.contiguous())
        return normed

    def directions(self, head: Tensor, maps: Sequence[LensMap]) -> Tensor:
        """Return [maps, width], float32: unit directions that raise the logit of the head's row."""
        gain, is_centred = gain_of(self._norm, head.shape[0], head.device)
        read = gain * head.double()
        if is_centred:
            read -= read.mean()
        directions = torch.stack([self._pulled_back(read, lens_map) for lens_map in maps])
        norms = directions.norm(dim=1, keepdim=True)
        if not bool((norms > 0).all()):
            raise UnsupportedError("the token's direction is zero")
        units: Tensor = (directions / norms).float()
        return units

    def _pulled_back(self, read: Tensor, lens_map: LensMap) -> Tensor:
        """Return the image of a vector under the transposed map, float64 [width]."""
        if lens_map.matrix < 0:
            return read
        width = read.shape[0]
        image = read.clone() if lens_map.adds else torch.zeros_like(read)
        rows = self._maps[lens_map.matrix : lens_map.matrix + width * width].view(width, width)
        for first in range(0, width, _ROWS):
            part = slice(first, first + _ROWS)
            image += read[part] @ rows[part].double()
        return image
