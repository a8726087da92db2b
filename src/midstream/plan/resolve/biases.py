"""Biases of a plan: which switch of a token each has, and where it may be."""

from __future__ import annotations

from dataclasses import replace

from midstream.errors import SpecError
from midstream.ops.layout import Op
from midstream.plan.heads import mask_of
from midstream.plan.instructions import Instruction
from midstream.plan.operations import Bias, Edit, Gate
from midstream.plan.positions.position_set import Where


def bias_of(edit: Edit) -> Bias | None:
    """Return the bias that an edit is, or that a gate has; None: there is none."""
    if isinstance(edit, Bias):
        return edit
    if not isinstance(edit, Gate) or not isinstance(edit.edit, Bias):
        return None
    if edit.probe.tap is None:
        raise SpecError(
            "probe",
            "missing `layer` and `site`: a gate of a bias reads a vector of the model, such as "
            'Reading(v, site="final_norm")',
        )
    return edit.edit


def check_sampled(where: Where, prompt_len: int) -> None:
    parts = (where.ranges, *(match.ranges for match in where.matches))
    first = min(start for ranges in parts for start, _ in ranges)
    if first < prompt_len - 1:
        raise SpecError(
            "positions",
            f"no token is sampled from position {first} of a prompt of {prompt_len} tokens, so it "
            'has no logits here; omit `positions`, or use "last_prompt" and "generated", or '
            'phase="generated"',
        )


def with_switch(steps: tuple[Instruction, ...], index: int, width: int) -> tuple[Instruction, ...]:
    """Return a bias's instructions for the nth switch of a token."""
    if index >= width:
        raise SpecError("", f"a request can have at most {width} biases in this model")
    return tuple(
        replace(step, write=(mask_of((index,), width),)) if step.op is Op.ADD else step
        for step in steps
    )
