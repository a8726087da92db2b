"""Checked rows of an entry, as NumPy arrays over the tensors' memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream import sites
from midstream.errors import StoreError
from midstream.sites import Tap
from midstream.store.format.entry import MAX_LAYER, TapRows, check_number
from midstream.store.format.layout import MAX_POSITION, tap_order
from midstream.validation import hint, kind, listed, show

MAX_TAPS = 4096  # of one entry

_Index = tuple[bytes, bytes]  # positions and token ids


@dataclass(frozen=True, slots=True)
class IndexedRows:
    """Rows of one request at taps that share positions and token ids."""

    positions: NDArray[np.int64]  # [n], ascending
    token_ids: NDArray[np.int64]
    data: Mapping[Tap, NDArray[np.uint8]]  # [n, row_bytes] per tap, in `tap_order`


def read_rows(taps: object, row_bytes: Callable[[Tap], int]) -> list[IndexedRows]:
    """Return the rows of `Entry.taps`, grouping taps with equal positions and token ids."""
    if not isinstance(taps, Mapping):
        raise StoreError(f"taps: expected a dict, got {kind(taps)}")
    if len(taps) > MAX_TAPS:
        raise StoreError(f"taps: expected at most {MAX_TAPS} taps per entry, got {len(taps)}")
    indices = _Indices()
    data: dict[_Index, dict[Tap, NDArray[np.uint8]]] = {}
    seen: set[Tap] = set()
    for key, rows in taps.items():
        if not isinstance(key, tuple) or len(key) != 2 or not isinstance(key[0], str):
            raise StoreError(f"taps: expected (site, layer) as keys, got {show(repr(key))}")
        site = sites.canonical(key[0])
        if site is None:
            known = listed(sites.NAMES)
            raise StoreError(
                f"taps: unknown site {show(key[0])}{hint(key[0], sites.BY_NAME)}; known: {known}"
            )
        tap = (site, check_number("taps: layer", key[1], 0, MAX_LAYER))
        size = row_bytes(tap)
        try:
            if not isinstance(rows, TapRows):
                raise StoreError(f": expected `TapRows`, got {kind(rows)}")
            if tap in seen:
                raise StoreError(": given twice, by two names of the site")
            index, count = indices.read(rows)
            array = _read_array(rows.data, ".data", torch.uint8, (count, size))
        except StoreError as error:
            raise StoreError(f"taps[{tap[0]!r}, {tap[1]}]{error}") from None
        seen.add(tap)
        data.setdefault(index, {})[tap] = array
    return [
        IndexedRows(
            np.frombuffer(positions, np.int64),
            np.frombuffer(tokens, np.int64),
            {tap: of_index[tap] for tap in sorted(of_index, key=tap_order)},
        )
        for (positions, tokens), of_index in data.items()
    ]


class _Indices:
    """The distinct indices of an entry; usually one, in the same tensors for all taps."""

    def __init__(self) -> None:
        self._by_object: dict[tuple[int, int], _Index] = {}
        self._references: list[TapRows] = []  # keeps `id()` of their tensors unique

    def read(self, rows: TapRows) -> tuple[_Index, int]:
        """Return (key of the rows' index, number of rows)."""
        objects = id(rows.positions), id(rows.token_ids)
        index = self._by_object.get(objects)
        if index is None:
            positions = _read_array(rows.positions, ".positions", torch.int64, (None,))
            tokens = _read_array(rows.token_ids, ".token_ids", torch.int64, positions.shape)
            check_positions(positions, ".positions")
            index = self._by_object[objects] = positions.tobytes(), tokens.tobytes()
            self._references.append(rows)
        return index, len(index[0]) // 8


def check_positions(positions: NDArray[np.int64], where: str) -> None:
    """Check that positions ascend and are between 0 and MAX_POSITION."""
    if not len(positions):
        return
    if positions[0] < 0 or positions[-1] > MAX_POSITION or (positions[1:] <= positions[:-1]).any():
        raise StoreError(f"{where}: expected ascending positions from 0 to {MAX_POSITION}")


def _read_array(
    tensor: Tensor, where: str, dtype: torch.dtype, shape: tuple[int | None, ...]
) -> NDArray[Any]:
    """Return a tensor's memory as an array; None in `shape` matches any length."""
    if not isinstance(tensor, torch.Tensor):
        raise StoreError(f"{where}: expected a tensor, got {kind(tensor)}")
    if not tensor.is_cpu:
        raise StoreError(f"{where}: expected a tensor on the host, got one on {tensor.device}")
    if tensor.dtype != dtype:
        raise StoreError(f"{where}: expected {dtype}, got {tensor.dtype}")
    got = tuple(tensor.shape)
    if len(got) != len(shape) or (shape != (None,) and got != shape):
        wanted = ["n" if length is None else length for length in shape]
        raise StoreError(f"{where}: expected shape {wanted}, got {list(got)}")
    return tensor.numpy()
