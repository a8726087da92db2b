"""Inputs of the `site` op, and comparisons of its results; `site_oracle` has the expected ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from midstream.ops import layout
from midstream.ops.layout import Flags, Op
from midstream.ops.sae.reference import SaeBuffers
from midstream.ops.site import bind

SLOTS = 6
VOCABULARY = 9
CODE = 2**31 - 5
FIRST = 3  # ring row of a step's first record


MASKS = 2  # rows of zeros and ones at the end of the bank


@dataclass(eq=False)
class Case:
    """The op's arguments, by name and in order."""

    hidden: Tensor
    residual: Tensor | None
    tokens: Tensor
    ids: Tensor
    tally: Tensor
    table: Tensor
    instructions: Tensor
    params: Tensor
    lists: Tensor
    bank: Tensor
    scores: Tensor
    ring: Tensor
    mapped: Tensor
    sae: SaeBuffers | None = None
    encodes: bool = False

    # Of the tables that are bound, by address; not an argument.
    widths: ClassVar[dict[int, int]] = {}
    relaunches: ClassVar[dict[int, dict[Any, Any]]] = {}
    before: ClassVar[None] = None
    # There are no gates with memory.
    scans: ClassVar[Tensor] = torch.zeros(0, layout.SCAN_COLUMNS, dtype=torch.int32)
    scan_states: ClassVar[Tensor] = torch.zeros(0, 1, layout.STATE_COLUMNS, dtype=torch.int32)

    @property
    def encoding(self) -> frozenset[int]:
        return frozenset([self.table.data_ptr()] if self.encodes else [])

    def arguments(self) -> tuple[Any, ...]:
        return tuple(vars(self).values())

    def bound(self) -> tuple[Tensor | None, ...]:
        """The op's arguments as a tap has them, bound to the others, which this object holds."""
        bind(self.table, self, self.hidden.shape[1])
        return self.hidden, self.residual, self.table, self.tally

    def run(self) -> None:
        """Call the op."""
        torch.ops.midstream.site(*self.bound())

    def copy(self, device: str = "cpu") -> Case:
        """A deep copy on a device."""

        def copied(value: Any) -> Any:
            if isinstance(value, SaeBuffers):
                return SaeBuffers(*map(copied, vars(value).values()))
            return value.clone().to(device) if isinstance(value, Tensor) else value

        return Case(**{name: copied(value) for name, value in vars(self).items()})


@dataclass(frozen=True)
class Step:
    """One instruction, with vectors as rows of the bank and the ids of its list."""

    op: Op
    read: int = 0
    write: int = 0
    a: float = 0.0
    b: float = 0.0
    c: float = 0.0
    d: float = 0.0
    flags: Flags = Flags.FRESH | Flags.COUNTED
    slot: int | None = None
    ids: tuple[int, ...] = ()
    mask: int | None = None
    bit: int | None = None  # of the tokens to which it applies; without `ids`

    @property
    def kind(self) -> int:
        """The kind of a program of such steps alone."""
        is_partial = bool(self.ids) or self.bit is not None or self.mask is not None
        return layout.simple_kind(self.op, self.flags, is_partial, self.slot is not None)


