"""`Instruction`: one device instruction of an edit or a probe, with its vectors.

Operations compile to instructions (`Operation.instructions`). `midstream.ops.layout` has the
formulas.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from midstream.ops.layout import Flags, Op
from midstream.spec.vector import Vector


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction at one site.

    Attributes:
        op: operation code.
        read: the read vector; None if the op has none.
        write: the write vectors; empty if the op has none. More than one only with
            `Flags.ROW_BY_POSITION`: the token at position p uses `write[p - first]`.
        a, b, c, d: parameters, float32.
        flags: modifiers.
        slot: column of the scores that a PROBE writes or a GATE reads; None: none. A GATE
            without a slot reads the stream.
        first: position of the first write vector, if there are several.
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

    @property
    def reads(self) -> bool:
        """Whether the instruction reads the stream's vector, rather than only adds to it."""
        if self.op is Op.GATE:
            return self.slot is None
        return self.op is not Op.ADD or Flags.KEEP in self.flags

    @property
    def counted(self) -> bool:
        """Whether the device counts the instruction in its tally of edits."""
        return Flags.COUNTED in self.flags

    def with_flags(self, flags: Flags) -> Instruction:
        """Return a copy with additional flags."""
        return replace(self, flags=self.flags | flags)
