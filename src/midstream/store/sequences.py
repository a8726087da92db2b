"""Whole completions of a store as sequences of tokens, padded or packed to a length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from midstream.errors import StoreError
from midstream.store.tokens import TokenPart, Tokens, TokenSegment

# Sequences that are packed together; they are next to each other in the store.
_TOGETHER = 1024
_Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sequences:
    """Runs of tokens of one completion each, in the order of the tokens."""

    starts: _Ints  # [n], the first token of each
    lengths: _Ints  # [n], at least 1
    prompts: _Ints  # [n], prompt tokens of its request
    skipped: int  # completions of which a token has no rows
    cut: int  # tokens beyond the length

    def __len__(self) -> int:
        return len(self.starts)


def whole_sequences(tokens: Tokens, length: int, split: bool) -> Sequences:
    """Return the completions whose rows are of consecutive tokens, at all taps.

    Those of more than `length` tokens are cut off, or with `split` divided.

    Raises:
        StoreError: there is none.
    """
    columns: list[tuple[_Ints, _Ints, _Ints]] = [(np.empty(0, np.int64),) * 3]
    skipped = set(tokens.partial)
    for segment, end in zip(tokens.segments, tokens.ends.tolist(), strict=True):
        requests, starts, lengths = _runs(segment)
        name = segment.shard.name
        partial = [request for shard, request in tokens.partial if shard == name]
        whole = _are_whole(segment, starts, lengths) & ~np.isin(requests, partial)
        skipped.update((name, request) for request in requests[~whole].tolist())
        prompts = np.array([line.prompt_tokens for line in segment.shard.lines], np.int64)
        starts = starts + (end - len(segment))
        columns.append((starts[whole], lengths[whole], prompts[requests[whole]]))
    starts, lengths, prompts = (np.concatenate(column) for column in zip(*columns, strict=True))
    if not len(starts) and skipped:
        raise StoreError(
            f"selection: none of {len(skipped)} completions has rows of consecutive tokens at all "
            "taps; capture them with positions='all'"
        )
    cut = 0
    if split:
        pieces = -(-lengths // length)
        offsets = length * (np.arange(pieces.sum()) - np.repeat(pieces.cumsum() - pieces, pieces))
        starts, prompts = np.repeat(starts, pieces) + offsets, np.repeat(prompts, pieces)
        lengths = np.repeat(lengths, pieces) - offsets
    else:
        cut = int(np.maximum(lengths - length, 0).sum())
    return Sequences(starts, np.minimum(lengths, length), prompts, len(skipped), cut)


def pack(lengths: _Ints, length: int) -> list[_Ints]:
    """Divide sequences into rows of at most `length` tokens; return the sequences of each row.

    First fit decreasing, among 1024 neighbours at a time.
    """
    rows: list[_Ints] = []
    for low in range(0, len(lengths), _TOGETHER):
        part = lengths[low : low + _TOGETHER]
        left = np.full(len(part), length)
        members: list[list[int]] = []
        for number in np.argsort(-part, kind="stable").tolist():
            size = part[number]
            row = int(np.argmax(left >= size))
            left[row] -= size
            if row == len(members):
                members.append([])
            members[row].append(low + number)
        rows.extend(np.sort(np.array(row, np.int64)) for row in members)
    return rows


def place(
    tokens: Tokens, sequences: Sequences, rows: Sequence[_Ints], length: int
) -> tuple[list[TokenPart], list[int]]:
    """Return where the tokens of rows of `length` tokens are, given the sequences of each row.

    Returns:
        A part per sequence, whose `where` is a slice of the flattened rows; and its sequence.
    """
    parts, numbers = [], []
    for row, members in enumerate(rows):
        first = row * length
        for number in members.tolist():
            start, count = int(sequences.starts[number]), int(sequences.lengths[number])
            which = int(np.searchsorted(tokens.ends, start, side="right"))
            segment = tokens.segments[which]
            own = start - (int(tokens.ends[which]) - len(segment))
            parts.append(
                TokenPart(segment, np.arange(own, own + count), slice(first, first + count))
            )
            numbers.append(number)
            first += count
    return parts, numbers


def padding(parts: Sequence[TokenPart], size: int) -> Iterator[slice]:
    """Yield the places in [0, size) that are in no part."""
    end = 0
    for part in parts:
        assert isinstance(part.where, slice)
        if part.where.start > end:
            yield slice(end, part.where.start)
        end = part.where.stop
    if end < size:
        yield slice(end, size)


def _runs(segment: TokenSegment) -> tuple[_Ints, _Ints, _Ints]:
    """Return request, start and length of each completion's tokens in a segment."""
    requests = segment.column("request")
    starts = np.flatnonzero(np.diff(requests, prepend=-1))
    return requests[starts], starts, np.diff(starts, append=len(requests))


def _are_whole(segment: TokenSegment, starts: _Ints, lengths: _Ints) -> NDArray[np.bool_]:
    """Return bool [completions]: whether the positions of its tokens are consecutive."""
    positions = segment.column("position")
    is_gap = np.diff(positions, prepend=0) != 1
    is_gap[starts] = False
    gaps = np.concatenate([[0], is_gap.cumsum()])
    whole: NDArray[np.bool_] = gaps[starts + lengths] == gaps[starts]
    return whole
