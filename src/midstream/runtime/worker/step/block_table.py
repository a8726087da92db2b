"""The KV blocks of the requests whose scores or sums are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from midstream.runtime.protocol.runs import Ints
from midstream.runtime.vllm.kv_cache import KvBlocks
from midstream.runtime.worker.step.position_states import grow


class BlockTable:
    """Blocks of full attention by slot, in the order of positions."""

    def __init__(self, blocks: Callable[[], KvBlocks | None], max_model_len: int) -> None:
        """Create it; `blocks` is called once, when the KV cache is there."""
        self._find_blocks = blocks
        self._max_model_len = max_model_len
        self._blocks: KvBlocks | None = None
        self._table = np.zeros((0, 0), np.int64)  # blocks of each slot
        self._known = np.zeros(0, np.int64)  # number of these

    @property
    def kv(self) -> KvBlocks | None:
        """The blocks that there are; None: the model has none of full attention."""
        if self._blocks is None:
            self._blocks = self._find_blocks()
        return self._blocks

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        assert self.kv is not None
        return self.kv.size

    def grow(self, slots: int) -> None:
        """Make room for more slots."""
        if not self._table.size:
            self._table = np.zeros((0, -(-self._max_model_len // self.block_size) + 1), np.int64)
        self._table, self._known = grow(self._table, slots), grow(self._known, slots)

    def begin(self, slot: int, blocks: Sequence[Sequence[int]]) -> None:
        """Set the blocks, by group, of a request."""
        self._known[slot] = 0
        self.extend(slot, blocks)

    def extend(self, slot: int, blocks: Sequence[Sequence[int]]) -> int:
        """Note more blocks, by group, of a request; return the first position in them."""
        assert self.kv is not None
        mine = blocks[self.kv.group]
        begin = int(self._known[slot])
        end = min(begin + len(mine), self._table.shape[1])
        self._table[slot, begin:end] = mine[: end - begin]
        self._known[slot] = end
        return begin * self.block_size

    def blocks_from(self, slot: int, position: int) -> list[int]:
        """Return the blocks that a request has of its positions from one on."""
        first = position // self.block_size
        blocks: list[int] = self._table[slot, first : self._known[slot]].tolist()
        return blocks

    def blocks_at(self, slot: int, index: Ints) -> Ints:
        """Return some of a request's blocks, by their indices."""
        blocks: Ints = self._table[slot, index]
        return blocks

    def places(self, slot: Ints, position: Ints) -> Ints:
        """Return where the KV of tokens is."""
        size = self.block_size
        # Draft tokens beyond the last position have no block.
        index = position // size
        block = self._table[slot, np.minimum(index, self._table.shape[1] - 1)]
        places: Ints = block * size + (position - index * size)
        return places
