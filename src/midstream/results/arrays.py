"""Tensors of results, or NumPy arrays in their place where torch is not installed."""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from midstream import sites
from midstream.errors import SpecError, UnsupportedError
from midstream.sites import Tap
from midstream.validation import as_number, is_int

if TYPE_CHECKING:
    from torch import Tensor

PER_DIM = "full8:per=dim"  # `Full8PerDim.spec`, without importing torch

# dtypes of safetensors; BF16, which NumPy lacks, is widened to float32.
_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32,
    "U8": np.uint8,
}  # fmt: skip


class Heads(NamedTuple):
    """Number of attention heads of vectors, and indices of those that are shown; None: all."""

    num_heads: int
    chosen: tuple[int, ...] | None = None

    def of(self, values: Any) -> Any:
        """Return rows [n, width] as [n, heads, head_dim]; a view if all heads are shown."""
        head_dim = values.shape[1] // self.num_heads
        every = values.reshape(values.shape[0], self.num_heads, head_dim)
        return every if self.chosen is None else every[:, list(self.chosen)]


def array_of(values: Sequence[Any] | NDArray[Any], dtype: str) -> Tensor:
    """Return numbers as a tensor of a dtype such as "int64"; without torch, a NumPy array."""
    try:
        import torch
    except ModuleNotFoundError:
        return np.array(values, dtype=dtype)  # type: ignore[return-value]
    if isinstance(values, np.ndarray):
        return torch.from_numpy(values)
    return torch.tensor(values, dtype=getattr(torch, dtype))


def to_base64(values: Any, sent: str) -> str:
    """Return a tensor's bytes in base64, in a dtype such as "<f4"."""
    return base64.b64encode(to_numpy(values).astype(sent).tobytes()).decode()


def from_base64(text: str, shape: tuple[int, ...], sent: str, kept: str) -> Tensor:
    """Return what `to_base64` was given, in this shape and of the dtype `kept`."""
    array = np.frombuffer(base64.b64decode(text), sent).reshape(shape)
    return array_of(array.astype(kept), kept)


def load_tensors(data: bytes) -> Mapping[str, Tensor]:
    """Return a safetensors file's tensors by name; NumPy arrays where torch is not installed."""
    try:
        from safetensors.torch import load
    except ModuleNotFoundError:
        from safetensors import deserialize

        return {name: _array(view) for name, view in deserialize(data)}  # type: ignore[no-untyped-call]
    tensors: Mapping[str, Tensor] = load(data)
    return tensors


def save_tensors(
    rows: Mapping[str, Any], indices: Mapping[str, Any], target: Path, metadata: dict[str, str]
) -> None:
    """Write a safetensors file; no two of `rows` overlap."""
    if any(isinstance(tensor, np.ndarray) for tensor in rows.values()):
        from safetensors.numpy import save_file

        every = {name: np.array(tensor) for name, tensor in {**rows, **indices}.items()}
        save_file(every, target, metadata)
        return
    from safetensors.torch import save_file

    tensors = {name: tensor.contiguous() for name, tensor in rows.items()}
    # safetensors rejects tensors that share memory: copy them.
    tensors |= {name: tensor.clone() for name, tensor in indices.items()}
    save_file(tensors, target, metadata)


def encode_blocks(rows: Mapping[str, Any], codec: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Encode rows [n, width] as uint8 [width, 8 + n]; return the metadata for decoding too."""
    if codec != PER_DIM:
        raise SpecError("codec", f'expected None or "{PER_DIM}", got {codec!r}')
    if any(isinstance(tensor, np.ndarray) for tensor in rows.values()):
        raise UnsupportedError(f"{PER_DIM} requires torch, which is not installed")
    from midstream.codecs import Full8PerDim

    encoded = {name: Full8PerDim().encode(tensor) for name, tensor in rows.items()}
    metadata = {"codec": PER_DIM}
    for first in list(rows.values())[:1]:
        dtype = str(first.dtype).removeprefix("torch.")
        metadata |= {"hidden": str(first.shape[1]), "dtype": dtype}
    return encoded, metadata


def stack_arrays(values: Sequence[Any]) -> Any:
    """Return tensors or arrays of one shape, stacked along a new first dimension."""
    if isinstance(values[0], np.ndarray):
        return np.stack(values)
    import torch

    return torch.stack(list(values))


def to_numpy(values: Any) -> NDArray[np.generic]:
    """Return a tensor as an array; bfloat16, which NumPy lacks, becomes float32."""
    if isinstance(values, np.ndarray):
        return values
    array: NDArray[np.generic] = (
        values.float() if str(values.dtype) == "torch.bfloat16" else values
    ).numpy()
    return array


def _array(view: Mapping[str, Any]) -> Any:
    if view["dtype"] == "BF16":
        halves = np.frombuffer(view["data"], np.uint16).astype(np.uint32) << 16
        return halves.view(np.float32).reshape(view["shape"])
    dtype = _DTYPES.get(view["dtype"])
    if dtype is None:
        raise ValueError(f"dtype {view['dtype']} requires torch")
    return np.frombuffer(view["data"], dtype).reshape(view["shape"])


def stack_layers(rows: Any, site: str) -> Tensor:
    """Return the vectors of a site, [layers, rows, width] or [layers, rows, heads, head_dim]."""
    taps = [(site, layer) for layer in rows.layers if (site, layer) in rows]
    if not taps:
        raise KeyError(f"{site!r} was not captured; there is {repr(rows)[12:-1]}")
    first = rows.positions_of(*taps[0])
    for tap in taps[1:]:
        mine = rows.positions_of(*tap)
        if mine is not first and mine.tolist() != first.tolist():
            raise ValueError(
                f"{site} was captured at other positions at layer {tap[1]} than at layer "
                f"{taps[0][1]}, so the layers cannot be stacked; read activations[site, layer]"
            )
    values = [rows[tap] for tap in taps]
    for tap, value in zip(taps, values, strict=True):
        if value.shape != values[0].shape:
            raise ValueError(
                f"{site} is {show_size(value.shape[1:])} wide at layer {tap[1]} and "
                f"{show_size(values[0].shape[1:])} at layer {taps[0][1]}, so the layers cannot be "
                "stacked; read activations[site, layer]"
            )
    stacked: Tensor = stack_arrays(values)
    return stacked


def tap_of_key(taps: Collection[Tap], key: Any, num_layers: int | None) -> Tap | None:
    """Return the tap that a key of rows means, among `taps` or not; None: it means none.

    A key is (site, layer), a name with both, or a layer if there is one site.
    """
    names = {site for site, _ in taps}
    pair: tuple[str, Any] | None = None
    if isinstance(key, str):
        pair = sites.parse(key)
        if pair is not None and pair[0] in sites.ENDS:
            return next((tap for tap in taps if tap[0] == pair[0]), None)
    elif isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], str):
        site = sites.canonical(key[0])
        pair = None if site is None else (site, as_number(key[1]))
    elif len(names) == 1:
        pair = next(iter(names)), as_number(key)
    if pair is None or not is_int(pair[1]):
        return None
    site, layer = pair[0], int(pair[1])
    if site in sites.ENDS and (site, layer) not in taps:
        return None
    if layer < 0 and num_layers is not None:
        layer += num_layers
    return site, layer


def show_size(shape: Sequence[int]) -> str:
    """Return the size of vectors, as `64`, or as `4 × 16` of 4 heads."""
    return " × ".join(map(str, shape))