def case(
    programs: list[list[Step]],
    *,
    rows: int,
    width: int,
    dtype: torch.dtype = torch.float32,
    residual: bool = True,
    seed: int = 0,
    captures: bool = True,
    bank_rows: int = 11,
    spare_rows: int = 3,
    magnitude: float = 1.0,
    maps: int = 0,
) -> Case:
    """Rows with these programs (the first two of the table are none), at random. The bank ends with
    so many matrices, see `matrix_row`.

    With `captures` some rows are captured and some rows are idle; without, every row is active,
    and row t has program t, t − P, …
    """
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    def below(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=draw, dtype=torch.int32)

    total = layout.FIRST_FREE_PROGRAM + len(programs)
    table, instructions, params, lists = _tables(programs)
    tokens = torch.zeros(rows + spare_rows, layout.TOKEN_COLUMNS, dtype=torch.int32)
    if captures:
        table[1:, layout.PLACE] = below(4, total - 1)
        tokens[:rows, layout.PROGRAM] = below(total, rows)
        tokens[:rows, layout.GROUP] = below(total, rows)
        # Records must not overlap: four places each.
        records = 1 + 4 * torch.arange(rows, dtype=torch.int32)
        tokens[:rows, layout.RECORD] = below(2, rows) * records
        table[0, layout.FIRST] = FIRST
    else:
        tokens[:rows, layout.PROGRAM] = 2 + torch.arange(rows, dtype=torch.int32) % len(programs)
    tokens[:rows, layout.POSITION] = below(3, rows) + 100
    tally = below(100, rows + spare_rows, layout.TALLY_COLUMNS)
    tally[:, layout.NONFINITE] = 0
    return Case(
        hidden=(normal(rows, width) * magnitude).to(dtype),
        residual=(normal(rows, width) * magnitude).to(dtype) if residual else None,
        tokens=tokens,
        ids=_with_bits(below(VOCABULARY, rows + spare_rows), seed),
        tally=tally,
        table=table,
        instructions=instructions,
        params=params,
        lists=lists,
        bank=torch.cat(
            (
                normal(bank_rows, width),
                below(2, MASKS, width).float(),
                normal(maps * width, width) / math.sqrt(width),
            )
        ),
        scores=normal(rows + spare_rows, SLOTS),
        ring=torch.full((FIRST + 4 * rows + 4, width), -77.0).to(dtype),
        mapped=torch.full((rows + spare_rows if maps else 0, width), math.nan),
    )


def _with_bits(ids: Tensor, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 2**31 - 1, ids.shape, generator=draw, dtype=torch.int32)
    return torch.stack((ids, bits), dim=1)


def matrix_row(nth: int, width: int, bank_rows: int = 11) -> int:
    """The row of the bank at which a matrix of a case begins."""
    return bank_rows + MASKS + nth * width


