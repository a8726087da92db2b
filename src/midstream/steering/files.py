"""Vectors from files: safetensors, npz, and GGUF control vectors. None of them can run code.

A key says where its vector goes (`midstream.steering.parse.read_key`); a file whose only key is
`vector` holds one that is for no tap in particular.

A GGUF control vector is llama.cpp's and repeng's format: `general.architecture` is
`controlvector`, and the tensor `direction.N`, N ≥ 1, is added to the output of layer N, layers
counted from 0 (`common_control_vector_load_one`, and `build_cvec` after the block's last residual
add: https://github.com/ggml-org/llama.cpp; https://github.com/vgel/repeng). That is our
`resid_post` of layer N, `output_hidden_states[N + 1]` of transformers. llama.cpp can steer
every layer but layer 0, so `direction.0` is refused, as it is there.
"""

from __future__ import annotations

import os
import re
import stat
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from midstream.errors import SpecError
from midstream.spec.vector import MAX_SIZE, Vector
from midstream.steering.parse import Placed, check_distinct, read_key
from midstream.validation import MAX_ITEMS, show

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Every site of 128 layers, 16384 wide, in float64 is 100 MiB.
MAX_FILE_BYTES = 256 << 20
LONE_KEY = "vector"

_PICKLES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".joblib")
_KNOWN = ".safetensors, .npz or .gguf"
_MAX_HEADER = 10_000
_HEADER = re.compile(
    r"\{\s*'descr':\s*'(?P<type>[<>=|][fiu][0-9]{1,2})',\s*'fortran_order':\s*(?:True|False),"
    r"\s*'shape':\s*\((?P<shape>(?:[0-9]{1,18}\s*,?\s*){0,32})\),?\s*\}\s*"
)


def read_file(path: str | os.PathLike[str]) -> tuple[Placed, ...] | Vector:
    """The vectors in a file.

    Args:
        path: a `.safetensors`, `.npz` or `.gguf` file, of real numbers of any type; GGUF: F32 or
            F16. Each tensor has one dimension.

    Returns:
        The vectors with their taps; or one Vector, where that is the file's only key, `vector`.

    Raises:
        SpecError: no such file, another kind of file, a damaged or hostile one, a key that names
            no tap, two keys for one tap, or a tensor that is no vector. The problem starts with
            the file's name; the path is empty.
    """
    name = os.fspath(path)
    try:
        suffix = os.path.splitext(name)[1].lower()
        _check_kind(suffix)
        _check_size(name)
        return _place(_READERS[suffix](name))
    except SpecError as error:
        where = f"{name}: {error.path}" if error.path else name
        raise SpecError("", f"{where}: {error.problem}") from None
    except OSError as error:
        raise SpecError("", f"{name}: {error.strerror or error}") from None


def _check_kind(suffix: str) -> None:
    if suffix in _PICKLES:
        raise SpecError(
            "",
            f"{suffix} files hold pickles, which can run code, and are not read; save the tensors "
            "with safetensors.torch.save_file, or pass them as a dict",
        )
    if suffix == ".npy":
        raise SpecError("", "an .npy file has no layers; pass numpy.load's array, or use .npz")
    if suffix not in _READERS:
        got = f"a file that ends in {show(suffix)}" if suffix else "a name without an ending"
        raise SpecError("", f"expected {_KNOWN}, got {got}")


def _check_size(name: str) -> None:
    try:
        found = os.stat(name)
    except ValueError as error:
        raise SpecError("", f"cannot be a file's name: {error}") from None
    if not stat.S_ISREG(found.st_mode):
        raise SpecError("", "not a file")
    if found.st_size > MAX_FILE_BYTES:
        raise SpecError(
            "", f"{found.st_size} bytes; a file of vectors has at most {MAX_FILE_BYTES}"
        )


def _place(arrays: dict[str, Vector]) -> tuple[Placed, ...] | Vector:
    if not arrays:
        raise SpecError("", "there are no vectors in it")
    if set(arrays) == {LONE_KEY}:
        return arrays[LONE_KEY]
    placed = [Placed(_name(key), *read_key(key), vector) for key, vector in arrays.items()]
    check_distinct(placed)
    return tuple(placed)


def _check_keys(keys: list[str]) -> None:
    """Before any tensor is read: a whole model's file is refused by its first key."""
    if len(keys) > MAX_ITEMS:
        raise SpecError("", f"{len(keys)} tensors; a file of vectors has at most {MAX_ITEMS}")
    if keys != [LONE_KEY]:
        for key in keys:
            read_key(key)


def _check_shape(shape: tuple[int, ...]) -> None:
    """Before the numbers are read."""
    if len(shape) != 1:
        raise SpecError("", f"expected one dimension, got shape {list(shape)}")
    if not 1 <= shape[0] <= MAX_SIZE:
        raise SpecError("", f"a vector has 1 to {MAX_SIZE} numbers, got {shape[0]}")


