"""Which cached blocks have which scores. Workers keep scores by the place of a token's KV, see
`runtime.worker.step.score_cache`, and sums of reduced rows at the end of a block, see `sum_cache`
there; the engine core knows what is there, and lets the cache serve a request the blocks that have
all that the request asks for.
"""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, Literal

from midstream.config.config import Config, from_additional_config
from midstream.runtime.core.sum_budget import SumBudget
from midstream.runtime.protocol.cache_keys import KeptScore
from midstream.runtime.protocol.request_payload import payload_of
from midstream.runtime.protocol.rpc import (
    RPC,
    BlankScores,
    DropScores,
    DropSums,
    KeepSums,
    RpcRequest,
    arguments_of,
)
from midstream.runtime.vllm.attributes import SCORE_NUMBERS, SCORED_BLOCKS, SCORES_FILLED
from midstream.runtime.vllm.kv_cache import KvBlocks, full_attention_blocks

# Host memory of a worker for kept scores, and the most scores that it keeps of a token.
MOST_BYTES, MOST_SCORES = 256 << 20, 256
# Arguments of `BlockPool.cache_full_blocks` after the request.
_PASSED = (
    "blocks", "num_cached_blocks", "num_full_blocks", "block_size", "kv_cache_group_id",
)  # fmt: skip
# (number of a score, tokens of the block that have it, as a bit for each), ascending.
Coverage = tuple[tuple[int, int], ...]


