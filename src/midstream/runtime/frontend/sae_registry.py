"""Sparse autoencoders that requests name, and where their encoders are in the workers' memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from midstream.errors import SpecError
from midstream.runtime.frontend.weight_memory import NamedWeights, WeightMemory, WeightPart
from midstream.sae.sae import SAE
from midstream.spec import ModelShape
from midstream.spec.resolve.resolved import SaeEncoder
from midstream.validation import kind, listed, show

# What products of matrices on a GPU want.
_ALIGN = 256


@dataclass(frozen=True, slots=True)
class RegisteredSae:
    """An SAE whose encoder the workers have.

    Attributes:
        encoder: where it is.
        sae: the SAE, on the host.
    """

    encoder: SaeEncoder
    sae: SAE


class SaeRegistry(NamedWeights[SAE, RegisteredSae]):
    """The registered SAEs of an engine. The workers have their encoders in float32; whole SAEs
    stay here, for edits of their features.
    """

    kind = "sae"
    word = "SAE"
    setting = "saes"
    load = staticmethod(SAE.load)

    def __init__(self, memory: WeightMemory, shape: ModelShape) -> None:
        """Args:
        memory: where the encoders are.
        shape: the model.
        """
        super().__init__(memory)
        self._shape = shape

    def get(self, name: str) -> RegisteredSae:
        """Return the SAE of a name.

        Raises:
            SpecError: there is none.
        """
        found = self._registered.get(name)
        if found is None:
            known = f"there is {listed(self._registered)}" if self._registered else "there is none"
            raise SpecError(
                "sae",
                f"there is no SAE {show(name)}; {known}; register it with "
                "llm.saes.register(name, sae), or in midstream's setting `saes`",
            )
        return found.made

    def source(self, name: str) -> SAE:
        """Return the SAE of a name.

        Raises:
            SpecError: there is none. The path is empty.
        """
        try:
            return self.get(name).sae
        except SpecError as error:
            raise SpecError("", error.problem) from None

    def check(self, weights: SAE) -> None:
        if not isinstance(weights, SAE):
            raise SpecError("", f"expected an SAE, such as SAE.load(folder), got {kind(weights)}")
        width = self._shape.hidden_size
        if weights.width != width:
            raise SpecError("", f"it reads vectors of {weights.width} numbers, the model's {width}")
        for name, tensor in (("w_enc", weights.w_enc), ("b_enc", weights.b_enc)):
            if not bool(torch.isfinite(tensor).all()):
                raise SpecError(name, "has numbers that are not finite")

    def size(self, weights: SAE) -> tuple[int, int]:
        return 4 * weights.num_features * (weights.width + 2), _ALIGN

    def laid_out(self, first: int, weights: SAE) -> tuple[RegisteredSae, list[WeightPart]]:
        matrix, width, count = first // 4, weights.width, weights.num_features
        bias, threshold = weights.folded()
        at = matrix + width * count
        encoder = SaeEncoder(
            matrix, count, at, at + count, weights.top_k, weights.normalize, weights.centered
        )
        parts = [
            WeightPart(4 * matrix, torch.float32, weights.w_enc),
            WeightPart(4 * at, torch.float32, bias),
            WeightPart(4 * (at + count), torch.float32, threshold),
        ]
        return RegisteredSae(encoder, weights), parts
