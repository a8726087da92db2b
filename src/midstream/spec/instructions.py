"""What an edit or a probe comes down to: the device's instructions, with vectors by value.

An operation says what is meant; its `instructions` say how it is computed. `midstream.ops.layout`
has the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from midstream.ops.layout import Flags, Op
from midstream.spec.vector import Vector


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction at one site.

    Attributes:
        op: what it does.
        read: the read vector; None where it reads none.
        write: the write vectors; none where it writes none. More than one only with
            `Flags.ROW_BY_POSITION`: the token at position p gets `write[p - first]`.
        a, b, c, d: parameters, float32.
        flags: modifiers.
        slot: column of the scores that a PROBE writes or a GATE reads; None: none. A GATE
            without a slot reads the stream.
        first: position of the first of several write vectors.
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
        """Whether it needs the stream's vector, and not only adds to it."""
        if self.op is Op.GATE:
            return self.slot is None
        return self.op is not Op.ADD or Flags.KEEP in self.flags

    @property
    def counted(self) -> bool:
        """Whether it counts as one in the device's tally."""
        return Flags.COUNTED in self.flags

    def with_flags(self, flags: Flags) -> Instruction:
        """The same with more flags."""
        return replace(self, flags=self.flags | flags)
