"""NumPy arrays of captured rows, as stored in npz files."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.codecs import Cast, Codec, Full8, Raw, Rp8, Topk8
from midstream.codecs.affine import HEADER_BYTES, scales_and_zeros
from midstream.results.activations import Activations

Arrays = dict[str, NDArray[Any]]


def arrays_of(activations: Activations, site: str, layer: int, width: int) -> Arrays:
    """Return the rows of one site and layer, with `positions` and `token_ids`, int64 [n].

    Codec `raw`: `rows` [n, width]; bfloat16 is converted to float32, which represents all of its
    values. Codec `cast`: `rows` float32 [n, width]. Other codecs: `q` uint8, `scale` and `zero`
    float32 [n]; a row is `zero + scale · q`. `q` is [n, width] for `full8` and [n, k] for `rp8` and
    `topk8`; `topk8` also has `indices` int64 [n, k].
    """
    codec = activations.codec
    if isinstance(codec, Raw | Cast):
        rows = activations[site, layer]
        rows = rows.float() if rows.dtype == torch.bfloat16 else rows
        arrays = {"rows": rows.numpy()}
    else:
        arrays = _reduced(codec, activations.encoded(site, layer), width)
    arrays["positions"] = activations.positions_of(site, layer).numpy()
    arrays["token_ids"] = activations.token_ids_of(site, layer).numpy()
    return arrays


def _reduced(codec: Codec, data: Tensor, width: int) -> Arrays:
    if not isinstance(codec, Full8 | Rp8 | Topk8):
        raise TypeError(f"codec {codec.spec}: this module does not say which arrays its rows have")
    kept = codec.k if isinstance(codec, Rp8 | Topk8) else width
    scale, zero = scales_and_zeros(data)
    arrays = {
        "q": data[:, HEADER_BYTES : HEADER_BYTES + kept].numpy(),
        "scale": scale.squeeze(1).numpy(),
        "zero": zero.squeeze(1).numpy(),
    }
    if isinstance(codec, Topk8):
        arrays["indices"] = codec.indices(data, width).numpy()
    return arrays


def described(arrays: Arrays, width: int, hidden_size: int) -> dict[str, Any]:
    """Return the arrays' entry in a manifest: width if it is not the hidden size, forms, scales."""
    scale = arrays.get("scale")
    finite = None if scale is None else scale[np.isfinite(scale)]
    return {
        **({} if width == hidden_size else {"width": width}),
        "arrays": forms(arrays),
        "scales": None
        if finite is None or not finite.size
        else {"min": float(finite.min()), "max": float(finite.max())},
    }


def forms(arrays: Arrays) -> dict[str, Any]:
    return {
        name: {"shape": list(array.shape), "dtype": str(array.dtype)}
        for name, array in arrays.items()
    }
