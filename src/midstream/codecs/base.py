"""What a codec is, and what all of them check of their arguments."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from midstream.errors import CodecError, SpecError
from midstream.validation import is_int, kind, show

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Codec(Protocol):
    """A way to write vectors as rows of bytes, all of one width. Little-endian throughout.

    Codecs are values: equal and hashed by their parameters. A row that has a value which is not
    finite is never written as something finite: `raw` keeps its bits, all others write a mark, as
    which the whole row reads NaN.
    """

    @property
    def spec(self) -> str:
        """The codec as text, every parameter written out; `parse_codec` reads it."""
        ...

    def row_bytes(self, hidden: int, dtype: torch.dtype) -> int:
        """How many bytes a vector takes.

        Args:
            hidden: its width.
            dtype: the dtype that the model computes in.

        Raises:
            SpecError: this codec cannot write vectors so short.
        """
        ...

    def encode(self, rows: Tensor) -> Tensor:
        """uint8 [n, row_bytes] on the device of `rows`, which may be its memory.

        Shapes depend on shapes alone and nothing waits for the device, so that this can run
        between two kernels of a model.

        Args:
            rows: [n, hidden] float32, bfloat16 or float16, n ≥ 0, on any device.

        Raises:
            CodecError: another shape or dtype.
            SpecError: this codec cannot write vectors so short.
        """
        ...

    def decode(self, data: Tensor, hidden: int, dtype: torch.dtype) -> Tensor:
        """The vectors, or what is left of them; see each codec for shape and dtype.

        Args:
            data: uint8 [n, row_bytes], on any device.
            hidden: the width of the vectors that were encoded.
            dtype: their dtype.

        Raises:
            CodecError: as `check`.
        """
        ...

    def check(self, data: Tensor, hidden: int, dtype: torch.dtype) -> None:
        """Whether these bytes can have come from `encode`: arguments as of `decode`.

        Raises:
            CodecError: they cannot. The message names the first row that is wrong, and how.
        """
        ...


def checked_rows(rows: Tensor) -> Tensor:
    """Rows to encode, without their history.

    Raises:
        CodecError: not [n, hidden] in one of the dtypes that models compute in.
    """
    if rows.dtype not in DTYPES:
        known = ", ".join(_name(dtype) for dtype in DTYPES)
        raise CodecError(f"rows: expected one of {known}, got {_name(rows.dtype)}")
    if rows.ndim != 2 or rows.shape[1] < 1:
        raise CodecError(f"rows: expected [n, hidden], got {list(rows.shape)}")
    return rows.detach()


def check_shape(codec: Codec, data: Tensor, hidden: int, dtype: torch.dtype) -> None:
    """Whether these are rows of the right width.

    Raises:
        CodecError: not uint8 [n, row_bytes].
    """
    if data.dtype != torch.uint8 or data.ndim != 2:
        raise CodecError(
            f"{codec.spec}: expected uint8 [n, row_bytes], got {_name(data.dtype)} "
            f"{list(data.shape)}"
        )
    width = codec.row_bytes(hidden, dtype)
    if data.shape[1] != width:
        raise CodecError(
            f"{codec.spec}: {_name(dtype)} vectors of {hidden} take {width} bytes a row, got rows "
            f"of {data.shape[1]}"
        )


def refuse_row(codec: Codec, wrong: Tensor, problem: str) -> None:
    """Refuses data in which something is wrong.

    Args:
        wrong: bool [n], which rows are wrong.
        problem: what is wrong with them, after `row 3:`.

    Raises:
        CodecError: a row is wrong; the first is named.
    """
    if bool(wrong.any()):
        raise CodecError(f"{codec.spec}: row {int(wrong.nonzero()[0])}: {problem}")


def check_parameter(name: str, value: object, least: int, most: int) -> None:
    """Whether a codec's parameter is an int in its range.

    Raises:
        SpecError: it is not; the path is its name.
    """
    if not is_int(value):
        raise SpecError(name, f"expected `int`, got {kind(value)}")
    if not least <= int(value) <= most:
        raise SpecError(name, f"expected {least} to {most}, got {show(int(value))}")


def reread(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as another dtype: a view where memory allows it, else a copy.

    Args:
        data: uint8 [n, m], m a multiple of the dtype's size.
        dtype: of any size.
    """
    offsets = (data.storage_offset(), data.stride(0))
    if data.stride(1) != 1 or any(offset % dtype.itemsize for offset in offsets):
        data = data.clone(memory_format=torch.contiguous_format)
    return data.view(dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
