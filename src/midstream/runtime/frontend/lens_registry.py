"""Lenses that requests name, and where their maps are in the workers' memory."""

from __future__ import annotations

import torch

from midstream.errors import SpecError
from midstream.lenses import LinearLens, load_lens
from midstream.plan import ModelShape
from midstream.plan.resolved import LensMap
from midstream.plan.tokens import LOGIT
from midstream.runtime.frontend.weight_memory import NamedWeights, WeightMemory, WeightPart
from midstream.validation import kind, show


class LensRegistry(NamedWeights[LinearLens, dict[int, LensMap]]):
    """The registered lenses of an engine: their maps by depth, in the model's dtype."""

    kind = "lens"
    word = "lens"
    setting = "lenses"
    load = staticmethod(load_lens)

    def __init__(self, memory: WeightMemory, shape: ModelShape) -> None:
        super().__init__(memory)
        self._dtype: torch.dtype = getattr(torch, shape.dtype)
        self._shape = shape

    def maps_of(self, name: str, depths: list[int]) -> tuple[LensMap, ...]:
        """Return the map of each of some depths. After the last layer there need be none."""
        lens = self._registered.get(name)
        if lens is None:
            known = ", ".join(map(show, (LOGIT, *self._registered)))
            raise SpecError(
                "kind",
                f"there is no lens {show(name)}; there is {known}; register it with "
                "llm.lenses.register(name, lens), or in midstream's setting `lenses`",
            )
        maps = []
        for depth in depths:
            lens_map = lens.made.get(depth)
            if lens_map is None and depth < self._shape.num_layers:
                raise SpecError(
                    "layers",
                    f"the lens {show(name)} has no map of the stream after {depth} layers; it has "
                    f"those after {', '.join(map(str, sorted(lens.made)))} (resid_post of layer i "
                    "is after i + 1, resid_pre after i)",
                )
            maps.append(lens_map or LensMap())
        return tuple(maps)

    def check_name(self, name: str) -> None:
        if name == LOGIT:
            raise SpecError("", f"{show(LOGIT)} is the lens without maps; use another name")

    def check(self, weights: LinearLens) -> None:
        if not isinstance(weights, LinearLens):
            raise SpecError("", f"expected a TunedLens or a JacobianLens, got {kind(weights)}")
        width, layers = self._shape.hidden_size, self._shape.num_layers
        if weights.width != width:
            raise SpecError("", f"it is {weights.width} wide, and the model {width}")
        for depth in weights.matrices:
            if not 0 <= depth <= layers:
                raise SpecError("", f"the model has {layers} layers, and the lens one more")

    def size(self, weights: LinearLens) -> tuple[int, int]:
        itemsize = self._dtype.itemsize
        return self._of_one(weights) * len(weights.matrices) * itemsize, itemsize

    def laid_out(
        self, first: int, weights: LinearLens
    ) -> tuple[dict[int, LensMap], list[WeightPart]]:
        itemsize, width = self._dtype.itemsize, self._shape.hidden_size
        maps, parts = {}, []
        for index, depth in enumerate(sorted(weights.matrices)):
            matrix = first // itemsize + index * self._of_one(weights)
            bias = -1
            parts.append(WeightPart(matrix * itemsize, self._dtype, weights.matrices[depth]))
            if weights.biases:
                bias = matrix + width * width
                parts.append(WeightPart(bias * itemsize, self._dtype, weights.biases[depth]))
            maps[depth] = LensMap(matrix, bias, weights.adds)
        return maps, parts

    def _of_one(self, lens: LinearLens) -> int:
        width = self._shape.hidden_size
        return width * width + (width if lens.biases else 0)
