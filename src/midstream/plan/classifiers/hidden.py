"""`Hidden`: a hidden layer, whose units the classes or heads of a probe read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from midstream.errors import SpecError
from midstream.ops.layout import ACTIVATIONS
from midstream.plan.argument_names import FrozenFields, read_form
from midstream.plan.classifiers.attention_pool import products
from midstream.plan.forms import RowsLike, VectorLike
from midstream.plan.instructions import Instruction
from midstream.plan.operation import rows_by_value
from midstream.plan.scores.units import UnitLayer
from midstream.plan.vectors.matrix import emit_rows, read_rows
from midstream.plan.vectors.vector import Vector
from midstream.validation import read_word


@dataclass(frozen=True, slots=True, init=False)
class Hidden(FrozenFields):
    """A hidden layer: act(weights · h + bias), [M], in place of h.

    The rows of the probe's `classes` or `attention_pool` then have M numbers, one for each unit: a
    network of several outputs, or the heads of Kramár et al. 2026 (arXiv:2601.11516), whose MLP is
    this layer and a linear one, which is multiplied into the queries and values. Each unit is one
    of the scores of a token; see the settings `probes` and `edits_per_site`.

    Attributes:
        weights: a vector for each unit, [M, width], 1 to 256 units.
        bias: [M].
        activation: "relu", "gelu" (with the error function), "tanh" or "silu".
    """

    weights: tuple[Vector, ...]
    bias: Vector
    activation: str

    def __init__(
        self, weights: RowsLike, bias: VectorLike | None = None, activation: str = "relu"
    ) -> None:
        """Create it; each field accepts any of its forms.

        Args:
            weights: a matrix [M, width].
            bias: any form of Vector.parse, [M]; None: zeros.
            activation: "relu", "gelu", "tanh" or "silu".

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        self._read(read_rows, weights=weights)
        zeros = [0.0] * len(self.weights)
        self._read(self._read_bias, bias=zeros if bias is None else bias)
        self._read(partial(read_word, known=ACTIVATIONS), activation=activation)

    def _read_bias(self, value: object) -> Vector:
        vector = Vector.parse(value)
        count = len(self.weights)
        if vector.size != count:
            raise SpecError(
                "", f"expected {count} numbers, one for each row of `weights`, got {vector.size}"
            )
        return vector

    @staticmethod
    def parse(value: object) -> Hidden:
        """Read a Hidden, or a dict of its arguments."""
        return read_form(Hidden, value)

    def emit(self) -> dict[str, object]:
        """Return the JSON form, which `parse` reads."""
        return {
            "weights": emit_rows(self.weights),
            "bias": self.bias.emit(),
            "activation": self.activation,
        }

    def check_rows(self, rows: tuple[Vector, ...]) -> None:
        """Check that rows that read the units have a number for each."""
        count = len(self.weights)
        if rows and rows[0].size != count:
            raise SpecError(
                "", f"expected {count} numbers a row, one for each unit of `hidden`, got "
                f"{rows[0].size}",
            )  # fmt: skip

    def layer(self, rows: tuple[Vector, ...], bias: Vector | None) -> UnitLayer:
        """Return what rows make of the units."""
        weights = b"".join(row.data for row in rows)
        biases = b"" if bias is None else bias.data
        return UnitLayer(self.activation, len(self.weights), weights, biases)

    def instructions(self, width: int) -> tuple[Instruction, ...]:
        """Return the sums of the units, for vectors of one size."""
        rows = rows_by_value("weights", self.weights, width)
        return products(rows, self.bias.numpy().tolist())

    def __repr__(self) -> str:
        count, width = len(self.weights), self.weights[0].size
        return f"Hidden({width} → {count}, activation={self.activation!r})"
