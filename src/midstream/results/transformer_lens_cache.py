"""Captured vectors as TransformerLens's cache has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from midstream import sites

if TYPE_CHECKING:
    from torch import Tensor

    from midstream.results.activations import Activations


class TransformerLensCache(Mapping[str, "Tensor"]):
    """The activations of one prompt by TransformerLens's names, with its batch dimension.

    `cache["blocks.10.hook_resid_post"]` and `cache["resid_post", 10]` are [1, positions, hidden],
    in the model's dtype; at q, k, v and z [1, positions, heads, head_dim]. Other names of a site
    and layer are accepted as in `Activations`. `transformer_lens.ActivationCache(dict(cache),
    model)` is TransformerLens's own.

    Attributes:
        activations: the same without the batch dimension, and with positions and tokens.
    """

    def __init__(self, activations: Activations) -> None:
        self.activations = activations

    def __getitem__(self, key: str | tuple[str, int]) -> Tensor:
        """Return the vectors of a site and layer, [1, positions, …].

        Raises:
            KeyError: they were not captured, or the name has no layer.
        """
        named = sites.parse(key) if isinstance(key, str) else None
        if named is not None and named[1] is None and named[0] not in sites.ENDS:
            raise KeyError(f"{key!r} names no layer: write cache[{key!r}, 10], or stack_activation")
        return self.activations[key][None]

    def __contains__(self, key: object) -> bool:
        return key in self.activations

    def __iter__(self) -> Iterator[str]:
        return map(sites.transformer_lens_name, self.activations)

    def __len__(self) -> int:
        return len(self.activations)

    def remove_batch_dim(self) -> Activations:
        """Return the activations, [positions, hidden]."""
        return self.activations

    def stack_activation(self, site: str) -> Tensor:
        """Return the vectors of all captured layers of a site, [layers, 1, positions, …]."""
        return self.activations[site][:, None]

    def __repr__(self) -> str:
        return f"TransformerLensCache({self.activations!r})"