def _tables(programs: list[list[Step]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    table = torch.zeros(
        layout.FIRST_FREE_PROGRAM + len(programs), layout.TABLE_COLUMNS, dtype=torch.int32
    )
    words, params, lists = [[99] * layout.INSTRUCTION_COLUMNS], [[math.nan] * 4], [-1]
    for program, steps in enumerate(programs, layout.FIRST_FREE_PROGRAM):
        table[program, layout.EDIT_START] = len(words)
        table[program, layout.EDIT_COUNT] = len(steps)
        kind = layout.kind_of([step.op for step in steps], [step.kind for step in steps])
        table[program, layout.KIND] = kind
        for step in steps:
            slot = 0 if step.slot is None else step.slot + 1
            ids = [len(lists), len(step.ids)] if step.bit is None else [step.bit, layout.BY_BIT]
            mask = 0 if step.mask is None else step.mask + 1
            words.append([step.op, step.read, step.write, slot, int(step.flags), *ids, mask])
            params.append([step.a, step.b, step.c, step.d])
            lists.extend(step.ids)
    table[0, layout.CODE] = CODE
    return (
        table,
        torch.tensor(words, dtype=torch.int32),
        torch.tensor(params, dtype=torch.float32),
        torch.tensor(lists, dtype=torch.int32),
    )


def random_steps(draw: Any, count: int, width: int, bank_rows: int = 11) -> list[Step]:
    """Instructions of every kind and flag but MAP, CODE and RECONSTRUCT. Scales keep
    vectors of `width` about as long.
    """

    def normal() -> float:
        return float(draw.standard_normal())

    steps = []
    probed = draw.integers(2)
    written = set()
    for _ in range(count):
        op = _OTHERS[int(draw.integers(len(_OTHERS)))]
        flags = Flags(int(draw.integers(2 * max(Flags))))
        flags &= ~Flags.ROW_BY_POSITION if draw.integers(2) else ~Flags.NONE
        write = int(draw.integers(bank_rows - 2)) if Flags.ROW_BY_POSITION in flags else None
        slot = None
        # A score that a gate reads is from an earlier site: other columns than are written here.
        if op is Op.GATE and probed:
            slot = int(draw.integers(3))
        if op is Op.PROBE:
            slot = 3 + int(draw.integers(3))
            # So is one that is added to.
            flags &= ~Flags.ADDS if slot in written else ~Flags.NONE
            written.add(slot)
        flags &= ~Flags.ADDS if op not in (Op.GATE, Op.PROBE) else ~Flags.NONE
        flags &= ~Flags.UNITS if op is not Op.PROBE else ~Flags.NONE
        shrink = 0.3 / math.sqrt(width)
        a, b, c, d = {
            Op.ADD: (normal(), 0, 0, 0),
            Op.ADD_MATCHED: (shrink * normal(), 0, 0, 0),
            Op.CLIP: (-abs(normal()), abs(normal()), shrink, 0),
            Op.LINEAR: (shrink * normal(), normal(), 0, 0),
            Op.FEATURE: (normal(), normal(), shrink * normal(), shrink * normal()),
            Op.REPLACE: (draw.random(), 0, 0, 0),
            Op.SCALE: (2 * draw.random(), 0, 0, 0),
            Op.MULTIPLY: (0.3 * normal(), 0, 0, 0),
            Op.RAISE: (draw.random(), abs(normal()), 0, 0),
            Op.GATE: (normal(), normal(), normal() * float(draw.choice([1, 1e30])), 0),
            Op.PROBE: (normal(), 0, 0, 0),
            Op.UNIT: (normal(), normal(), int(draw.integers(4)), 0),
        }[op]
        chosen = draw.integers(6)
        ids = tuple(sorted({int(each) for each in draw.integers(0, VOCABULARY, 4)}))
        mask = bank_rows + int(draw.integers(MASKS)) if draw.integers(3) == 0 else None
        steps.append(
            Step(
                op,
                read=int(draw.integers(bank_rows)),
                write=int(draw.integers(bank_rows)) if write is None else write - 100,
                a=a, b=b, c=c, d=d,
                flags=flags,
                slot=slot,
                ids=ids if chosen < 2 else (),
                mask=mask,
                bit=int(draw.integers(layout.MAX_BITS)) if chosen == 2 else None,
            )
        )  # fmt: skip
    return steps


def random_case(
    *, max_steps: int, seed: int, programs: int = 5, maps: int = 0, **options: Any
) -> Case:
    """Several programs of up to `max_steps` instructions of every kind; see `case`.

    With `maps`, most begin with a MAP, behind a gate or not.
    """
    draw = np.random.default_rng(seed)
    width = options["width"]
    steps = [random_steps(draw, int(draw.integers(max_steps + 1)), width) for _ in range(programs)]
    if maps:
        steps = [[*random_map(draw, width, maps), *each] for each in steps]
    return case(steps, seed=seed, maps=maps, **options)


def random_map(draw: Any, width: int, maps: int) -> list[Step]:
    """A MAP with one of some matrices, maybe behind a gate; or nothing."""
    kind = int(draw.integers(5))
    if kind == 0:
        return []
    flags = Flags.FRESH | Flags.COUNTED
    listed = tuple(range(0, VOCABULARY, 2)) if kind == 1 else ()
    flags |= Flags.KEEP if kind == 2 else Flags.NONE
    flags |= Flags.GATED if kind == 3 else Flags.NONE
    read, a = matrix_row(int(draw.integers(maps)), width), float(draw.choice([1.0, 0.3]))
    step = Step(Op.MAP, read=read, write=int(draw.integers(11)), a=a, flags=flags, ids=listed)
    gate = Step(Op.GATE, read=2, b=0.1, flags=Flags.FRESH | Flags.STEP)
    return [gate, step] if kind == 3 else [step]


def reading_case(**options: Any) -> tuple[Case, Case]:
    """Programs of readings alone, and the same programs marked as programs of any kind."""
    flags = Flags.FRESH | Flags.COUNTED
    steps = [
        [Step(Op.PROBE, read=row, a=0.25 * row, slot=row - 1, flags=flags) for row in (1, 2, 3)],
        [Step(Op.PROBE, read=4, slot=0), Step(Op.PROBE, read=5, slot=0, flags=Flags.ADDS)],
        [Step(Op.PROBE, read=1, slot=1, flags=Flags.NONE)],
        [],
    ]
    known = case(steps, **options)
    unknown = known.copy()
    assert (known.table[:, layout.KIND] == layout.READS).sum() == 3
    unknown.table[known.table[:, layout.KIND] == layout.READS, layout.KIND] = layout.ANY
    return known, unknown


def in_units(case: Case, units: int) -> Case:
    """The same case where a vector has several units, and begins at any of them."""
    found = case.copy()
    unit = case.hidden.shape[1] // units
    for name in ("bank", "ring"):
        rows = getattr(found, name).reshape(-1, unit)
        # One unit in front, so that vectors begin at units that are no multiple of theirs.
        setattr(found, name, torch.cat((rows[:1], rows)))
    for column in (layout.READ, layout.WRITE):
        found.instructions[:, column] = found.instructions[:, column] * units + 1
    masks = found.instructions[:, layout.MASK]
    masks[masks > 0] = (masks[masks > 0] - 1) * units + 2
    places = found.table[1:, layout.PLACE]
    places[places > 0] = (places[places > 0] - 1) * units + 1
    records = found.tokens[:, layout.RECORD]
    records[records > 0] = (records[records > 0] - 1) * units + 1
    found.table[0, layout.FIRST] = found.table[0, layout.FIRST] * units + 1
    return found


_OTHERS = [op for op in Op if op not in (Op.MAP, Op.SCAN, Op.CODE, Op.RECONSTRUCT)]

# Sums over a row are taken in another order: relative to the row's largest value. Two halves hold
# a row to the square of their rounding; what they are made of is exact to float32.
_PAIR_TOLERANCE = 4e-5
_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def assert_same(found: Case, wanted: Case, *, exact: bool) -> None:
    """All buffers agree: integers exactly, floats too if `exact`, or else to rounding."""
    for name, value in vars(wanted).items():
        got = getattr(found, name)
        if name == "hidden" and wanted.residual is not None and not exact:
            # Where a row lies between two numbers, either may be its high part.
            assert_close(_stream(found), _stream(wanted), "the stream", _PAIR_TOLERANCE)
            continue
        if name in ("mapped", "sae", "encodes"):
            continue  # of the kernels alone, or made of them
        if value is None:
            assert got is None
            continue
        if name == "residual" and not exact:
            continue
        got = got.cpu()
        if exact or not value.is_floating_point() or name in ("params", "bank"):
            same = torch.equal(got, value) if name != "params" else _same_bits(got, value)
            assert same, f"{name} differs by up to {(got - value).abs().max()}"
            continue
        assert_close(got.double(), value.double(), name, _TOLERANCE[found.hidden.dtype])


def _stream(case: Case) -> Tensor:
    assert case.residual is not None
    return case.hidden.cpu().double() + case.residual.cpu().double()


def assert_close(found: Tensor, wanted: Tensor, name: str, tolerance: float) -> None:
    """Rows agree, relative to the largest value of each."""
    scale = wanted.abs().amax(dim=-1, keepdim=True).clamp_min(1.0)
    error = ((found - wanted).abs() / scale).max() if wanted.numel() else torch.zeros(())
    assert float(error) <= tolerance, f"{name}: off by {float(error)}"


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal to the last bit, the sign of zero included."""
    words = {4: torch.int32, 2: torch.int16}[one.element_size()]
    return torch.equal(one.cpu().view(words), other.cpu().view(words))


same_bits = _same_bits
