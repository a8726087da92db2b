"""Programs whose result is much shorter or longer than the stream that they change, and what the
result must be, in double precision.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from midstream.ops.layout import Flags, Op
from support.site_cases import Case, Step, case, matrix_row

LENGTHS = (1e-6, 1e-3, 1.0, 1e3)
BOTH = Flags.FRESH | Flags.COUNTED
ROWS, WIDTH = 3, 96
_MASK = 11  # the first mask of a case's bank

Wanted = Callable[[Case, Tensor, float], Tensor]


def _mixed(share: float) -> Wanted:
    return lambda made, h, size: (1 - share) * h + share * made.bank[4].double()


def _masked(made: Case, h: Tensor, _size: float) -> Tensor:
    return torch.where(made.bank[_MASK] != 0, made.bank[4].double(), h)


def _mapped(made: Case, h: Tensor, _size: float) -> Tensor:
    at = matrix_row(0, WIDTH)
    return h @ made.bank[at : at + WIDTH].double().T + made.bank[4].double()


def _raised(made: Case, h: Tensor, _size: float) -> Tensor:
    return made.bank[4].double() + h.max(1, keepdim=True).values


# By name: the instructions for a result of some length, as a share of the stream's; the result.
# The vector `bank[4]` has that length.
PROGRAMS: dict[str, tuple[Callable[[float], list[Step]], Wanted]] = {
    "a row": (
        lambda size: [Step(Op.REPLACE, write=4, a=1.0)],
        lambda made, h, size: made.bank[4].double().expand_as(h),
    ),
    "most of a row": (lambda size: [Step(Op.REPLACE, write=4, a=1 - 2**-20)], _mixed(1 - 2**-20)),
    "a row where a mask is": (
        lambda size: [Step(Op.REPLACE, write=4, a=1.0, mask=_MASK)],
        _masked,
    ),
    "a row, then a vector": (
        lambda size: [Step(Op.REPLACE, write=4, a=1.0), Step(Op.ADD, write=4, a=0.5)],
        lambda made, h, size: 1.5 * made.bank[4].double().expand_as(h),
    ),
    "a row behind an open gate": (
        lambda size: [
            Step(Op.GATE, read=1, b=-1e30, flags=Flags.FRESH | Flags.STEP),
            Step(Op.REPLACE, write=4, a=1.0, flags=BOTH | Flags.GATED),
        ],
        lambda made, h, size: made.bank[4].double().expand_as(h),
    ),
    "a scale": (
        lambda size: [Step(Op.SCALE, a=size)],
        lambda made, h, size: float(torch.tensor(size)) * h,
    ),
    "a scale behind an open gate": (
        lambda size: [
            Step(Op.GATE, read=1, b=-1e30, flags=Flags.FRESH | Flags.STEP),
            Step(Op.SCALE, a=size, flags=BOTH | Flags.GATED),
        ],
        lambda made, h, size: float(torch.tensor(size)) * h,
    ),
    "a factor for each component": (
        lambda size: [Step(Op.MULTIPLY, write=5, a=1.0)],
        lambda made, h, size: made.bank[5].double() * h,
    ),
    "a map": (
        lambda size: [Step(Op.MAP, read=matrix_row(0, WIDTH), write=4, a=1.0)],
        _mapped,
    ),
    "a raise": (lambda size: [Step(Op.RAISE, write=4, a=1.0)], _raised),
    "a vector": (
        lambda size: [Step(Op.ADD, write=4, a=1.0)],
        lambda made, h, size: h + made.bank[4].double(),
    ),
    "a vector of the length of h": (
        lambda size: [Step(Op.ADD_MATCHED, write=6, a=size)],
        lambda made, h, size: h + _scaled(h, float(torch.tensor(size))) * made.bank[6].double(),
    ),
    "a row of the norm of h": (
        lambda size: [Step(Op.REPLACE, write=4, a=1.0, flags=BOTH | Flags.KEEP)],
        lambda made, h, size: h.norm(dim=1, keepdim=True) * _unit(made.bank[4].double()),
    ),
}


def _unit(vector: Tensor) -> Tensor:
    return vector / vector.norm()


def _scaled(h: Tensor, size: float) -> Tensor:
    return size * h.norm(dim=1, keepdim=True)


def short_case(name: str, size: float, *, dtype: torch.dtype, residual: bool) -> Case:
    """Rows with one large component, as the first token has in many models, and a program."""
    instructions = PROGRAMS[name][0](size)
    maps = int(any(step.op is Op.MAP for step in instructions))
    made = case(
        [instructions], rows=ROWS, width=WIDTH, dtype=dtype, residual=residual, captures=False,
        maps=maps, magnitude=8.0,
    )  # fmt: skip
    (made.hidden if made.residual is None else made.residual)[0, 7] = 22_696.0
    length = stream_of(made).norm(dim=1).min()
    made.bank[4] = (_unit(made.bank[4].double()) * size * length).float()
    made.bank[5] *= size
    made.bank[6] = _unit(made.bank[6])
    if maps:
        made.bank[matrix_row(0, WIDTH) :] *= size
    return made


def stream_of(made: Case) -> Tensor:
    """The stream, [rows, W] in double precision."""
    half = made.hidden.cpu().double()
    return half if made.residual is None else half + made.residual.cpu().double()


def wanted_of(name: str, size: float, made: Case) -> Tensor:
    """The rows that a program asks for, [rows, W] in double precision."""
    return PROGRAMS[name][1](made, stream_of(made).float().double(), size)


def allowed(wanted: Tensor, dtype: torch.dtype, *, residual: bool) -> Tensor:
    """The largest distance of each row from what was asked for, [rows]: the rounding of the row to
    the dtype, twice if the stream has two halves; and of float32 sums.
    """
    bits = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}[dtype]
    smallest = {torch.bfloat16: 0.0, torch.float16: 2.0**-24, torch.float32: 0.0}[dtype]
    rounding = 2.0 ** -(2 * bits if residual and bits < 24 else bits)
    length = wanted.norm(dim=1)
    return 2 * rounding * length + 8 * 2.0**-24 * length + smallest * wanted.shape[1] ** 0.5


def every_case() -> Iterator[dict[str, Any]]:
    """Each program with each length, dtype and kind of stream."""
    for name in PROGRAMS:
        for size in LENGTHS:
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                for residual in (True, False):
                    if dtype is not torch.float16 or size < 1e3:  # which ends at 65504
                        yield {"name": name, "size": size, "dtype": dtype, "residual": residual}


def check(made: Case, name: str, size: float, run: Callable[[Case], None]) -> None:
    """Run a case, and compare its rows with those that were asked for."""
    residual, dtype = made.residual is not None, made.hidden.dtype
    wanted = wanted_of(name, size, made.copy())
    run(made)
    found = stream_of(made)
    off = (found - wanted).norm(dim=1)
    most = allowed(wanted, dtype, residual=residual)
    assert bool((off <= most).all()), (name, size, dtype, residual, off / wanted.norm(dim=1))
