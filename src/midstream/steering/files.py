"""Reader of vector files: safetensors, npz, GGUF and torch's, of which no code is run. A key names
its vector's tap; a sole `vector` has none. A GGUF control vector is llama.cpp's and repeng's:
`direction.N`, N ≥ 1, is added to the output of layer N, counted from 0: our `resid_post` of layer
N.
"""

from __future__ import annotations

import io
import json
import os
import uuid
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

from midstream.errors import SpecError
from midstream.plan.vectors.matrix import check_square, matrix_of
from midstream.plan.vectors.vector import MAX_SIZE, Vector
from midstream.steering.parse import LONE_WORDS, Placed, check_distinct, read_key, read_placed
from midstream.torch_file import load_weights
from midstream.validation import MAX_ITEMS, check_regular, check_suffix, kind, read_json, show

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Every site of 128 layers, 16384 wide, in float64 is 100 MiB.
MAX_FILE_BYTES = 256 << 20
# Of matrices, which are in safetensors alone: 64 layers, 8192 wide, in float32.
MAX_MATRIX_BYTES = 16 << 30

_TORCH = (".pt", ".pth")
_PICKLES = (".bin", ".pkl", ".pickle", ".ckpt", ".joblib")
_KNOWN = ".safetensors, .npz, .gguf, .pt or .json"
_JSON = ".json"
_MAX_PREAMBLE = 12  # bytes of an .npy file before its header: magic, version and length
_MAX_HEADER = 10_000  # numpy's own default
_MAX_DIMENSIONS = 32

# Libraries add more methods to zipfile, for the whole process, with exceptions of their own.
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
# What zipfile raises for damage and encryption.
_DAMAGE: tuple[type[Exception], ...] = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError)
with suppress(ImportError):  # a Python without it reads no such files
    import lzma

    _DAMAGE = (*_DAMAGE, lzma.LZMAError)


def read_file(path: str | os.PathLike[str]) -> tuple[Placed, ...] | Vector:
    """Read the vectors of a file, [width] or [1, width], real numbers, with their taps; in
    safetensors also square matrices. Return one Vector if the file's only key is `vector`, or
    another of `LONE_WORDS`, or if torch saved a tensor alone.
    """
    name = os.fspath(path)
    try:
        suffix = os.path.splitext(name)[1].lower()
        _check_kind(suffix)
        _check_size(name)
        if suffix in _TORCH:
            return _of_torch(load_weights(name))
        arrays = _READERS[suffix](name)
        if not arrays:
            raise SpecError("", "the file contains no vectors")
        if len(arrays) == 1 and set(arrays) <= set(LONE_WORDS):
            (vector,) = arrays.values()
            return vector
        placed = [Placed(_name(key), *read_key(key), vector) for key, vector in arrays.items()]
        check_distinct(placed)
        return tuple(placed)
    except SpecError as error:
        where = f"{name}: {error.path}" if error.path else name
        raise SpecError("", f"{where}: {error.problem}") from None
    except OSError as error:
        raise SpecError("", f"{name}: {error.strerror or error}") from None


def is_json_file(path: str | os.PathLike[str]) -> bool:
    return os.path.splitext(os.fspath(path))[1].lower() == _JSON


def read_json_file(path: str | os.PathLike[str]) -> dict[Any, Any]:
    """Return the object in a `.json` file; its values are not checked."""
    name = os.fspath(path)
    try:
        _check_size(name)
        with open(name, "rb") as file:
            content = read_json(file.read())
        if not isinstance(content, dict):
            raise SpecError("", f"expected a JSON object, got {kind(content)}")
    except SpecError as error:
        raise SpecError("", f"{name}: {error}") from None
    except OSError as error:
        raise SpecError("", f"{name}: {error.strerror or error}") from None
    return content


