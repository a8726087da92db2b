"""What a worker holds for the front end to fetch: finished requests' rows and what was done.

The data of one uid is one run of bytes: for each of its requests the states of its positions
(uint16 each), then its blocks, then its scores. A block holds the rows of one set of taps,
[positions, taps, hidden] in the model's dtype, scores are [positions, slots] float32, both in the
order of the positions. The header says how to cut it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from midstream.errors import FetchError
from midstream.runtime.buffers import Tap
from midstream.runtime.requests import Request

INLINE_BYTES = 4 << 20
INLINE_TOTAL = 32 << 20


class Outbox:
    """Owner of the data between `put` and `release`."""

    def __init__(self, taps: list[Tap]) -> None:
        self._taps = taps
        self._data: dict[str, bytes] = {}
        self._inlined: set[str] = set()  # of the latest `inline`

    def put(self, uid: str, requests: list[Request], with_rows: bool) -> dict[str, Any]:
        """Takes in the finished requests of a uid; returns their header."""
        parts: list[bytes] = []
        entries = []
        for request in requests:
            blocks = []
            scores = []
            parts.append(request.done.tobytes())
            if with_rows:
                for block in request.blocks:
                    parts.append(_bytes(block.values))
                    blocks.append(
                        {
                            "taps": [list(self._taps[tap]) for tap in block.taps],
                            "runs": runs_of(block.positions),
                            "nbytes": len(parts[-1]),
                        }
                    )
                for block in request.scores:
                    parts.append(_bytes(block.values[:, 0, : request.plan.slots]))
                    scores.append({"runs": runs_of(block.positions), "nbytes": len(parts[-1])})
            entries.append(
                {
                    "id": request.id,
                    "problem": request.problem,
                    "prompt": request.prompt,
                    "turns": request.turns,
                    "done": int(request.done.size),
                    "blocks": blocks,
                    "scores": scores,
                }
            )
        self._data[uid] = b"".join(parts)
        return {"uid": uid, "requests": entries, "nbytes": len(self._data[uid])}

    def inline(self, uids: list[str]) -> list[bytes | None]:
        """The data of those uids that are small enough to come with the header; None: read it."""
        found: list[bytes | None] = []
        total = 0
        self._inlined.clear()
        for uid in uids:
            size = len(self._data[uid])
            if size <= INLINE_BYTES and total + size <= INLINE_TOTAL:
                total += size
                self._inlined.add(uid)
                found.append(self._data.pop(uid))
            else:
                found.append(None)
        return found

    def read(self, uid: str, offset: int, size: int) -> bytes:
        """A piece of a uid's data; nothing where all of it came with the header.

        Every worker is asked, also where only another one's data was too large for its header.

        Raises:
            FetchError: nothing is held for that uid.
        """
        data = b"" if uid in self._inlined else self._data.get(uid)
        if data is None:
            raise FetchError(f"nothing is held for {uid}")
        return data[offset : offset + size]

    def release(self, uid: str) -> None:
        """Forgets a uid's data, if there is any."""
        self._data.pop(uid, None)
        self._inlined.discard(uid)


def runs_of(positions: np.ndarray[Any, np.dtype[np.int64]]) -> list[list[int]]:
    """Sorted positions as [first, length] runs."""
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    return [[int(run[0]), int(run.size)] for run in np.split(positions, breaks) if run.size]


def _bytes(values: Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()