class ScoredBlocks:
    """Which scores cached blocks have. A score has a number from its first request until it is
    dropped; the same score gets another one afterwards, as the workers start with it anew.
    """

    def __init__(
        self,
        blocks: KvBlocks,
        tell: Callable[[RpcRequest[Any]], object],
        unscored: Literal["compute", "skip"] = "compute",
    ) -> None:
        """Create it; `tell` sends a message to the workers, and for `unscored` see the setting
        `unscored_tokens`.
        """
        self.group, self.size = blocks.group, blocks.size
        self._most = most_scores(blocks.tokens)
        self._tell = tell
        self._skips = unscored == "skip"
        self._numbers: OrderedDict[str, int] = OrderedDict()  # by key, the last used at the end
        self._next = 1
        self._kept: set[int] = set()  # those in `_numbers`
        self._coverage: dict[int, Coverage] = {}  # by id of a block
        # Blocks of equal content beside the one that vLLM finds, by its hash and by their ids.
        self._duplicates: dict[Any, set[int]] = {}
        self._hashes: dict[int, Any] = {}
        self._sums = SumBudget()
        self._keys_of_sums: dict[int, str] = {}  # by number, of those in `_numbers`
        self._remembered: set[int] = set()  # numbers of what gates remember
        # Blocks that are filled by steps which may not be run, with the numbers that they get.
        self._fresh: dict[int, frozenset[int]] = {}
        self._recent: set[str] = set()  # keys of the step that is being scheduled

    def __len__(self) -> int:
        return len(self._coverage)

    def numbers_of(self, request: Any, scores: Sequence[KeptScore]) -> tuple[int, ...]:
        """Return the numbers of a request's scores, the same ones as long as it runs."""
        numbers = SCORE_NUMBERS.get(request)
        if numbers is None:
            numbers = tuple([self._use(score) for score in scores])
            SCORE_NUMBERS.set(request, numbers)
            dropped = []
            # Those of requests of one step, the last ones, stay even if they are more: the workers
            # get this message before the step in which they serve them.
            while len(self._numbers) > max(self._most, len(self._recent)):
                key, number = self._numbers.popitem(last=False)
                self._kept.discard(number)
                self._remembered.discard(number)
                if self._keys_of_sums.pop(number, None) is not None:
                    self._sums.forget_key(key)
                dropped.append(key)
            if dropped:
                self._tell(DropScores(dropped))
        return numbers

    def _use(self, score: KeptScore) -> int:
        number = self._numbers.get(score.key)
        if number is None:
            number = self._numbers[score.key] = self._next
            self._kept.add(number)
            if score.nbytes:
                self._keys_of_sums[number] = score.key
            if score.memory:
                self._remembered.add(number)
            self._next += 1
        self._numbers.move_to_end(score.key)
        self._recent.add(score.key)
        return number

    def served(
        self, request: Any, scores: Sequence[KeptScore], pool: Any, hit: list[Any], length: int
    ) -> int:
        """Return up to where the blocks of a hit of `length` tokens have a request's scores. One
        that lacks any is replaced, in the list, by one of the same content that has them; if there
        is none, and unscored tokens are skipped, these have NaN from now on.
        """
        if not length:
            return 0
        numbers = self.numbers_of(request, scores)
        wanted = _Wanted(scores, numbers, self.size, self._kept)
        blank: dict[tuple[int, int], list[int]] = {}  # ids of blocks, by number and bits
        complete: Coverage | None = None  # of a block that has what most blocks are to have
        # A gate starts from what another request's has only once that is computed.
        fresh = self._fresh if wanted.remembers else {}
        for index, block in enumerate(hit[: -(-length // self.size)]):
            if fresh and block.block_id in fresh:
                length = index * self.size
                break
            coverage = self._coverage.get(block.block_id, ())
            if coverage is complete and index in wanted.inner:
                continue
            needs = wanted.of_block(index)
            if needs is None:
                length = index * self.size  # a score of it was dropped
                break
            if not needs:
                continue
            if not _has(coverage, needs):
                duplicate = self._duplicate(block, pool, needs)
                if duplicate is not None and duplicate.block_id not in fresh:
                    hit[index] = duplicate
                elif not self._skips or not self._can_skip(block, coverage, needs):
                    length = index * self.size
                    break
                else:
                    self._blank(block, needs, blank)
            elif index in wanted.inner:
                complete = coverage
        self._use_sums(scores, hit[: length // self.size])
        for (number, bits), ids in blank.items():
            tokens = [token for token in range(self.size) if bits >> token & 1]
            self._tell(BlankScores(scores[numbers.index(number)].key, ids, tokens))
        return length

    def _can_skip(self, block: Any, coverage: Coverage, needs: Coverage) -> bool:
        """Return whether NaN can stand for the scores that a block lacks: not for sums, nor for
        what gates remember, nor where a step that may not be run writes numbers of all its tokens.
        """
        states = self._remembered.union(
            self._keys_of_sums, self._fresh.get(block.block_id, frozenset())
        )
        return _has(coverage, tuple([pair for pair in needs if pair[0] in states]))

    def _use_sums(self, scores: Sequence[KeptScore], blocks: Sequence[Any]) -> None:
        """Note that a request gets sums of blocks; those of later ones are to be evicted first."""
        sums = {score.key: score.nbytes for score in scores if score.nbytes}
        if not sums:
            return
        for block in reversed(blocks):
            for number, _ in self._coverage.get(block.block_id, ()):
                key = self._keys_of_sums.get(number)
                if key in sums:
                    self._sums.use(key, block.block_id, sums[key])

    def _blank(self, block: Any, needs: Coverage, blank: dict[tuple[int, int], list[int]]) -> None:
        """Add a block's unscored tokens to `blank`, and count them as scored."""
        coverage = dict(self._coverage.get(block.block_id, ()))
        for number, bits in needs:
            if missing := bits & ~coverage.get(number, 0):
                blank.setdefault((number, missing), []).append(block.block_id)
                coverage[number] = coverage.get(number, 0) | bits
        self._coverage[block.block_id] = tuple(sorted(coverage.items()))

    def _duplicate(self, block: Any, pool: Any, needs: Coverage) -> Any | None:
        for number in self._duplicates.get(block.block_hash, ()):
            duplicate = pool.blocks[number]
            if duplicate.block_hash == block.block_hash and _has(self._coverage[number], needs):
                return duplicate
        return None

    def add(
        self,
        request: Any,
        scores: Sequence[KeptScore],
        pool: Any,
        blocks: Sequence[Any],
        first: int,
    ) -> None:
        """Note the scores of blocks that a request fills, from its block `first` on."""
        wanted = self._filled_by(request, scores)
        for index, block in enumerate(blocks, first):
            coverage = wanted.of_block(index)
            self._fresh[block.block_id] = wanted.numbers
            if coverage and wanted.sums:
                coverage = self._add_sums(wanted, coverage, block.block_id, index)
            if not coverage or block.block_hash is None:
                continue
            self._coverage[block.block_id] = coverage
            served = pool.get_cached_block(request.block_hashes[index], [self.group])
            if served and served[0] is not block:
                self._duplicates.setdefault(block.block_hash, set()).add(block.block_id)
                self._hashes[block.block_id] = block.block_hash
        for key, number in self._sums.evict():
            coverage = self._coverage.get(number, ())
            mine = self._numbers.get(key)
            self._coverage[number] = tuple([pair for pair in coverage if pair[0] != mine])

    def _add_sums(self, wanted: _Wanted, coverage: Coverage, block: int, index: int) -> Coverage:
        """Note the sums at a block's end; return what it has, but for those that end inside."""
        for number, score in wanted.sums:
            if number not in dict(coverage):
                continue
            if wanted.last_stop(score) < (index + 1) * self.size:
                coverage = tuple([pair for pair in coverage if pair[0] != number])
            else:
                self._sums.use(score.key, block, score.nbytes)
        return coverage

    def end_step(self) -> None:
        """Let the workers drop sums that no request gets. Call when no step is being scheduled, as
        one may have been promised what another's blocks take the room of.
        """
        self._fresh.clear()
        self._recent.clear()
        if dropped := self._sums.take_dropped():
            self._tell(DropSums(dropped))

    def _filled_by(self, request: Any, scores: Sequence[KeptScore]) -> _Wanted:
        """Return what the blocks that a request fills have; made once."""
        filled: _Wanted | None = SCORES_FILLED.get(request)
        if filled is None or filled.scores != scores:
            filled = _Wanted(scores, self.numbers_of(request, scores), self.size, None)
            SCORES_FILLED.set(request, filled)
        return filled

    def forget(self, blocks: Iterable[Any]) -> None:
        """Forget the scores of blocks that get other content."""
        if not self._coverage:
            return
        for block in blocks:
            coverage = self._coverage.pop(block.block_id, None)
            if coverage is None:
                continue
            for key in [self._keys_of_sums.get(number) for number, _ in coverage]:
                if key is not None:
                    self._sums.forget(key, block.block_id)
            known = self._hashes.pop(block.block_id, None)
            if known is not None:
                duplicates = self._duplicates[known]
                duplicates.discard(block.block_id)
                if not duplicates:
                    del self._duplicates[known]


class _Wanted:
    """What a request needs of its blocks; for most of them it is the same object."""

    def __init__(
        self,
        scores: Sequence[KeptScore],
        numbers: Sequence[int],
        size: int,
        kept: set[int] | None,
    ) -> None:
        """Create it; `kept`: the numbers that count; None: all do."""
        self.scores = scores
        self._scores = sorted(zip(numbers, scores, strict=True), key=itemgetter(0))
        self.remembers = any(score.memory for score in scores)
        self.numbers = frozenset(numbers)
        self.sums = [(number, score) for number, score in self._scores if score.nbytes]
        self._size = size
        self._kept = kept
        self._whole = tuple([(number, (1 << size) - 1) for number, _ in self._scores])
        # Blocks that are inside the last range of each score.
        last = [score.ranges[-1] for score in scores]
        end = min([stop // size for _, stop in last if stop is not None], default=sys.maxsize)
        self.inner = range(-(-max([start for start, _ in last]) // size), end)
        self._is_whole_kept = kept is None or kept.issuperset(numbers)

    @staticmethod
    def last_stop(sums: KeptScore) -> int:
        stop = sums.ranges[-1][1]
        assert stop is not None, "reduced rows are of the prompt"
        return stop

    def of_block(self, index: int) -> Coverage | None:
        """Return which scores are of which of a block's tokens; None: one of these was dropped."""
        if index in self.inner:
            return self._whole if self._is_whole_kept else None
        start, size = index * self._size, self._size
        coverage = []
        for number, score in self._scores:
            bits = 0
            for low, high in score.ranges:
                begin = max(low - start, 0)
                end = size if high is None else min(high - start, size)
                if begin < end:
                    bits |= (1 << end) - (1 << begin)
            if bits:
                if self._kept is not None and number not in self._kept:
                    return None
                coverage.append((number, bits))
        return tuple(coverage)


def _has(coverage: Coverage, needs: Coverage) -> bool:
    if coverage == needs:
        return True
    known = dict(coverage)
    return all(not bits & ~known.get(number, 0) for number, bits in needs)


def most_scores(tokens: int) -> int:
    """Return how many scores of each of so many tokens are kept."""
    return max(1, min(MOST_SCORES, MOST_BYTES // (4 * max(tokens, 1))))


def prepare(engine: Any) -> None:
    """Let an engine core note which blocks have scores. Call once."""
    manager = engine.scheduler.kv_cache_manager
    blocks = full_attention_blocks(manager.kv_cache_config)
    if blocks is None or not _is_simple(manager, blocks):
        return

    def tell(message: RpcRequest[Any]) -> None:
        arguments = arguments_of(message)
        engine.model_executor.collective_rpc(RPC, args=arguments, non_block=True)

    settings = from_additional_config(engine.vllm_config.additional_config) or Config()
    scored, pool = ScoredBlocks(blocks, tell, settings.unscored_tokens), manager.block_pool
    tell(KeepSums())
    SCORED_BLOCKS.set(pool, scored)
    # Of this pool alone: vLLM calls both for each block that a request fills.
    pool.cache_full_blocks = functools.partial(
        _cache_full_blocks, scored, pool, pool.cache_full_blocks
    )
    pool.get_new_blocks = functools.partial(_get_new_blocks, scored, pool.get_new_blocks)


def _is_simple(manager: Any, blocks: KvBlocks) -> bool:
    """Return whether a cached block is a block of the group, and a hit ends with a block."""
    coordinator, pool = manager.coordinator, manager.block_pool
    size = coordinator.single_type_managers[blocks.group].block_size
    return bool(
        pool.enable_caching
        and size == blocks.size == getattr(pool, "hash_block_size", size)
        and not getattr(coordinator, "enable_partial_hash_hits", False)
    )


def _cache_full_blocks(
    scored: ScoredBlocks,
    pool: Any,
    original: Callable[..., Any],
    request: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Note the scores of the blocks that vLLM caches, which their request asked for."""
    out = original(request, *args, **kwargs)
    payload = payload_of(request.sampling_params)
    if payload is None or not payload.keys.scores:
        return out
    passed = dict(zip(_PASSED, args, strict=False)) | kwargs
    if passed["kv_cache_group_id"] == scored.group:
        first = passed["num_cached_blocks"]
        blocks = passed["blocks"][first : passed["num_full_blocks"]]
        scored.add(request, payload.keys.scores, pool, blocks, first)
    return out


def update_from_output(
    original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any
) -> Any:
    """Note that what was scheduled so far comes before what is scheduled from now on."""
    scored: ScoredBlocks | None = SCORED_BLOCKS.get(scheduler.kv_cache_manager.block_pool)
    if scored is not None:
        scored.end_step()
    return original(scheduler, *args, **kwargs)


def _get_new_blocks(scored: ScoredBlocks, original: Callable[..., Any], num_blocks: int) -> Any:
    """Forget what the blocks had that a request gets for other tokens."""
    blocks = original(num_blocks)
    scored.forget(blocks)
    return blocks
