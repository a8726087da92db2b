"""`Instruction`: one device instruction of an edit or a probe; see `midstream.ops.layout`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from midstream.ops.layout import Flags, Op
from midstream.plan.vectors.vector import Vector

# Plain integers: operations on flags take several times as long.
_COUNTED, _KEEP, _ROW_BY_POSITION = map(int, (Flags.COUNTED, Flags.KEEP, Flags.ROW_BY_POSITION))


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction at one site.

    Attributes:
        read: the read vector, the matrix of a MAP, or the description of a CODE; None if the op has
            none.
        write: the write vectors; empty if the op has none. More than one only with
            `Flags.ROW_BY_POSITION`: the token at position p uses `write[p - first]`.
        a, b, c, d: float32.
        slot: column of the scores that a PROBE or SCAN writes or a GATE reads; None: none. A GATE
            without a slot reads the stream, one with `Flags.ADDS` both.
        mask: ones and zeros: the components that the instruction reads and changes; None: all.
        hold: of a SCAN: number of tokens for which it stays open.
    """

    op: Op
    read: Vector | None = None
    write: tuple[Vector, ...] = ()
    a: float = 0.0
    b: float = 0.0
    c: float = 0.0
    d: float = 0.0
    flags: Flags = Flags.NONE
    slot: int | None = None
    first: int = 0
    mask: Vector | None = None
    hold: int = 0

    @property
    def reads(self) -> bool:
        """Whether the instruction reads the stream's vector, rather than only adds to it."""
        if self.op is Op.GATE:
            return self.read is not None
        return self.op is not Op.ADD or bool(int(self.flags) & _KEEP)

    @property
    def counted(self) -> bool:
        """Whether the device counts the instruction in its tally of edits."""
        return bool(int(self.flags) & _COUNTED)

    @property
    def by_position(self) -> bool:
        """Whether the token's position selects the write vector."""
        return bool(int(self.flags) & _ROW_BY_POSITION)

    @property
    def reach(self) -> float:
        """Bound of the length of what is added to a vector of length 0 or 1, without limits."""
        longest = max((vector.norm for vector in self.write), default=1.0)
        if self.op is Op.MAP:
            assert self.read is not None
            return abs(self.a) * max(self.read.norm + 1, longest)
        if self.op is Op.MULTIPLY:
            return abs(self.a) * (longest + 1)
        if self.op in (Op.ADD, Op.ADD_MATCHED, Op.REPLACE, Op.RAISE):
            return abs(self.a) * longest
        if self.op is Op.SCALE:
            return abs(self.a - 1)
        if self.op not in (Op.CLIP, Op.LINEAR, Op.FEATURE):
            return 0.0
        assert self.read is not None
        factor = abs(self.a if self.op is Op.LINEAR else self.c) * self.read.norm
        fixed = self.a * self.b if self.op is Op.LINEAR else self.d
        return max(factor, abs(fixed)) * longest

    def with_flags(self, flags: Flags) -> Instruction:
        return replace(self, flags=self.flags | flags)
