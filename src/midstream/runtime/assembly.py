"""Puts together what the workers sent for one request: activations, scores and receipts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.activations import Activations
from midstream.codecs import parse_codec
from midstream.rows import Rows
from midstream.runtime.accounts import make_receipt
from midstream.runtime.parts import Answers, Block, Part, expand, split
from midstream.scores import Probes
from midstream.spec import ResolvedPlan
from midstream.spec.tapping import order

Tap = tuple[str, int]
ATTRIBUTES = ("activations", "probes", "receipt")


def assemble(
    output: Any,
    plan: ResolvedPlan,
    answers: Answers,
    dtype: str,
    before: Mapping[int, Sequence[Block]] = MappingProxyType({}),
) -> dict[int, list[Block]]:
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
    hidden = answers[0][0]["worker"]["hidden_size"]
    nothing = Rows(parse_codec(plan.codec), hidden, getattr(torch, dtype), (), ())
    came: dict[int, list[Block]] = {}
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
    plan: ResolvedPlan, blocks: Sequence[Block], tokens: list[int], nothing: Rows
) -> Activations | None:
    if not plan.captures:
        return None
    return activations_of(
        plan,
        blocks,
        lambda tap: expand(plan.capture_ranges(tap, len(tokens), tokens)),
        torch.tensor(tokens, dtype=torch.int64),
        nothing,
    )


def activations_of(
    plan: ResolvedPlan,
    blocks: Sequence[Block],
    wanted: Callable[[Tap], NDArray[np.int64]],
    tokens: Tensor,
    nothing: Rows,
) -> Activations:
    """Those of some rows that a plan captures.

    Args:
        plan: what was asked for.
        blocks: the rows; of each position and tap at most one.
        wanted: the positions that are asked for at a tap.
        tokens: int64, the ids of the tokens from position 0 on.
        nothing: rows as they come, without any.
    """
    values: dict[Tap, Rows] = {}
    positions: dict[Tap, Tensor] = {}
    for taps, found in _alike(plan, blocks):
        there, chosen = _choose([block.positions for block in found], wanted(taps[0]))
        shared = torch.from_numpy(there)
        chunks = tuple(chunk for block in found for chunk in block.chunks)
        index = [{tap: nth for nth, tap in enumerate(block.taps)} for block in found]
        for tap in taps:
            places = tuple(
                place
                for block, known in zip(found, index, strict=True)
                for place in [known[tap]] * len(block.chunks)
            )
            values[tap] = Rows(nothing.codec, nothing.hidden, nothing.dtype, chunks, places, chosen)
            positions[tap] = shared
    ordered = sorted(values, key=order)
    return Activations(
        {tap: values[tap] for tap in ordered}, {tap: positions[tap] for tap in ordered}, tokens
    )


def _probes(plan: ResolvedPlan, parts: list[Part], tokens: Sequence[int]) -> Probes | None:
    """The named probes' scores; each pipeline stage knows those of its own layers."""
    scores: dict[str, Tensor] = {}
    positions: dict[str, Tensor] = {}
    for probe in plan.probes:
        if not probe.name:
            continue
        found = [
            entry
            for part in parts
            if [probe.site, probe.layer] in part.worker["taps"]
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


def _alike(plan: ResolvedPlan, blocks: Sequence[Block]) -> list[tuple[list[Tap], list[Block]]]:
    """The plan's taps, those together that are asked for and were found at the same positions."""
    places: dict[Tap, list[int]] = {}
    for index, block in enumerate(blocks):
        for tap in block.taps:
            places.setdefault(tap, []).append(index)
    alike: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Tap]] = {}
    for tap, indices in plan.captures_by_tap().items():
        key = (indices, tuple(places.get(tap, ())))
        alike.setdefault(key, []).append(tap)
    return [(taps, [blocks[nth] for nth in found]) for (_, found), taps in alike.items()]


def _choose(
    found: list[NDArray[np.int64]], wanted: NDArray[np.int64]
) -> tuple[NDArray[np.int64], Tensor | None]:
    """(the wanted positions that were found, ascending; their rows among those found, None: all
    of them as they are).
    """
    if not found:
        return np.zeros(0, np.int64), None
    positions = np.concatenate(found)
    rising = np.argsort(positions, kind="stable")
    chosen = rising[np.isin(positions[rising], wanted)]
    if np.array_equal(chosen, np.arange(positions.size)):
        return positions, None
    return positions[chosen], torch.from_numpy(chosen)
