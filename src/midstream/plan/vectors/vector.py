"""`Vector`: an immutable float32 vector, from Python values, arrays, tensors or JSON."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from midstream.errors import SpecError
from midstream.plan.argument_names import other_argument
from midstream.validation import FLOAT32_MAX, at, is_int, kind, read_fields, read_float32

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Bounds the conversion work of one request; far above any model's width.
MAX_SIZE = 1 << 20
# Of the numbers of a matrix together: 16384 rows of 16384.
MAX_NUMBERS = 1 << 28

_FORMS = (
    'a list of numbers, a 1-D numpy array or torch tensor, or {"f32": "<base64 of little-endian '
    'float32>"}'
)


@dataclass(frozen=True, slots=True, repr=False)
class Vector:
    """Finite float32 numbers, [size], compared and hashed by content.

    Attributes:
        data: the numbers as little-endian float32, 4 · size bytes.
        digest: sha256 of `data`, in hex.

    Raises:
        SpecError: `data` is empty, not a whole number of float32, or has a non-finite number.
    """

    data: bytes
    digest: str = field(init=False, compare=False)
    is_row: ClassVar[bool] = True

    def __hash__(self) -> int:
        # Of 64 characters, once; `data` may be long.
        return hash(self.digest)

    def __post_init__(self) -> None:
        if not isinstance(self.data, bytes):
            raise SpecError("", f"expected `bytes`, got {kind(self.data)}; see Vector.parse")
        if len(self.data) % 4:
            raise SpecError("", f"{len(self.data)} bytes are not a whole number of float32")
        _check_size(self.size, MAX_NUMBERS)
        _check_finite(self.numpy())
        object.__setattr__(self, "digest", hashlib.sha256(self.data).hexdigest())

    @staticmethod
    def parse(value: object) -> Vector:
        """Read a vector from any of its forms, on any device, rounded to float32."""
        if isinstance(value, Vector) and value.is_row:
            return value
        if isinstance(value, (list, tuple)):
            return _from_numbers(value)
        if isinstance(value, Mapping):
            return _from_base64(value)
        if hasattr(value, "detach") and hasattr(value, "shape"):
            return _from_array(_host_array(value))
        if hasattr(value, "__array__") and hasattr(value, "shape"):
            return _from_array(_as_array(value))
        raise SpecError("", f"expected {_FORMS}, got {kind(value)}{_meant(value)}")

    @property
    def size(self) -> int:
        """The number of elements."""
        return len(self.data) // 4

    @property
    def norm(self) -> float:
        """The Euclidean norm."""
        import numpy as np

        return float(np.linalg.norm(self.numpy().astype(np.float64)))

    def numpy(self) -> NDArray[np.float32]:
        """Return the numbers as a read-only float32 array [size] without a copy."""
        import numpy as np

        return np.frombuffer(self.data, dtype="<f4")

    def emit(self) -> dict[str, object]:
        """Return the JSON form, which `parse` reads."""
        return {"f32": base64.b64encode(self.data).decode("ascii")}

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"Vector(size={self.size}, norm={self.norm:.3g}, digest={self.digest[:8]!r})"


def _meant(value: object) -> str:
    """Return what to write for what is no vector but was meant to have one, for messages."""
    if is_int(value):
        return "; the vector is the first argument and the layer the second, as in (vector, 14)"
    if hasattr(value, "decision_function") or hasattr(value, "predict_proba"):
        return "; a classifier is read by Probe.from_sklearn(classifier, layer=14)"
    if hasattr(value, "forward") and hasattr(value, "parameters"):
        return "; a network is read by Probe.from_torch(module, layer=14)"
    if hasattr(value, "positions_of"):
        return '; take one tensor, as activations["resid_post", 14]'
    return other_argument(value)


def _check_size(size: int, most: int = MAX_SIZE) -> None:
    if size == 0:
        raise SpecError("", "the vector is empty")
    if size > most:
        raise SpecError("", f"expected at most {most} numbers, got {size}")


def _from_numbers(values: list[Any] | tuple[Any, ...]) -> Vector:
    import numpy as np

    _check_size(len(values))
    # Usual lists take no Python code per number.
    if set(map(type, values)) <= {float, int}:
        try:
            exact = np.asarray(values, dtype=np.float64)
        except OverflowError:
            exact = np.asarray(np.inf)
        if (np.abs(exact) <= FLOAT32_MAX).all():
            return Vector(exact.astype("<f4").tobytes())
    numbers = []
    # One try around the loop is faster than `at` for every number.
    try:
        for value in values:
            numbers.append(read_float32(value))
    except SpecError as error:
        more = ": a vector has one dimension" if isinstance(value, (list, tuple)) else ""
        raise SpecError(f"[{len(numbers)}]", error.problem + more) from None
    return Vector(np.asarray(numbers, dtype="<f4").tobytes())


def _from_base64(value: Mapping[Any, Any]) -> Vector:
    text = read_fields(value, required=("f32",))["f32"]
    with at("f32"):
        data = read_base64(text)
        _check_size(-(-len(data) // 4))
        return Vector(data)


def read_base64(text: object) -> bytes:
    if not isinstance(text, str):
        raise SpecError("", f"expected base64 as `str`, got {kind(text)}")
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise SpecError("", f"expected base64: {error}") from None


def _host_array(tensor: Any) -> Any:
    """Return a torch tensor's values on the host, float64 (exact for torch's real dtypes)."""
    _check_shape(tensor)
    if tensor.is_complex() or str(tensor.dtype) == "torch.bool":
        raise SpecError("", f"expected real numbers, got a tensor of {tensor.dtype}")
    try:
        return tensor.detach().to("cpu").double().numpy()
    except (RuntimeError, TypeError) as error:
        raise SpecError("", f"the tensor's values cannot be read: {error}") from None


def _from_array(array: Any) -> Vector:
    import numpy as np

    _check_shape(array)
    check_unmasked(array)
    return Vector(rounded(np.asarray(array).reshape(-1)))


def rounded(array: NDArray[Any]) -> bytes:
    """Return an array's numbers as little-endian float32."""
    import numpy as np

    if array.dtype.kind not in "fiu":
        raise SpecError("", f"expected real numbers, got an array of {array.dtype}")
    _check_finite(array)
    with np.errstate(over="ignore", under="ignore"):
        numbers: NDArray[np.float32] = np.ascontiguousarray(array, dtype="<f4")
    index = _first_not_finite(numbers)
    if index is not None:
        raise SpecError(_path(index), f"{float(array[index])!r} overflows float32")
    return numbers.tobytes()


