"""Puts together what the workers sent for one request: activations and receipts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.activations import Activations
from midstream.receipt import Captured, Edited, Receipt
from midstream.runtime.requests import APPLIED_0, UNSEEN
from midstream.sites import BY_NAME
from midstream.spec import ResolvedPlan

Tap = tuple[str, int]
Answers = list[tuple[dict[str, Any], bytes]]


def assemble(output: Any, plan: ResolvedPlan, answers: Answers, dtype: str) -> None:
    """Sets `activations` and `receipt` on each completion of a finished output, and on the output
    itself where it has but one.

    Args:
        output: vLLM's RequestOutput.
        plan: what was asked for.
        answers: (header, data) from each worker.
        dtype: name of the rows' dtype.
    """
    prompt = list(output.prompt_token_ids or [0] * plan.prompt_len)
    children = _by_child(answers, len(output.outputs))
    # As wide and of the dtype of rows, for taps of which there are none.
    nothing = torch.zeros(0, answers[0][0]["worker"]["hidden_size"], dtype=getattr(torch, dtype))
    for completion in output.outputs:
        tokens = [*prompt, *completion.token_ids][
            : max(0, len(prompt) + len(completion.token_ids) - 1)
        ]
        parts = children.get(completion.index, [])
        completion.activations = _activations(plan, parts, tokens, nothing)
        completion.receipt = _receipt(
            output.request_id, plan, parts, completion, len(tokens), completion.activations
        )
    if len(output.outputs) == 1:
        output.activations = output.outputs[0].activations
        output.receipt = output.outputs[0].receipt


class _Part:
    """One worker's share of one completion."""

    def __init__(self, worker: dict[str, Any], entry: dict[str, Any], data: memoryview) -> None:
        self.worker = worker
        self.problem: str = entry["problem"]
        size = entry["done"] * 2
        self.done: NDArray[np.uint16] = np.frombuffer(data[:size], np.uint16)
        self.blocks: list[tuple[dict[str, Any], memoryview]] = []
        for block in entry["blocks"]:
            self.blocks.append((block, data[size : size + block["nbytes"]]))
            size += block["nbytes"]
        self.size = size


def _by_child(answers: Answers, num_completions: int) -> dict[int, list[_Part]]:
    """Each completion's parts. With several completions vLLM runs each as a request of its own,
    whose id begins with its index and an underscore.
    """
    children: dict[int, list[_Part]] = {}
    for header, data in answers:
        view, offset = memoryview(data), 0
        for entry in header["requests"]:
            part = _Part(header["worker"], entry, view[offset:])
            offset += part.size
            index = 0 if num_completions == 1 else int(entry["id"].split("_", 1)[0])
            children.setdefault(index, []).append(part)
    return children


class _Block(NamedTuple):
    """Rows of some taps at the same positions: [positions, taps, hidden]."""

    taps: list[Tap]
    positions: NDArray[np.int64]
    values: Tensor


def _activations(
    plan: ResolvedPlan, parts: list[_Part], tokens: list[int], nothing: Tensor
) -> Activations | None:
    if not plan.captures:
        return None
    blocks = [
        _read_block(header, data, nothing.dtype) for part in parts for header, data in part.blocks
    ]
    values: dict[Tap, Tensor] = {}
    positions: dict[Tap, Tensor] = {}
    for taps, found in _alike(plan, blocks):
        wanted = _expand(plan.capture_ranges(*taps[0], len(tokens)))
        there, chosen = _choose(found, wanted)
        shared = torch.from_numpy(there)
        for tap in taps:
            rows = [block.values[:, block.taps.index(tap)] for block in found]
            every = nothing if not rows else rows[0] if len(rows) == 1 else torch.cat(rows)
            values[tap] = every if chosen is None else every[chosen]
            positions[tap] = shared
    ordered = sorted(values, key=_order)
    return Activations(
        {tap: values[tap] for tap in ordered},
        {tap: positions[tap] for tap in ordered},
        torch.tensor(tokens, dtype=torch.int64),
    )


