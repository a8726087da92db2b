"""Rows for a trainer from a running engine, without a disk in between."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from midstream.errors import BusyError, ReceiptError, ReceiptWarning, SpecError
from midstream.lab.fit.batches import encode_prompts
from midstream.lab.fit.prompts import is_chat
from midstream.lab.jobs.engine import Reply, VllmEngine
from midstream.lab.jobs.prompt_tokens import PromptTokens
from midstream.lab.jobs.records import Failed, Record
from midstream.plan import Capture, Plan
from midstream.plan.tap_lookup import find_taps
from midstream.runtime.frontend.request.prompt.message_spans import has_media
from midstream.sites import Tap
from midstream.store.dataset import check_exclude
from midstream.store.tokens import tap_key
from midstream.validation import at, kind, read_count, show

if TYPE_CHECKING:
    from midstream.api.llm import LLM


_RETRY_SECONDS = 1


@dataclass(frozen=True, slots=True)
class LiveWork:
    """What the engine does with each prompt; see `EngineWork`."""

    plan: Plan
    max_tokens: int
    chat: bool = False
    keep_prompts: bool = False
    record: bool = False


class LiveRows(IterableDataset[dict[str, Any]]):
    """Batches of the rows of prompts that an engine computes meanwhile.

    Iterate over it in the engine's thread, as `DataLoader(rows, batch_size=None)` does. A batch is
    a dict of tensors on the host, as that of `RowDataset` with `join`:

    - `values` [n, taps, width], or a dict of [n, width] by tap, `mlp_in.2`, if the taps differ in
      width;
    - `position`, `token_id` int64 [n].

    The engine is at most `buffer` tokens ahead of the trainer, or one prompt if that is longer. The
    order depends on the seed and the epoch, and not on which request ends first. What the engine
    raises reaches the trainer. When the iterator is closed or collected, its requests end.

    Attributes:
        taps: (site, layer) of the vectors of a token.
    """

    def __init__(
        self,
        llm: LLM,
        prompts: Iterable[Any],
        batch_size: int,
        *,
        join: Sequence[Tap | str],
        exclude: Literal["first"] | None = None,
        max_tokens: int = 1,
        shuffle: bool = True,
        buffer: int = 16384,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        """Args:
        llm: an engine that taps these sites and layers, and has no other requests meanwhile.
        prompts: texts, lists of token ids or of messages without images; read as they are needed.
            Each iteration begins anew, so a generator has one.
        batch_size: rows per batch.
        join: (site, layer) of the vectors of a token, or their names.
        exclude: "first" leaves out the first token of each prompt.
        max_tokens: number of tokens to generate per prompt, at temperature 0. With 1, only the
            prompt has rows.
        shuffle: whether batches are drawn at random from the rows that wait, at least half of
            `buffer`; otherwise rows are in the order of the prompts.
        buffer: rows that wait or are being computed, at least `batch_size`.
        seed: of the order.
        drop_last: whether the last batch is left out if it is smaller.

        Raises:
            SpecError: an argument is malformed, or the engine does not tap these.
        """
        self._llm, self._prompts = llm, prompts
        if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
            raise SpecError("prompts", f"expected a list of prompts, got {kind(prompts)}")
        self.taps, captures = _taps_of(llm, join)
        self._excludes_first = check_exclude(exclude)
        for name, value in (("shuffle", shuffle), ("drop_last", drop_last)):
            if not isinstance(value, bool):
                raise SpecError(name, f"expected `bool`, got {kind(value)}")
        with at("max_tokens"):
            self._work = LiveWork(Plan(captures=captures), read_count(max_tokens))
        with at("batch_size"):
            self._batch_size = read_count(batch_size)
        with at("buffer"):
            self._buffer = read_count(buffer, self._batch_size)
        with at("seed"):
            self._seed = read_count(seed, 0)
        self._shuffle, self._drop_last = shuffle, drop_last
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, from 0, whose order the next iteration has.

        Raises:
            SpecError: it is no such number.
        """
        with at("epoch"):
            self._epoch = read_count(epoch, 0)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if get_worker_info() is not None:
            raise SpecError("num_workers", "expected 0: the engine is in another process")
        return self._batches()

    def _batches(self) -> Iterator[dict[str, Any]]:
        least = max(self._batch_size, self._buffer // 2) if self._shuffle else self._batch_size
        pool = RowPool((self._seed, self._epoch) if self._shuffle else None)
        engine = VllmEngine(self._llm, self._work)
        try:
            for columns in self._in_order(engine, pool):
                pool.add(columns)
                while len(pool) >= least:
                    yield self._batch(pool.take(self._batch_size))
            while len(pool) >= (self._batch_size if self._drop_last else 1):
                yield self._batch(pool.take(self._batch_size))
        finally:
            engine.abort()

    def _in_order(self, engine: VllmEngine, pool: RowPool) -> Iterator[list[Tensor]]:
        """Yield the columns of each prompt, in the order of the prompts."""
        ready: dict[int, list[Tensor]] = {}
        sizes: dict[int, int] = {}  # of the prompts that were added, but not yielded
        prompts = self._encoded()
        coming = next(prompts, None)
        for line in itertools.count(1):
            while True:
                while coming and len(sizes) < engine.window:
                    size = len(coming[1]) + self._work.max_tokens - 1
                    if sizes and size + sum(sizes.values()) + len(pool) > self._buffer:
                        break
                    if len(sizes) == len(ready):
                        self._check_idle()
                    sizes[coming[0]] = size
                    _add(engine, *coming)
                    coming = next(prompts, None)
                if line in ready or not sizes:
                    break
                ready |= {reply.line: self._columns(reply) for reply in _replies(engine)}
            if line not in ready:
                return
            del sizes[line]
            yield ready.pop(line)

    def _check_idle(self) -> None:
        """Check that the engine has no requests of others, whose outputs would come here."""
        if self._llm.llm_engine.has_unfinished_requests():
            raise BusyError(
                "the engine has requests that are not of these rows; read one LiveRows at a time, "
                "and close its iterator before other calls",
                _RETRY_SECONDS,
            )

    def _encoded(self) -> Iterator[tuple[int, list[int]]]:
        """Yield each prompt's number, from 1, and its token ids."""
        for number, prompt in enumerate(self._prompts, 1):
            with _numbered(number):
                if is_chat(prompt) and has_media(prompt):
                    raise SpecError("", "images, audio and videos are unsupported here")
                (ids,) = encode_prompts("", [prompt], self._llm.get_tokenizer)
            yield number, ids

    def _columns(self, reply: Reply) -> list[Tensor]:
        """Return the vectors at each tap, positions and token ids of a prompt, [rows, …]."""
        rows = reply.activations
        first = int(self._excludes_first)
        columns = [*(rows[tap] for tap in self.taps), rows.positions, rows.token_ids]
        # Copies: the engine needs the memory of its rows.
        return [column[first:].clone() for column in columns]

    def _batch(self, columns: list[Tensor]) -> dict[str, Any]:
        *values, position, token_id = columns
        together: Any = dict(zip(map(tap_key, self.taps), values, strict=True))
        if len({value.shape[1] for value in values}) == 1:
            together = torch.stack(values, 1)
        return {"values": together, "position": position, "token_id": token_id}


class RowPool:
    """Rows that wait to be drawn: at random, or without a seed in their order."""

    def __init__(self, seed: tuple[int, int] | None) -> None:
        """Args: seed and epoch, which the order depends on."""
        self._random = None if seed is None else np.random.default_rng(seed)
        self._columns: list[Tensor] = []  # each [capacity, …]
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, columns: Sequence[Tensor]) -> None:
        """Copy rows, [n, …] of each column."""
        if not self._columns:
            self._columns = [torch.empty(0, *new.shape[1:], dtype=new.dtype) for new in columns]
        start, self._count = self._count, self._count + len(columns[0])
        capacity = len(self._columns[0])
        if self._count > capacity:
            more = max(self._count, 2 * capacity) - capacity
            self._columns = [torch.cat([old, old.new_empty(more, *old.shape[1:])])
                             for old in self._columns]  # fmt: skip
        for old, new in zip(self._columns, columns, strict=True):
            old[start : self._count] = new

    def take(self, count: int) -> list[Tensor]:
        """Remove rows and return them, fewer if there are no more."""
        count = min(count, self._count)
        left = self._count - count
        if self._random is None:
            chosen, rest = torch.arange(count), torch.arange(count, self._count)
            gaps = torch.arange(left)
        else:
            chosen = torch.from_numpy(self._random.permutation(self._count)[:count])
            # The rows behind those that are left fill the gaps.
            is_chosen = torch.zeros(self._count, dtype=torch.bool)
            is_chosen[chosen] = True
            gaps = is_chosen[:left].nonzero()[:, 0]
            rest = left + (~is_chosen[left:]).nonzero()[:, 0]
        taken = [column[chosen] for column in self._columns]
        for column in self._columns:
            column[gaps] = column[rest]
        self._count = left
        return taken


