"""Files with tensors by name: of `torch.save`, of which nothing is executed, and of safetensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from midstream.errors import SpecError
from midstream.validation import check_regular, kind

if TYPE_CHECKING:
    from torch import Tensor


def load_weights(path: str | os.PathLike[str]) -> Any:
    """Return the tensors, numbers and texts of a file, in the lists and dicts in which they are,
    by torch's loader of weights: it refuses what is more, and executes nothing.

    Raises:
        SpecError: it is no such file.
        OSError: it cannot be read.
    """
    import torch

    check_regular(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    # A damaged file makes torch and pickle raise almost any exception.
    except Exception as error:  # noqa: BLE001
        first = str(error).strip().splitlines()[:1]
        raise SpecError(
            "", f"expected a file of tensors alone, which runs no code: {''.join(first)}"
        ) from None


def tensors_by_name(path: str | os.PathLike[str]) -> dict[Any, Any]:
    """Return the dict of a file of `load_weights`."""
    tensors = load_weights(path)
    if not isinstance(tensors, Mapping):
        raise SpecError("", f"expected tensors by name, got {kind(tensors)}")
    return dict(tensors)


def save_copies(tensors: Mapping[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Write a safetensors file of copies on the CPU: it refuses tensors that share memory."""
    import torch
    from safetensors.torch import save_file

    whole = torch.contiguous_format
    copies = {n: tensor.detach().cpu().clone(memory_format=whole) for n, tensor in tensors.items()}
    save_file(copies, path)
