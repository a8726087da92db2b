"""Arrays of other tools in JSON: base64 of raw numbers, possibly compressed."""

from __future__ import annotations

import importlib
import io
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from midstream.errors import SpecError
from midstream.plan.vectors.vector import read_base64
from midstream.validation import at, is_int, kind, read_word, show

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DTYPES = ("float32", "float16", "bfloat16", "float64")
# Of one array, and of all compressed arrays of a request together: 64 MiB of float32.
MAX_NUMBERS = 1 << 24
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
_MAX_DIMENSIONS = 3
_MAX_WINDOW_BITS = 27  # of a compressed frame, which bounds the decompressor's memory


def read_array(
    data: object, shape: object, dtype: object = "float32", compression: object = None
) -> NDArray[np.float32]:
    """Return the numbers of an array, base64 or bytes, little-endian, as float32 [*shape]."""
    import numpy as np

    with at("shape"):
        sizes = _read_shape(shape)
    with at("dtype"):
        word = read_word(dtype, DTYPES)
    count = math.prod(sizes)
    expected = count * _ITEM_BYTES[word]
    with at("compression"):
        if compression is not None:
            read_word(compression, ("zstd",))
    with at("data"):
        raw = data if isinstance(data, bytes) else read_base64(data)
        if compression is not None:
            raw = _decompressed(raw, expected)
        if len(raw) != expected:
            raise SpecError(
                "", f"expected {expected} bytes for {word} of shape {sizes}, got {len(raw)}"
            )
    if word == "bfloat16":
        halves = np.frombuffer(raw, "<u2").astype("<u4")
        array = (halves << 16).view("<f4")
    else:
        array = np.frombuffer(raw, f"<f{_ITEM_BYTES[word]}")
    with np.errstate(over="ignore"):
        # A number that overflows becomes infinite, which Vector rejects.
        return array.astype("<f4").reshape(sizes)


def check_compressed(arrays: Iterable[object]) -> None:
    """Check how many numbers a request's compressed arrays have, by their shapes, if valid."""
    count = 0
    for array in arrays:
        if isinstance(array, Mapping) and array.get("compression") is not None:
            with suppress(SpecError):
                count += math.prod(_read_shape(array.get("shape")))
    if count > MAX_NUMBERS:
        raise SpecError(
            "",
            f"{count} numbers in compressed arrays, and the budget of one request is "
            f"{MAX_NUMBERS}; send fewer vectors, or register them",
        )


def _read_shape(shape: object) -> list[int]:
    if not isinstance(shape, (list, tuple)) or not 1 <= len(shape) <= _MAX_DIMENSIONS:
        raise SpecError("", f"expected a list of one to three sizes, got {kind(shape)}")
    for index, size in enumerate(shape):
        if not is_int(size) or size < 1:
            raise SpecError(f"[{index}]", "expected a positive `int`")
    if math.prod(shape) > MAX_NUMBERS:
        raise SpecError("", f"expected at most {MAX_NUMBERS} numbers")
    return [int(size) for size in shape]


def _decompressed(data: bytes, size: int) -> bytes:
    """Return decompressed zstd data, at most one byte more than `size`."""
    library, read = _zstd()
    try:
        return read(library, data, size + 1)
    except library.ZstdError as error:
        raise SpecError("", f"expected zstd data of {size} bytes: {show(str(error))}") from None


def _zstd() -> tuple[Any, Callable[[Any, bytes, int], bytes]]:
    # Not pyarrow, whose results end in memory of others if the size is wrong.
    for name, read in (
        ("compression.zstd", _read_python),
        ("backports.zstd", _read_python),
        ("zstandard", _read_zstandard),
    ):
        try:
            return importlib.import_module(name), read
        except ImportError:
            continue
    raise SpecError(
        "",
        'the server has no zstd: install zstandard there, or send "compression": null and the '
        "numbers uncompressed",
    )


def _read_python(library: Any, data: bytes, size: int) -> bytes:
    options = {library.DecompressionParameter.window_log_max: _MAX_WINDOW_BITS}
    decompressed: bytes = library.ZstdDecompressor(options=options).decompress(
        data, max_length=size
    )
    return decompressed


def _read_zstandard(library: Any, data: bytes, size: int) -> bytes:
    made = library.ZstdDecompressor(max_window_size=1 << _MAX_WINDOW_BITS)
    with made.stream_reader(io.BytesIO(data)) as reader:
        decompressed: bytes = reader.read(size)
    return decompressed
