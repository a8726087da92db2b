"""Base classes of the results of read-outs: rows by name, and rows by site or name and layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Protocol, TypeVar

from midstream.validation import as_number, is_int


class ReadOutRows(Protocol):
    """Rows of one key."""

    @property
    def nbytes(self) -> int:
        """Bytes of the JSON form's numbers, before base64."""


K = TypeVar("K")
R = TypeVar("R", bound=ReadOutRows)


class KeyedRows(Mapping[K, R]):
    """What the read-outs of one kind returned for one completion, by key."""

    # The message of a KeyError, of a key and the keys that there are.
    unknown: ClassVar[str]

    def __init__(self, rows: Mapping[K, R]) -> None:
        self._rows = dict(rows)

    def __getitem__(self, key: Any) -> R:
        """Return the rows of a key."""
        own = self._own_key(key)
        if own not in self._rows:
            known = ", ".join(repr(self._short_key(name)) for name in self._rows)
            raise KeyError(self.unknown.format(repr(key), known))
        return self._rows[own]

    def __iter__(self) -> Iterator[K]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        shown = ", ".join(f"{key}: {rows!r}" for key, rows in self.items())
        return f"{type(self).__name__}({shown})"

    @property
    def nbytes(self) -> int:
        """Bytes of the JSON form's numbers, before base64."""
        return sum(rows.nbytes for rows in self.values())

    def _own_key(self, key: Any) -> Any:
        """Return the key of the rows that a caller's key names."""
        return key

    def _short_key(self, key: Any) -> Any:
        """Return the shortest key that names the same rows."""
        return key


class LayerRows(KeyedRows[tuple[str, int], R]):
    """Rows by (site or name, layer). Layer −1 is the model's last one."""

    def __init__(self, rows: Mapping[tuple[str, int], R], num_layers: int | None = None) -> None:
        """Create from rows; the number of layers is for negative ones; None: unknown."""
        super().__init__(rows)
        self._num_layers = num_layers

    def _layer_of(self, layer: object) -> int | None:
        """Return a layer counted from 0, of a Python or NumPy integer; None: it is none."""
        layer = as_number(layer)
        if not is_int(layer):
            return None
        number = int(layer)
        return number + (self._num_layers or 0) if number < 0 else number