def _read_block(header: dict[str, Any], data: memoryview, dtype: torch.dtype) -> _Block:
    positions = _expand((first, first + length) for first, length in header["runs"])
    # A writable copy: tensors over read-only memory are a trap for whoever writes to them.
    flat = torch.frombuffer(bytearray(data), dtype=dtype)
    taps = [(site, layer) for site, layer in header["taps"]]
    return _Block(taps, positions, flat.view(positions.size, len(taps), -1))


def _alike(plan: ResolvedPlan, blocks: list[_Block]) -> list[tuple[list[Tap], list[_Block]]]:
    """The plan's taps, those together that are asked for and were found at the same positions."""
    captures: dict[Tap, list[int]] = {}
    for index, capture in enumerate(plan.captures):
        for tap in capture.taps:
            captures.setdefault(tap, []).append(index)
    places: dict[Tap, list[int]] = {}
    for index, block in enumerate(blocks):
        for tap in block.taps:
            places.setdefault(tap, []).append(index)
    alike: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Tap]] = {}
    for tap, indices in captures.items():
        key = (tuple(indices), tuple(places.get(tap, ())))
        alike.setdefault(key, []).append(tap)
    return [(taps, [blocks[nth] for nth in found]) for (_, found), taps in alike.items()]


def _choose(
    found: list[_Block], wanted: NDArray[np.int64]
) -> tuple[NDArray[np.int64], Tensor | None]:
    """(the wanted positions that were found, ascending; their rows among those found, None: all
    of them as they are).
    """
    if not found:
        return np.zeros(0, np.int64), None
    positions = np.concatenate([block.positions for block in found])
    order = np.argsort(positions, kind="stable")
    chosen = order[np.isin(positions[order], wanted)]
    if np.array_equal(chosen, np.arange(positions.size)):
        return positions, None
    return positions[chosen], torch.from_numpy(chosen)


def _expand(ranges: Iterable[tuple[int, int]]) -> NDArray[np.int64]:
    """The positions in [start, stop) ranges."""
    runs = [np.arange(start, stop) for start, stop in ranges]
    return np.concatenate(runs) if runs else np.zeros(0, np.int64)


def _order(tap: Tap) -> tuple[int, int]:
    """Taps in the order in which a forward reaches them."""
    return tap[1], BY_NAME[tap[0]].order


def _receipt(
    request_id: str,
    plan: ResolvedPlan,
    parts: list[_Part],
    completion: Any,
    length: int,
    activations: Activations | None,
) -> Receipt:
    problems = [
        f"{part.problem} (worker {part.worker['stage']}.{part.worker['tensor_rank']})"
        for part in parts
        if part.problem
    ]
    if not parts:
        problems.append("the workers know nothing of it")
    captured = []
    for tap, expected in sorted(
        plan.expected_rows(length).items(), key=lambda item: _order(item[0])
    ):
        actual = 0 if activations is None else len(activations.positions_of(*tap))
        captured.append(Captured(*tap, expected, actual))
        if actual != expected:
            problems.append(f"{tap[0]} of layer {tap[1]}: {actual} rows came, expected {expected}")
    edited = None
    if plan.edits:
        edited, wrong = _edited(plan, parts, length)
        problems += wrong
    return Receipt(
        request_id=request_id,
        prompt_tokens=plan.prompt_len,
        generated_tokens=len(completion.token_ids),
        captured=tuple(captured),
        edited=edited,
        problems=tuple(problems),
    )


def _edited(plan: ResolvedPlan, parts: list[_Part], length: int) -> tuple[Edited, list[str]]:
    """Counts edits position by position, over the pipeline's stages."""
    expected = np.zeros(length, np.int64)
    for edit in plan.edits:
        for start, stop in edit.ranges:
            expected[start:stop] += 1
    applied = np.zeros(length, np.int64)
    for part in parts:
        if part.worker["tensor_rank"] == 0:
            known = part.done[:length].astype(np.int64)
            applied[: known.size] += np.where(known == UNSEEN, 0, known - APPLIED_0)
    problems = []
    wrong = np.flatnonzero(applied != expected)
    if wrong.size:
        first = int(wrong[0])
        problems.append(
            f"{wrong.size} positions were not edited as asked: position {first} got "
            f"{applied[first]} edits, expected {expected[first]}"
        )
    counts = Edited(
        expected=int(expected.sum()),
        applied=int(applied.sum()),
        tokens=int((expected > 0).sum()),
    )
    return counts, problems
