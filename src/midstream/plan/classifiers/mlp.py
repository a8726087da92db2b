"""`MLP`: a small network with one hidden layer, whose output is the score of a probe."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from midstream.errors import SpecError
from midstream.ops.layout import ACTIVATIONS, Flags, Op
from midstream.plan.argument_names import FrozenFields, read_form
from midstream.plan.forms import RowsLike, VectorLike
from midstream.plan.instructions import Instruction
from midstream.plan.operation import rows_by_value
from midstream.plan.vectors.matrix import emit_rows, read_rows
from midstream.plan.vectors.vector import Vector
from midstream.validation import read_word


@dataclass(frozen=True, slots=True, init=False)
class MLP(FrozenFields):
    """A network with one hidden layer: ⟨output, act(hidden · h + hidden_bias)⟩.

    The bias of its output is that of the probe. Each hidden unit is one instruction of the probe's
    program, and one vector on the device; see the settings `edits_per_site` and `bank_rows`.

    Attributes:
        hidden: weights of the hidden layer, [H, width], 1 to 256 rows.
        hidden_bias: its bias, [H].
        output: weights of the output, [H].
        activation: "relu", "gelu" (with the error function), "tanh" or "silu".
    """

    hidden: tuple[Vector, ...]
    hidden_bias: Vector
    output: Vector
    activation: str

    def __init__(
        self,
        hidden: RowsLike,
        hidden_bias: VectorLike,
        output: VectorLike,
        activation: str = "relu",
    ) -> None:
        """Create it; each field accepts any of its forms.

        Args:
            hidden: a matrix [H, width].
            hidden_bias, output: any form of Vector.parse, [H].
            activation: "relu", "gelu", "tanh" or "silu".

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        self._read(read_rows, hidden=hidden)
        self._read(self._read_units, hidden_bias=hidden_bias, output=output)
        self._read(partial(read_word, known=ACTIVATIONS), activation=activation)

    def _read_units(self, value: object) -> Vector:
        vector = Vector.parse(value)
        if vector.size != len(self.hidden):
            raise SpecError(
                "",
                f"expected {len(self.hidden)} numbers, one for each row of `hidden`, got "
                f"{vector.size}",
            )
        return vector

    @staticmethod
    def parse(value: object) -> MLP:
        """Read an MLP, or a dict of its arguments."""
        return read_form(MLP, value)

    def emit(self) -> dict[str, object]:
        """Return the JSON form, which `parse` reads."""
        return {
            "hidden": emit_rows(self.hidden),
            "hidden_bias": self.hidden_bias.emit(),
            "output": self.output.emit(),
            "activation": self.activation,
        }

    def units(self, width: int) -> tuple[Instruction, ...]:
        """Return the hidden units' instructions, for vectors of one size, that of `hidden`."""
        rows = rows_by_value("hidden", self.hidden, width)
        biases, weights = self.hidden_bias.numpy().tolist(), self.output.numpy().tolist()
        number = float(ACTIVATIONS.index(self.activation))
        return tuple(
            Instruction(
                Op.UNIT, read=row, a=bias, b=weight, c=number,
                flags=Flags.NONE if index else Flags.FRESH,
            )
            for index, (row, bias, weight) in enumerate(zip(rows, biases, weights, strict=True))
        )  # fmt: skip

    def __repr__(self) -> str:
        count, width = len(self.hidden), self.hidden[0].size
        return f"MLP({width} → {count} → 1, activation={self.activation!r})"
