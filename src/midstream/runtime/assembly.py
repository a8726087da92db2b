"""Puts together what the workers sent for one request: activations and receipts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.activations import Activations
from midstream.receipt import Captured, Edited, Receipt
from midstream.runtime.requests import APPLIED_0, REUSED, UNSEEN
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
    for completion in output.outputs:
        tokens = [*prompt, *completion.token_ids][
            : max(0, len(prompt) + len(completion.token_ids) - 1)
        ]
        parts = children.get(completion.index, [])
        completion.activations = _activations(plan, parts, tokens, dtype)
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


def _activations(
    plan: ResolvedPlan, parts: list[_Part], tokens: list[int], dtype: str
) -> Activations | None:
    if not plan.captures:
        return None
    found: dict[Tap, list[tuple[NDArray[np.int64], Tensor]]] = {}
    for part in parts:
        for block, data in part.blocks:
            runs = [np.arange(first, first + length) for first, length in block["runs"]]
            positions = np.concatenate(runs)
            values = _tensor(data, dtype, positions.size, len(block["taps"]))
            for place, (site, layer) in enumerate(block["taps"]):
                found.setdefault((site, layer), []).append((positions, values[:, place]))
    values_of: dict[Tap, Tensor] = {}
    positions_of: dict[Tap, Tensor] = {}
    for tap in sorted({tap for capture in plan.captures for tap in capture.taps}, key=_order):
        wanted = np.asarray(plan.capture_positions(*tap, len(tokens)), np.int64)
        positions, values = _select(found.get(tap, []), wanted)
        values_of[tap], positions_of[tap] = values, torch.from_numpy(positions)
    return Activations(values_of, positions_of, torch.tensor(tokens, dtype=torch.int64))


def _order(tap: Tap) -> tuple[int, str]:
    return tap[1], tap[0]


def _tensor(data: memoryview, dtype: str, rows: int, width: int) -> Tensor:
    # A writable copy: tensors over read-only memory are a trap for whoever writes to them.
    flat = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))
    return flat.view(rows, width, -1)


def _select(
    found: list[tuple[NDArray[np.int64], Tensor]], wanted: NDArray[np.int64]
) -> tuple[NDArray[np.int64], Tensor]:
    """The wanted positions that were found, ascending, and their rows."""
    if not found:
        return np.zeros(0, np.int64), torch.zeros(0, 0)
    positions = np.concatenate([one for one, _ in found])
    values = found[0][1] if len(found) == 1 else torch.cat([rows for _, rows in found])
    order = np.argsort(positions, kind="stable")
    chosen = order[np.isin(positions[order], wanted)]
    if chosen.size == positions.size and (chosen == np.arange(chosen.size)).all():
        return positions, values
    return positions[chosen], values[torch.from_numpy(chosen)]


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
    reused = np.ones(length, bool)
    for part in parts:
        if part.worker["tensor_rank"] != 0:
            continue
        states = np.zeros(length, np.int64)
        known = part.done[:length]
        states[: known.size] = known
        reused &= states == REUSED
        applied += np.where((states == REUSED) | (states == UNSEEN), 0, states - APPLIED_0)
    problems = []
    wrong = np.flatnonzero((applied != expected) & ~reused)
    if wrong.size:
        first = int(wrong[0])
        problems.append(
            f"{wrong.size} positions were not edited as asked: position {first} got "
            f"{applied[first]} edits, expected {expected[first]}"
        )
    counts = Edited(
        expected=int(expected.sum()),
        applied=int(applied.sum()),
        reused=int(expected[reused].sum()),
        tokens=int((expected > 0).sum()),
    )
    return counts, problems
