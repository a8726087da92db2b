"""Captured rows as bytes for transfer between processes: a safetensors file, see `pack`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from midstream.results.activations import Activations
from midstream.results.rows_file import POSITIONS, TOKENS, header_of, read_rows_file

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def pack(activations: Activations, hidden: int, dtype: torch.dtype) -> bytes:
    """Return rows as the bytes of a safetensors file.

    Tensor `{site}.{layer}` is [rows, hidden] in the model's dtype; for a lossy codec it is uint8
    [rows, bytes of a row], encoded as `midstream.codecs` describes. `{site}.{layer}.positions` and
    `{site}.{layer}.token_ids` are int64 [rows]. The metadata have `format`, `version`, `codec`,
    `hidden` and `dtype`, and `num_layers` if it is known.

    Args:
        activations: the rows.
        hidden: width of the captured vectors.
        dtype: dtype of the captured vectors.
    """
    from safetensors.torch import save

    from midstream.codecs import Raw

    is_raw = isinstance(activations.codec, Raw)
    tensors: dict[str, Tensor] = {}
    for site, layer in activations:
        name = f"{site}.{layer}"
        rows = activations[site, layer] if is_raw else activations.encoded(site, layer)
        tensors[name] = rows.contiguous()
        # safetensors rejects tensors that share memory: copy them.
        tensors[f"{name}.{POSITIONS}"] = activations.positions_of(site, layer).clone()
        tensors[f"{name}.{TOKENS}"] = activations.token_ids_of(site, layer).clone()
    metadata = {
        **header_of(activations.num_layers),
        "codec": activations.codec.spec,
        "hidden": str(hidden),
        "dtype": str(dtype).removeprefix("torch."),
    }
    packed: bytes = save(tensors, metadata)
    return packed


def unpack(data: bytes) -> Activations:
    """Return the rows of a file from `pack`, bit for bit; also those of a file that
    `Activations.save` encoded.

    Where torch is not installed the rows are NumPy arrays, with bfloat16 widened to float32.

    Raises:
        SpecError: the bytes are not such a file.
        UnsupportedError: the codec is lossy, and torch, which decodes it, is not installed.
    """
    return Activations(*read_rows_file(data))
