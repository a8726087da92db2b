"""The vector bank: each distinct vector once on the device, for as long as somebody uses it."""

from __future__ import annotations

import torch
from torch import Tensor

from midstream.errors import SpecError
from midstream.runtime.buffers import upload
from midstream.spec import Vector


class VectorBank:
    """Rows of a [V, H] float32 device tensor, shared by content and counted by use."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self._free = list(range(rows.shape[0] - 1, -1, -1))
        self._row_of: dict[str, int] = {}
        self._users: dict[str, int] = {}

    def acquire(self, vector: Vector) -> int:
        """The row that holds `vector`, uploaded if nobody uses it yet. Pair with `release`.

        Raises:
            SpecError: every row is in use.
        """
        digest = vector.digest
        row = self._row_of.get(digest)
        if row is None:
            if not self._free:
                raise SpecError(
                    "",
                    f"all {self._rows.shape[0]} rows of the vector bank are in use by running "
                    "requests; raise the setting `bank_rows`, or run fewer vectors at once",
                )
            row = self._free.pop()
            values = torch.frombuffer(bytearray(vector.data), dtype=torch.float32)
            upload(self._rows[row], values)
            self._row_of[digest] = row
            self._users[digest] = 0
        self._users[digest] += 1
        return row

    def release(self, digest: str) -> None:
        """Ends one use. The row is free once nobody uses it.

        Forwards already queued still see the old contents: whatever is written to the row later
        is queued behind them.
        """
        self._users[digest] -= 1
        if self._users[digest] == 0:
            del self._users[digest]
            self._free.append(self._row_of.pop(digest))

    @property
    def used(self) -> int:
        """Rows in use."""
        return len(self._row_of)