def write_json_file(path: str | os.PathLike[str], value: dict[str, object]) -> None:
    """Write JSON values to a `.json` file, which appears by a rename."""
    name = check_suffix(path, _JSON)
    part = f"{name}.{uuid.uuid4().hex}.part"
    try:
        with open(part, "x", encoding="utf-8") as file:
            json.dump(value, file, allow_nan=False)
        os.replace(part, name)
    except BaseException:
        with suppress(OSError):
            os.unlink(part)
        raise


def _check_kind(suffix: str) -> None:
    if suffix in _PICKLES:
        raise SpecError(
            "",
            f"{suffix} files hold pickles, which can run code, and are not read; save the tensors "
            "with safetensors.torch.save_file, or pass them as a dict",
        )
    if suffix == ".npy":
        raise SpecError("", "an .npy file names no layer; pass numpy.load's array, or use .npz")
    if suffix not in (*_READERS, *_TORCH):
        got = f"the suffix {show(suffix)}" if suffix else "a name without a suffix"
        raise SpecError("", f"expected {_KNOWN}, got {got}")


def _check_size(name: str) -> None:
    try:
        file_stat = check_regular(name)
    except IsADirectoryError:
        raise SpecError("", "not a regular file") from None
    except ValueError as error:
        raise SpecError("", f"invalid file name: {error}") from None
    most = MAX_MATRIX_BYTES if name.lower().endswith(".safetensors") else MAX_FILE_BYTES
    if file_stat.st_size > most:
        raise SpecError("", f"file of {file_stat.st_size} bytes; expected at most {most}")


def _check_keys(keys: list[str]) -> None:
    """Check keys before any tensor is read; a file of model weights fails at its first key."""
    if len(keys) > MAX_ITEMS:
        raise SpecError("", f"expected at most {MAX_ITEMS} tensors, got {len(keys)}")
    if len(keys) != 1 or keys[0] not in LONE_WORDS:
        for key in keys:
            read_key(key)


def _size_of(shape: tuple[int, ...]) -> int:
    """Check a vector's shape, [n] or [1, n], before its numbers are read; return n."""
    if len(shape) != 1 and (len(shape) != 2 or shape[0] != 1):
        raise SpecError("", f"expected one dimension, got shape {list(shape)}")
    if not 1 <= shape[-1] <= MAX_SIZE:
        raise SpecError("", f"expected 1 to {MAX_SIZE} numbers, got {shape[-1]}")
    return shape[-1]


def _name(key: str) -> str:
    return f"tensor {show(key)}"


@contextmanager
def _tensor(key: str) -> Iterator[None]:
    """Prefix SpecErrors of the block with the tensor's key."""
    try:
        yield
    except SpecError as error:
        raise SpecError(f"{_name(key)}{error.path}", error.problem) from None


def _read_safetensors(name: str) -> dict[str, Vector]:
    from safetensors import SafetensorError, safe_open

    try:
        # As torch tensors: numpy has no bfloat16.
        with safe_open(name, framework="pt", device="cpu") as file:
            keys = sorted(file.keys())
            _check_keys(keys)
            vectors: dict[str, Vector] = {}
            for key in keys:
                with _tensor(key):
                    shape = tuple(file.get_slice(key).get_shape())
                    if len(shape) == 2 and shape[0] == shape[1]:
                        check_square(shape)
                        vectors[key] = matrix_of(file.get_tensor(key))
                        continue
                    _size_of(shape)
                    vectors[key] = Vector.parse(file.get_tensor(key))
            return vectors
    except SafetensorError as error:
        raise SpecError("", f"not a safetensors file, or damaged: {error}") from None


def _read_npz(name: str) -> dict[str, Vector]:
    try:
        with zipfile.ZipFile(name) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            if len(members) < len(archive.infolist()):
                raise SpecError("", "two arrays have the same name")
            _check_keys(list(members))
            vectors = {}
            for key, info in members.items():
                if info.compress_type not in _METHODS:
                    raise SpecError(
                        "", f"{key}: compression method {info.compress_type} is not supported"
                    )
                with archive.open(info) as file, _tensor(key):
                    vectors[key] = Vector.parse(_read_npy(file))
            return vectors
    except _DAMAGE as error:
        raise SpecError("", f"not an npz file, or damaged: {error}") from None