def _as_array(value: Any) -> Any:
    import numpy as np

    # A Series of pandas and the like; lazy arrays are read once here.
    return value if hasattr(value, "__array_interface__") else np.asarray(value)


def check_unmasked(array: Any) -> None:
    """Check that no number of an array is masked: what is below a mask is no number of it."""
    import numpy as np

    if np.ma.is_masked(array):
        raise SpecError("", "numbers are masked; give `array.filled(…)`")


def _check_shape(array: Any) -> None:
    shape = tuple(array.shape)
    if len(shape) == 2 and shape[0] == 1:
        shape = shape[1:]
    if len(shape) != 1:
        raise SpecError(
            "", f"expected one dimension, got shape {list(shape)}; pass one row, or use reshape(-1)"
        )
    _check_size(int(shape[0]))


def _check_finite(array: NDArray[Any]) -> None:
    index = _first_not_finite(array)
    if index is not None:
        raise SpecError(_path(index), f"expected a finite number, got {float(array[index])}")


def _first_not_finite(array: NDArray[Any]) -> tuple[int, ...] | None:
    import numpy as np

    finite = np.isfinite(array)
    if finite.all():
        return None
    return tuple(map(int, np.unravel_index(int(np.argmin(finite)), array.shape)))


def _path(index: tuple[int, ...]) -> str:
    return "".join(f"[{place}]" for place in index)
