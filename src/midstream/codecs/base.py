"""`Codec`: the interface of codecs, and the argument checks that they share."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from midstream.errors import CodecError, SpecError
from midstream.validation import is_int, kind, show

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Codec(Protocol):
    """An encoding of vectors as rows of bytes of equal length, little-endian.

    Codecs are values: compared and hashed by their parameters. A row with a non-finite value never
    decodes to finite values only: `raw` keeps its bits, `cast` rounds each value by itself, all
    others mark the row, which decodes to NaN.
    """

    @property
    def spec(self) -> str:
        """The codec as text with all parameters, which `parse_codec` reads."""

    def row_bytes(self, hidden: int, dtype: torch.dtype) -> int:
        """Return the number of bytes per encoded vector.

        Args:
            hidden: width of the vector.
            dtype: the model's dtype.

        Raises:
            SpecError: the codec does not support vectors this short.
        """

    def encode(self, rows: Tensor) -> Tensor:
        """Encode vectors on their device.

        Never synchronises with the device, and output shapes depend on input shapes only, so that
        this can run between two kernels of a model.

        Args:
            rows: [n, hidden] float32, bfloat16 or float16, n ≥ 0, on any device.

        Returns:
            uint8 [n, row_bytes] on the device of `rows`; may share its memory.

        Raises:
            CodecError: another shape or dtype.
            SpecError: the codec does not support vectors this short.
        """

    def decode(self, data: Tensor, hidden: int, dtype: torch.dtype) -> Tensor:
        """Decode to vectors or their approximation; see each codec for shape and dtype.

        Args:
            data: uint8 [n, row_bytes], on any device.
            hidden: width of the vectors that were encoded.
            dtype: their dtype.

        Raises:
            CodecError: see `check`.
        """

    def check(self, data: Tensor, hidden: int, dtype: torch.dtype) -> None:
        """Check that `data` is a possible output of `encode`; arguments as in `decode`.

        Raises:
            CodecError: it is not; the message has the first malformed row and its problem.
        """


def checked_rows(rows: Tensor) -> Tensor:
    """Return the rows to encode, detached from autograd."""
    if rows.dtype not in DTYPES:
        known = ", ".join(_name(dtype) for dtype in DTYPES)
        raise CodecError(f"rows: expected one of {known}, got {_name(rows.dtype)}")
    if rows.ndim != 2 or rows.shape[1] < 1:
        raise CodecError(f"rows: expected [n, hidden], got {list(rows.shape)}")
    return rows.detach()


def check_shape(codec: Codec, data: Tensor, hidden: int, dtype: torch.dtype) -> None:
    if data.dtype != torch.uint8 or data.ndim != 2:
        raise CodecError(
            f"{codec.spec}: expected uint8 [n, row_bytes], got {_name(data.dtype)} "
            f"{list(data.shape)}"
        )
    width = codec.row_bytes(hidden, dtype)
    if data.shape[1] != width:
        raise CodecError(
            f"{codec.spec}: expected {width} bytes per row for {_name(dtype)} vectors of {hidden}, "
            f"got {data.shape[1]}"
        )


def reject_rows(spec: str, wrong: Tensor, problem: str) -> None:
    """Raise an error with the first malformed row, if any; `wrong`: bool [n]."""
    if bool(wrong.any()):
        raise CodecError(f"{spec}: row {int(wrong.nonzero()[0])}: {problem}")


def check_parameter(name: str, value: object, least: int, most: int) -> None:
    """Check that a codec's parameter is an int in [least, most]."""
    if not is_int(value):
        raise SpecError(name, f"expected `int`, got {kind(value)}")
    if not least <= int(value) <= most:
        raise SpecError(name, f"expected {least} to {most}, got {show(int(value))}")


def bytes_of(rows: Tensor) -> Tensor:
    """Return the bytes of rows [n, m], uint8 [n, m · itemsize]; a view if they are contiguous."""
    rows = rows.contiguous()
    # One number, or no row, is contiguous with any stride.
    if rows.stride(-1) != 1:
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows.view(torch.uint8)


def view_as(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Reinterpret uint8 [..., m] as another dtype: a view where alignment allows, else a copy."""
    *strides, last = data.stride()
    offsets = (data.storage_offset(), *strides)
    if last != 1 or any(offset % dtype.itemsize for offset in offsets):
        data = data.clone(memory_format=torch.contiguous_format)
    return data.view(dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
