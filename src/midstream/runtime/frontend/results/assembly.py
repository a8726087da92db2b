"""Puts together what the workers sent for one request: activations, scores and receipts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.codecs import parse_codec
from midstream.results.activations import Activations
from midstream.results.encoded_rows import Chunk, Rows
from midstream.results.probe_scores import Probes
from midstream.runtime.frontend.results.receipts import make_receipt
from midstream.runtime.protocol.results import (
    ResultBlock,
    WorkerAnswers,
    WorkerResult,
    split,
)
from midstream.runtime.protocol.runs import expand
from midstream.sites import Tap
from midstream.spec import ResolvedPlan

ATTRIBUTES = ("activations", "probes", "receipt")


def assemble(
    output: Any,
    plan: ResolvedPlan,
    answers: WorkerAnswers,
    dtype: str,
    before: Mapping[int, Sequence[ResultBlock]] = MappingProxyType({}),
) -> dict[int, list[ResultBlock]]:
    """Sets `activations`, `probes` and `receipt` on each completion of a finished output, and on
    the output itself where it has but one.

    Args:
        output: vLLM's RequestOutput.
        plan: what was asked for.
        answers: (header, data) from each worker.
        dtype: name of the rows' dtype.
        before: per completion, rows that came while it ran. Where those of a completion are bare,
            `activations` has the others only.

    Returns:
        Per completion, the rows that came now.
    """
    children = split(answers, len(output.outputs))
    hidden = answers[0].worker.hidden_size
    nothing = Rows(parse_codec(plan.codec), hidden, getattr(torch, dtype), (), ())
    came: dict[int, list[ResultBlock]] = {}
    for completion in output.outputs:
        tokens = tokens_of(output, completion, plan)
        parts = children.get(completion.index, [])
        blocks = [block for part in parts for block in part.blocks()] if plan.captures else []
        came[completion.index] = blocks
        earlier = before.get(completion.index, ())
        every = _activations(plan, [*earlier, *blocks], tokens, nothing)
        is_bare = any(block.is_bare for block in earlier)
        completion.activations = _activations(plan, blocks, tokens, nothing) if is_bare else every
        completion.probes = _probes(plan, parts, tokens)
        completion.receipt = make_receipt(
            output.request_id, plan, parts, completion, tokens, every, completion.probes
        )
    if len(output.outputs) == 1:
        for name in ATTRIBUTES:
            setattr(output, name, getattr(output.outputs[0], name))
    return came


def tokens_of(output: Any, completion: Any, plan: ResolvedPlan) -> list[int]:
    """The id of each row's token, prompt first; 0 where the prompt was embeddings."""
    tokens = [*(output.prompt_token_ids or [0] * plan.prompt_len), *completion.token_ids]
    # The last sampled token is never fed back.
    return tokens[: max(0, len(tokens) - 1)]


def _activations(
    plan: ResolvedPlan, blocks: Sequence[ResultBlock], tokens: list[int], nothing: Rows
) -> Activations | None:
    if not plan.captures:
        return None
    return activations_of(
        plan,
        blocks,
        lambda captures: expand(plan.ranges_of(captures, len(tokens), tokens)),
        tokens,
        nothing,
    )


def activations_of(
    plan: ResolvedPlan,
    blocks: Sequence[ResultBlock],
    wanted: Callable[[tuple[int, ...]], NDArray[np.int64]],
    tokens: Tensor | Sequence[int],
    nothing: Rows,
) -> Activations:
    """Those of some rows that a plan captures.

    Args:
        plan: what was asked for.
        blocks: the rows; of each position and tap at most one.
        wanted: the positions that some of the plan's captures ask for.
        tokens: the ids of the tokens from position 0 on.
        nothing: rows as they come, without any.
    """
    found: dict[Tap, _Group] = {}
    for captures, taps in plan.alike:
        asked = wanted(captures)
        for together, mine in _found_together(taps, blocks):
            there, chosen = _choose([block.positions for block in mine], asked)
            group = _Group(mine, torch.from_numpy(there), chosen)
            found.update(dict.fromkeys(together, group))
    groups = {tap: found[tap] for tap in plan.taps}
    positions = {tap: group.positions for tap, group in groups.items()}
    return Activations(_Gathered(groups, nothing), positions, tokens)


