"""Base classes of the results of read-outs: rows by name, and rows by site or name and layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from midstream.validation import as_number, is_int

if TYPE_CHECKING:
    from typing_extensions import Self

    from midstream.plan.resolved import ResolvedCapture
    from midstream.results.activations import Activations


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


class NamedRows(KeyedRows[str, R]):
    """Rows by the names of the read-outs."""

    # Has `of(rows, capture, readout)`, `to_json` and `from_json`.
    kind: ClassVar[Any]

    @classmethod
    def decode(
        cls, rows: Activations, readouts: Sequence[tuple[ResolvedCapture, Any]]
    ) -> Self | None:
        """Return what read-outs have among the rows of a completion; None: they have none."""
        results = {
            readout.name: cls.kind.of(rows, capture, readout)
            for capture, readout in readouts
            if capture.taps[0] in rows.counts()
        }
        return cls(results) if results else None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form of the rows by name."""
        return {name: self.kind.to_json(rows) for name, rows in self.items()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what `to_json` returned."""
        return cls({name: cls.kind.from_json(rows) for name, rows in value.items()})


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
