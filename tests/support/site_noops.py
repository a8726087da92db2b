"""Programs without a net effect, which must leave every bit unchanged."""

from typing import Any

import torch

from midstream.ops.layout import Flags, Op
from support.site_cases import Case, Step, case, matrix_row

BOTH = Flags.FRESH | Flags.COUNTED
KEEP = BOTH | Flags.KEEP
_SHUT = Step(Op.GATE, read=3, b=1e9, c=1.0, flags=Flags.FRESH)
_STEP = Step(Op.GATE, read=3, b=1e9, flags=Flags.FRESH | Flags.STEP)

NOOPS: dict[str, list[Step]] = {
    "no instruction": [],
    "a scale of zero": [Step(Op.ADD, write=1)],
    "a scale of zero, norm kept": [Step(Op.ADD, write=1, flags=KEEP)],
    "matched by zero": [Step(Op.ADD_MATCHED, write=1)],
    "+v and then -v": [Step(Op.ADD, write=1, a=0.3), Step(Op.ADD, write=1, a=-0.3)],
    "+v and then -v, h read between": [
        Step(Op.ADD, write=1, a=0.3),
        Step(Op.PROBE, read=2, slot=1),
        Step(Op.ADD, write=1, a=-0.3, flags=Flags.COUNTED),
    ],
    "a wide clip": [Step(Op.CLIP, read=1, write=1, a=-1e9, b=1e9, c=0.1, flags=KEEP)],
    "a linear map of nothing": [Step(Op.LINEAR, read=1, write=1, b=2.0)],
    "a feature that is not active": [Step(Op.FEATURE, read=1, write=2, a=0.1, b=1e9, c=3.0)],
    "replaced by zero parts": [Step(Op.REPLACE, write=1), Step(Op.REPLACE, write=2, flags=KEEP)],
    "scaled by one": [Step(Op.SCALE, a=1.0), Step(Op.SCALE, a=1.0, flags=KEEP)],
    "a shut gate": [
        _SHUT,
        *(
            Step(op, read=1, write=1, a=2.0, b=3.0, c=4.0, d=5.0, flags=flags | Flags.GATED)
            for op in Op
            if op < Op.MAP
            for flags in (BOTH, KEEP)
        ),
    ],
    "a shut step": [_STEP, Step(Op.SCALE, a=0.0, flags=KEEP | Flags.GATED)],
    "a shut gate on what is infinite": [
        _SHUT,
        Step(Op.FEATURE, read=1, write=1, c=3e38, d=3e38, b=-9e9, flags=BOTH | Flags.GATED),
    ],
    "no such token": [Step(Op.SCALE, a=0.0, ids=(77,), flags=Flags.FRESH | Flags.KEEP)],
    "a probe": [Step(Op.PROBE, read=1, slot=1)],
}

_MATRIX = matrix_row(0, 0)
NOOPS_OF_MAPS: dict[str, list[Step]] = {
    "a map of nothing": [Step(Op.MAP, read=_MATRIX, write=1)],
    "a map behind a shut gate": [
        _STEP,
        Step(Op.MAP, read=_MATRIX, write=1, a=1.0, flags=KEEP | Flags.GATED),
    ],
    "a map of other tokens": [Step(Op.MAP, read=_MATRIX, write=1, a=1.0, ids=(77,))],
}


def noop_case(name: str, **options: Any) -> Case:
    """All rows active with that program; zeros of both signs are among the values."""
    options = {"rows": 5, "width": 80, "captures": False, **options}
    made = case([{**NOOPS, **NOOPS_OF_MAPS}[name]], maps=int(name in NOOPS_OF_MAPS), **options)
    made.hidden[:, :2] = torch.tensor([0.0, -0.0])
    if made.residual is not None:
        made.residual[:, :2] = torch.tensor([-0.0, -0.0])
    return made
