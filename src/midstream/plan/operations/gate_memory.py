"""Memory of a `Gate`: how its score and its opening depend on earlier tokens of the request."""

from __future__ import annotations

from dataclasses import dataclass

from midstream.errors import SpecError
from midstream.ops.layout import HELD, Flags, Op
from midstream.plan.forms import NumberLike
from midstream.plan.instructions import Instruction
from midstream.plan.operation import read_scalar
from midstream.validation import at, float32, is_int, kind, read_int, show

Hold = int | str  # a number of tokens, or "rest"

_HOLD = '"rest", or a number of tokens from 1'


@dataclass(frozen=True, slots=True)
class Memory:
    """What a gate remembers from one token of a request to the next; see `Gate`."""

    hold: Hold | None
    smooth: float | None
    release: float | None

    @staticmethod
    def read(
        hold: object,
        smooth: NumberLike | None,
        release: NumberLike | None,
        threshold: float,
        sharpness: float | None,
    ) -> Memory:
        """Read the arguments of a `Gate`."""
        with at("hold"):
            held = None if hold is None else _read_hold(hold)
        with at("smooth"):
            weight = None if smooth is None else read_scalar(smooth)
            if weight is not None and not 0 < float32(weight) < 1:
                raise SpecError(
                    "",
                    f"expected a number between 0 and 1, the weight of the newest score, got "
                    f"{show(weight)}; omit `smooth` for the score as it is",
                )
        with at("release"):
            low = None if release is None else read_scalar(release)
            if low is not None and float32(low) > float32(threshold):
                raise SpecError(
                    "",
                    f"a gate that opens above {show(threshold)} must close at that or below, got "
                    f"{show(low)}",
                )
        for name, value in (("hold", held), ("release", low)):
            if value is not None and sharpness is not None:
                raise SpecError(
                    name,
                    "a gate with a sharpness is open to a degree, so it neither opens nor closes; "
                    "omit `sharpness`, or use `smooth` alone",
                )
        return Memory(held, weight, low)

    def __bool__(self) -> bool:
        """Whether the gate remembers anything."""
        return not (self.hold is None and self.smooth is None and self.release is None)

    def emit(self) -> dict[str, object]:
        every = {"hold": self.hold, "smooth": self.smooth, "release": self.release}
        return {name: value for name, value in every.items() if value is not None}

    def scan(self, gate: Instruction) -> Instruction:
        """Return the SCAN, without a slot, whose score a gate reads instead of the stream."""
        return Instruction(
            Op.SCAN,
            read=gate.read,
            a=gate.a,
            b=gate.b,
            c=gate.b if self.release is None else float32(self.release),
            d=1.0 if self.smooth is None else float32(self.smooth),
            flags=Flags.COUNTED | (gate.flags & Flags.STEP),
            hold=HELD if isinstance(self.hold, str) else self.hold or 0,
        )

    def gate(self, gate: Instruction, slot: int) -> Instruction:
        """Return the GATE that reads the score of the SCAN."""
        threshold = 0.5 if Flags.STEP in gate.flags else gate.b
        flags = gate.flags & ~Flags.FRESH
        return Instruction(Op.GATE, b=threshold, c=gate.c, flags=flags, slot=slot)


def _read_hold(value: object) -> Hold:
    if isinstance(value, str):
        if value != "rest":
            raise SpecError("", f"expected {_HOLD}, got {show(value)}")
        return value
    if not is_int(value):
        raise SpecError("", f"expected {_HOLD}, got {kind(value)}")
    count = read_int(value)
    if not 0 < count < HELD:
        raise SpecError("", f"expected {_HOLD}, got {show(count)}")
    return count
