"""Random inputs for the `site` op, and what it must do, row by row, in plain Python."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from midstream.ops import layout


@dataclass
class Case:
    """The op's arguments, by name."""

    hidden: Tensor
    residual: Tensor | None
    tokens: Tensor
    tally: Tensor
    table: Tensor
    edit_rows: Tensor
    edit_scales: Tensor
    bank: Tensor
    ring: Tensor

    def arguments(self) -> tuple[Tensor | None, ...]:
        return tuple(vars(self).values())

    def copy(self, device: str = "cpu") -> Case:
        """A deep copy on a device."""
        return Case(
            **{
                name: None if value is None else value.clone().to(device)
                for name, value in vars(self).items()
            }
        )


def random_case(
    *,
    rows: int,
    width: int,
    dtype: torch.dtype,
    residual: bool,
    max_edits: int,
    seed: int,
    spare_rows: int = 3,
) -> Case:
    """Some rows idle, some edited, some captured, some both; several programs and groups."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    def below(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=draw, dtype=torch.int32)

    programs, num_edits, bank_rows = 7, 40, 11
    table = torch.zeros(programs, layout.TABLE_COLUMNS, dtype=torch.int32)
    counts = below(max_edits + 1, programs)
    counts[: layout.FIRST_FREE_PROGRAM] = 0
    table[:, layout.EDIT_COUNT] = counts
    table[:, layout.EDIT_START] = below(num_edits - max_edits, programs)
    table[1:, layout.PLACE] = below(4, programs - 1)
    table[0, layout.CODE] = 2**31 - 5
    tokens = torch.zeros(rows + spare_rows, layout.TOKEN_COLUMNS, dtype=torch.int32)
    tokens[:rows, layout.PROGRAM] = below(programs, rows)
    tokens[:rows, layout.GROUP] = below(programs, rows)
    has_record = below(2, rows)
    # Records must not overlap: four places each.
    tokens[:rows, layout.RECORD] = has_record * (1 + 4 * torch.arange(rows, dtype=torch.int32))
    tally = below(100, rows + spare_rows, layout.TALLY_COLUMNS)
    return Case(
        hidden=normal(rows, width).to(dtype),
        residual=normal(rows, width).to(dtype) if residual else None,
        tokens=tokens,
        tally=tally,
        table=table,
        edit_rows=below(bank_rows, num_edits),
        edit_scales=normal(num_edits),
        bank=normal(bank_rows, width),
        ring=torch.full((4 * rows + 4, width), -77.0).to(dtype),
    )


def expected(case: Case) -> Case:
    """What the op must leave behind, written as one reads its docstring."""
    out = case.copy()
    dtype = out.hidden.dtype
    for row in range(out.hidden.shape[0]):
        program, group, record, _ = out.tokens[row].tolist()
        if program == 0:
            continue
        start, count = out.table[program, :2].tolist()
        value = out.hidden[row].float()
        for edit in range(start, start + count):
            value = value + out.edit_scales[edit] * out.bank[out.edit_rows[edit]]
        out.hidden[row] = value.to(dtype)
        place = int(out.table[group, layout.PLACE])
        captured = record > 0 and place > 0
        if captured:
            stream = out.hidden[row].float()
            if out.residual is not None:
                stream = stream + out.residual[row].float()
            out.ring[record - 1 + place - 1] = stream.to(dtype)
        code = int(out.table[0, layout.CODE])
        summed = int(out.tally[row, layout.SIGNATURE]) + code
        out.tally[row, layout.SIGNATURE] = (summed + 2**31) % 2**32 - 2**31
        out.tally[row, layout.EDITS] += count
        out.tally[row, layout.CAPTURES] += int(captured)
    return out


def assert_same(found: Case, wanted: Case, *, exact: bool) -> None:
    """All buffers agree; float ones to rounding where sums may be taken in another way."""
    for name, value in vars(wanted).items():
        got = getattr(found, name)
        if value is None:
            assert got is None
        elif exact or not value.is_floating_point():
            torch.testing.assert_close(
                got.cpu(), value, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}"
            )
        else:
            torch.testing.assert_close(got.cpu(), value, msg=lambda m, n=name: f"{n}: {m}")