@dataclass(frozen=True, slots=True)
class _Group:
    """What taps have that were found at the same positions.

    Attributes:
        blocks: that have them.
        positions: int64 [rows], ascending.
        chosen: which of the blocks' rows these are; None: all of them as they are.
    """

    blocks: Sequence[ResultBlock]
    positions: Tensor
    chosen: Tensor | None


class _Gathered(Mapping[Tap, Rows]):
    """Each tap's rows, made when they are asked for: few callers ask for those of all layers."""

    def __init__(self, groups: dict[Tap, _Group], nothing: Rows) -> None:
        self._groups = groups
        self._nothing = nothing

    def __getitem__(self, tap: Tap) -> Rows:
        group, nothing = self._groups[tap], self._nothing
        chunks: list[Chunk] = []
        places: list[int] = []
        for block in group.blocks:
            chunks += block.chunks
            places += [block.taps.index(tap)] * len(block.chunks)
        return Rows(
            nothing.codec,
            nothing.hidden,
            nothing.dtype,
            tuple(chunks),
            tuple(places),
            group.chosen,
        )

    def __contains__(self, tap: object) -> bool:
        return tap in self._groups

    def __iter__(self) -> Iterator[Tap]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)


def _probes(plan: ResolvedPlan, parts: list[WorkerResult], tokens: Sequence[int]) -> Probes | None:
    """The named probes' scores; each pipeline stage knows those of its own layers."""
    scores: dict[str, Tensor] = {}
    positions: dict[str, Tensor] = {}
    for probe in plan.probes:
        if not probe.name:
            continue
        found = [
            entry
            for part in parts
            if (probe.site, probe.layer) in part.worker.taps
            for entry in part.scores()
        ]
        wanted = expand(probe.where.final(len(tokens), tokens))
        there, chosen = _choose([known for known, _ in found], wanted)
        columns = [values[:, probe.slot] for _, values in found]
        scores[probe.name] = _joined(columns, chosen, torch.zeros(0)).contiguous()
        positions[probe.name] = torch.from_numpy(there)
    if not scores:
        return None
    return Probes(scores, positions, torch.tensor(list(tokens), dtype=torch.int64))


def _joined(rows: list[Tensor], chosen: Tensor | None, nothing: Tensor) -> Tensor:
    every = nothing if not rows else rows[0] if len(rows) == 1 else torch.cat(rows)
    return every if chosen is None else every[chosen]


def _found_together(
    taps: Sequence[Tap], blocks: Sequence[ResultBlock]
) -> list[tuple[list[Tap], list[ResultBlock]]]:
    """The taps, those together that were found in the same blocks."""
    present = [set(block.taps) for block in blocks]
    if all(there.issuperset(taps) for there in present):
        return [(list(taps), list(blocks))]
    together: dict[tuple[int, ...], list[Tap]] = {}
    for tap in taps:
        key = tuple([nth for nth, there in enumerate(present) if tap in there])
        together.setdefault(key, []).append(tap)
    return [(each, [blocks[nth] for nth in found]) for found, each in together.items()]


def _choose(
    found: list[NDArray[np.int64]], wanted: NDArray[np.int64]
) -> tuple[NDArray[np.int64], Tensor | None]:
    """(the wanted positions that were found, ascending; their rows among those found, None: all
    of them as they are).
    """
    if not found:
        return np.zeros(0, np.int64), None
    if len(found) == 1 and np.array_equal(found[0], wanted):
        return found[0], None
    positions = np.concatenate(found)
    rising = np.argsort(positions, kind="stable")
    chosen = rising[np.isin(positions[rising], wanted)]
    if np.array_equal(chosen, np.arange(positions.size)):
        return positions, None
    return positions[chosen], torch.from_numpy(chosen)