def _read_npy(file: IO[bytes]) -> NDArray[Any]:
    """Read an array, [n] or [1, n], as [n]; numpy.load would allocate what a header says."""
    import numpy as np
    from numpy.lib import format as numpy_format

    npy: Any = numpy_format  # its stubs lack types and `max_header_size`
    # The header's own length field is not trusted: it could make numpy decompress gigabytes.
    start = io.BytesIO(file.read(_MAX_PREAMBLE + _MAX_HEADER))
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    try:
        version = npy.read_magic(start)
        shape, _, dtype = readers[version](start, max_header_size=_MAX_HEADER)
    # numpy parses the header as a Python literal, which can raise almost any exception.
    except Exception:  # noqa: BLE001
        raise SpecError(
            "",
            "expected an array in numpy's format 1.0 or 2.0, with a valid header of at most "
            f"{_MAX_HEADER} bytes",
        ) from None
    if dtype.kind not in "fiu":
        raise SpecError("", f"expected an array of real numbers, got dtype {show(str(dtype))}")
    if len(shape) > _MAX_DIMENSIONS or not all(abs(size) < 1 << 63 for size in shape):
        raise SpecError("", "invalid shape in the array's header")
    count = _size_of(shape) * dtype.itemsize
    data = start.read()
    data += file.read(max(count - len(data), 0))
    if len(data) < count:
        raise SpecError("", f"truncated array: expected {count} bytes, got {len(data)}")
    # Reading to the end of the member makes zipfile compare its checksum.
    if len(data) > count or file.read(1):
        raise SpecError("", f"the array is longer than the {count} bytes of its header's shape")
    return np.frombuffer(data, dtype)


def _read_control_vector(name: str) -> dict[str, Vector]:
    with open(name, "rb") as file:
        return read_control_vector(file.read(MAX_FILE_BYTES + 1))


def read_control_vector(data: bytes) -> dict[str, Vector]:
    """Read a GGUF control vector: vectors by `direction.N`."""
    from midstream.errors import ModelError
    from midstream.steering.gguf import read_gguf

    try:
        gguf = read_gguf(data, architecture="controlvector")
    except ModelError as error:
        raise SpecError("", str(error)) from None
    vectors = {}
    for key, tensor in gguf.tensors.items():
        with _tensor(key):
            _check_direction(key)
            _size_of(tensor.shape)
            vectors[key] = Vector.parse(tensor.dequantize())
    return vectors


def _of_torch(value: Any) -> tuple[Placed, ...] | Vector:
    """Return the vectors of a file of `torch.save`: a tensor alone, or a dict of vectors by tap."""
    if isinstance(value, Mapping) and len(value) == 1 and set(value) <= set(LONE_WORDS):
        (value,) = value.values()
    if isinstance(value, Mapping):
        return read_placed(value)
    if getattr(value, "ndim", 1) > 1 and value.shape[0] > 1:
        raise SpecError(
            "",
            f"expected vectors by layer, got a tensor of shape {list(value.shape)}, which does not "
            "say of which layers its rows are: torch.load it, and pass {layer: row}",
        )
    return Vector.parse(value)


def _check_direction(key: str) -> None:
    prefix, _, layer = key.partition(".")
    if prefix != "direction" or not layer.isascii() or not layer.isdigit() or len(layer) > 6:
        raise SpecError("", "expected `direction.N` with a layer index N from 1")
    if int(layer) == 0:
        raise SpecError(
            "",
            "layer 0 is unsupported in control vectors: llama.cpp counts layers from 0 and steers "
            "the output of layers 1 and up",
        )
    read_key(key)


_READERS = {
    ".safetensors": _read_safetensors,
    ".npz": _read_npz,
    ".gguf": _read_control_vector,
}
