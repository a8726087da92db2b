"""Cached rows of earlier requests, as the rows of a request's edits."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from safetensors import safe_open

from midstream.errors import SpecError
from midstream.plan.captured_rows import OpenRows
from midstream.plan.vectors.device_row import DeviceRow
from midstream.plan.vectors.matrix import read_rows
from midstream.plan.vectors.vector import Vector
from midstream.results.rows_file import POSITIONS, TOKENS
from midstream.server.cached_rows.capture_cache import CachedCapture, CaptureCache, file_of
from midstream.sites import Tap
from midstream.validation import MAX_ITEMS, show

_SHOWN = 8


@contextmanager
def opened_rows(
    captures: CaptureCache,
    client: str,
    owns: Callable[[CachedCapture], bool],
    most: int,
    elsewhere: Callable[[str], bytes | None] | None = None,
) -> Iterator[OpenRows]:
    """Yield a function that returns the rows of an id, for as long as the context lasts."""
    files: dict[str, _RowsFile] = {}
    budget = _Budget(most)
    with ExitStack() as stack:

        def open_rows(name: str) -> _RowsFile:
            if name not in files:
                opened = captures.open(name, client)
                if opened is None:
                    data = None if elsewhere is None else elsewhere(name)
                    if data is None:
                        raise _unknown(name)
                    file = file_of(data)
                    stack.callback(os.close, file)
                else:
                    stack.callback(captures.end_read, *opened)
                    if not owns(opened[0]):
                        raise _unknown(name)
                    file = opened[1]
                path = f"/proc/self/fd/{file}"
                files[name] = _RowsFile(stack.enter_context(safe_open(path, "pt")), budget)
            return files[name]

        yield open_rows


class _Budget:
    """Bytes of rows that the edits of a request may still have."""

    def __init__(self, most: int) -> None:
        self._most, self._left = most, most

    def take(self, nbytes: int) -> None:
        self._left -= nbytes
        if self._left < 0:
            raise SpecError(
                "",
                f"the edits have more than {self._most} bytes of captured rows, which is the limit "
                "of a body (http.max_body_bytes); choose positions or layers",
            )


class _RowsFile:
    """A file of cached rows, of which only the rows in use are read."""

    def __init__(self, file: Any, budget: _Budget) -> None:
        codec = file.metadata()["codec"]
        if codec != "raw":
            raise SpecError(
                "captured",
                f"these rows were captured with the codec {codec}, which loses precision; capture "
                'them with codec="raw"',
            )
        self._file, self._budget = file, budget
        about = file.metadata()
        self._source, self._width = about.get("source", ""), int(about["hidden"])
        self._on_device = frozenset(json.loads(about.get("on_device", "[]")))
        every: list[str] = list(file.keys())
        names = [name.split(".") for name in every if not name.endswith((POSITIONS, TOKENS))]
        self.taps: tuple[Tap, ...] = tuple((site, int(layer)) for site, layer in names)

    def positions(self, tap: Tap) -> tuple[int, ...]:
        return tuple(self._file.get_tensor(f"{tap[0]}.{tap[1]}.{POSITIONS}").tolist())

    def read(self, tap: Tap, positions: tuple[int, ...]) -> tuple[Vector, ...]:
        name = f"{tap[0]}.{tap[1]}"
        rows: torch.Tensor = self._file.get_tensor(name)
        known = self._file.get_tensor(f"{name}.{POSITIONS}").tolist()
        if positions:
            row_of = {position: row for row, position in enumerate(known)}
            for position in positions:
                if position not in row_of:
                    more = ["…"] if len(known) > _SHOWN else []
                    has = ", ".join([*map(str, known[:_SHOWN]), *more])
                    raise SpecError(
                        "positions",
                        f"no row of {name} was captured at position {position}; there are {has}",
                    )
            rows = rows[[row_of[position] for position in positions]]
        if name in self._on_device:
            # Of these the file has the lengths; their handle keeps the rows themselves.
            places = zip(positions or known, rows[:, 0].tolist(), strict=True)
            return tuple(
                DeviceRow(self._source, tap, position, self._width, norm)
                for position, norm in places
            )
        self._budget.take(4 * rows.numel())
        return read_rows(rows.float(), MAX_ITEMS)


def _unknown(name: str) -> SpecError:
    return SpecError(
        "captured", f"there are no rows {show(name)}: they were deleted, or have expired"
    )