def _name(key: str) -> str:
    return f"tensor {show(key)}"


@contextmanager
def _tensor(key: str) -> Iterator[None]:
    """Errors about a vector's numbers are raised with its key."""
    try:
        yield
    except SpecError as error:
        raise SpecError(f"{_name(key)}{error.path}", error.problem) from None


# ---------------------------------------------------------------- safetensors


def _read_safetensors(name: str) -> dict[str, Vector]:
    from safetensors import SafetensorError, safe_open

    try:
        # As torch tensors: numpy has no bfloat16.
        with safe_open(name, framework="pt", device="cpu") as file:
            keys = sorted(file.keys())
            _check_keys(keys)
            found = {}
            for key in keys:
                with _tensor(key):
                    _check_shape(tuple(file.get_slice(key).get_shape()))
                    found[key] = Vector.parse(file.get_tensor(key))
            return found
    except SafetensorError as error:
        raise SpecError("", f"not a safetensors file, or a damaged one: {error}") from None


# ---------------------------------------------------------------- npz


def _read_npz(name: str) -> dict[str, Vector]:
    try:
        with zipfile.ZipFile(name) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            if len(members) < len(archive.infolist()):
                raise SpecError("", "two arrays have the same name")
            _check_keys(list(members))
            found = {}
            for key, info in members.items():
                with archive.open(info) as file, _tensor(key):
                    found[key] = Vector.parse(_read_npy(file))
            return found
    # What zipfile raises for damage, encryption and compressions that it does not know.
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise SpecError("", f"not an npz file, or a damaged one: {error}") from None


def _read_npy(file: IO[bytes]) -> NDArray[Any]:
    """One array, [n]. Its header is matched, not evaluated, and checked before anything is
    allocated for it; numpy.load can be made to unpickle and to allocate.
    """
    import numpy as np

    start = _read_exactly(file, 8)
    if start[:6] != b"\x93NUMPY" or start[6:] not in (b"\x01\x00", b"\x02\x00"):
        raise SpecError("", "not an array of numpy's format 1.0 or 2.0")
    length = int.from_bytes(_read_exactly(file, 2 * start[6]), "little")
    if length > _MAX_HEADER:
        raise SpecError("", f"a header of {length} bytes; numpy itself reads {_MAX_HEADER}")
    match = _HEADER.fullmatch(_read_exactly(file, length).decode("latin1"))
    if match is None:
        raise SpecError("", "expected an array of real numbers, got another header")
    shape = tuple(int(size) for size in match["shape"].split(",") if size.strip())
    _check_shape(shape)
    try:
        dtype = np.dtype(match["type"])
    except TypeError:
        raise SpecError("", f"there are no numbers of type {match['type']}") from None
    data = _read_exactly(file, shape[0] * dtype.itemsize)
    # At its end the archive's checksum is compared.
    if file.read(1):
        raise SpecError("", "the array is longer than its header says")
    return np.frombuffer(data, dtype)


def _read_exactly(file: IO[bytes], count: int) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise SpecError("", f"the array ends after {len(data)} of {count} bytes")
    return data


# ---------------------------------------------------------------- GGUF


def _read_control_vector(name: str) -> dict[str, Vector]:
    from midstream.errors import ModelError
    from midstream.steering.gguf import LAYOUTS, read_gguf

    with open(name, "rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    try:
        gguf = read_gguf(data)
    except ModelError as error:
        raise SpecError("", str(error)) from None
    architecture = gguf.metadata.get("general.architecture")
    if architecture != "controlvector":
        got = "none" if architecture is None else show(str(architecture))
        raise SpecError(
            "", f"expected a control vector (general.architecture = controlvector), got {got}"
        )
    found = {}
    for key, tensor in gguf.tensors.items():
        with _tensor(key):
            _check_direction(key)
            _check_shape(tensor.shape)
            layout = LAYOUTS[tensor.kind].name
            if layout not in ("F32", "F16"):
                raise SpecError("", f"expected F32 or F16, got {layout}")
            found[key] = Vector.parse(tensor.dequantize())
    return found


def _check_direction(key: str) -> None:
    prefix, _, layer = key.partition(".")
    if prefix != "direction" or not layer.isascii() or not layer.isdigit() or len(layer) > 6:
        raise SpecError("", "expected `direction.N`, N a layer's index from 1")
    if int(layer) == 0:
        raise SpecError(
            "",
            "a control vector has no direction for layer 0: llama.cpp counts layers from 0 and "
            "steers the output of layers 1 and up",
        )
    read_key(key)


_READERS = {
    ".safetensors": _read_safetensors,
    ".npz": _read_npz,
    ".gguf": _read_control_vector,
}