def _taps_of(llm: Any, join: object) -> tuple[tuple[Tap, ...], tuple[Capture, ...]]:
    """Return the taps of `join`, each with its capture."""
    if isinstance(join, str) or not isinstance(join, Sequence) or not join:
        got = show(join) if isinstance(join, str) else kind(join)
        raise SpecError("join", f'expected a list such as [("resid_post", 2)], got {got}')
    captures: dict[Tap, Capture] = {}
    for index, item in enumerate(join):
        with at(f"join[{index}]"):
            is_pair = isinstance(item, (tuple, list)) and len(item) == 2
            if not is_pair and not isinstance(item, str):
                raise SpecError("", f"expected a pair of site and layer, got {show(item)}")
            capture = Capture(item[1], item[0]) if is_pair else Capture(sites=item)
            taps = find_taps(capture.layers, capture.sites, llm.info.shape, "", "")
            if len(taps) != 1:
                raise SpecError("", f"expected one site and layer, got {show(item)}")
            if taps[0] in captures:
                raise SpecError("", f"{tap_key(taps[0])} is listed twice")
            captures[taps[0]] = capture
    return tuple(captures), tuple(captures.values())


def _add(engine: VllmEngine, number: int, ids: Sequence[int]) -> None:
    with _numbered(number):
        engine.add(Record(number, PromptTokens(tuple(ids))))


def _replies(engine: VllmEngine) -> Iterator[Reply]:
    # Its problems are raised here, so warnings of them would be duplicates.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReceiptWarning)
        replies = engine.step()
    for reply in replies:
        if isinstance(reply, Failed):
            raise ReceiptError(f"prompts[{reply.line - 1}]: {reply.reason}")
        yield reply


@contextmanager
def _numbered(number: int) -> Iterator[None]:
    """Name a prompt's index in errors of it."""
    try:
        yield
    except SpecError as error:
        raise type(error)(f"prompts[{number - 1}]", error.problem) from None
