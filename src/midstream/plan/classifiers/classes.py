"""`Classes`: several linear outputs of one probe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from midstream.errors import SpecError
from midstream.plan.argument_names import FrozenFields, read_each, read_form
from midstream.plan.classifiers.attention_pool import products
from midstream.plan.forms import RowsLike, VectorLike
from midstream.plan.instructions import Instruction
from midstream.plan.operation import rows_by_value
from midstream.plan.scores.rule import ScoreRule
from midstream.plan.vectors.matrix import emit_rows, read_rows
from midstream.plan.vectors.vector import Vector
from midstream.validation import is_int, kind, listed, read_int, show

MOST_CHARACTERS = 64  # of a name
_SHOWN = 8  # names in a message


@dataclass(frozen=True, slots=True, init=False)
class Classes(FrozenFields):
    """Several outputs of one probe: ⟨h, weights[c]⟩ + bias[c] for each class c.

    The scores of such a probe are [tokens, classes]. With `link="softmax"` of the probe they are
    the probabilities of multinomial logistic regression. Each class is one of the scores of a
    token; see the settings `probes` and `edits_per_site`.

    Attributes:
        weights: a vector for each class, [C, width], 2 to 256 classes.
        bias: [C].
        names: of the classes, which acts and results use; empty: they are numbered from 0.
    """

    weights: tuple[Vector, ...]
    bias: Vector
    names: tuple[str, ...]

    def __init__(
        self,
        weights: RowsLike,
        bias: VectorLike | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        """Create it; each field accepts any of its forms.

        Args:
            weights: a matrix [C, width].
            bias: any form of Vector.parse, [C]; None: zeros.
            names: C different names of 1 to 64 characters; None: the classes have none.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        self._read(read_rows, weights=weights)  # 256 at most
        count = len(self.weights)
        if count < 2:
            raise SpecError("weights", "expected 2 or more rows, got 1; use `direction` for one")
        self._read(self._read_bias, bias=[0.0] * count if bias is None else bias)
        self._read(self._read_names, names=() if names is None else names)

    def _read_bias(self, value: object) -> Vector:
        vector = Vector.parse(value)
        self._check_count(vector.size, "numbers")
        return vector

    def _read_names(self, value: object) -> tuple[str, ...]:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise SpecError("", f"expected a list of names, got {kind(value)}")
        if len(value):
            self._check_count(len(value), "names")
        names = read_each("", value, _read_name)
        for index, name in enumerate(names):
            if name in names[:index]:
                raise SpecError(f"[{index}]", f"{show(name)} is listed twice")
        return names

    def _check_count(self, count: int, what: str) -> None:
        wanted = len(self.weights)
        if count != wanted:
            raise SpecError(
                "", f"expected {wanted} {what}, one for each row of `weights`, got {count}"
            )

    @staticmethod
    def parse(value: object) -> Classes:
        """Read Classes, or a dict of the arguments."""
        return read_form(Classes, value)

    def emit(self) -> dict[str, object]:
        """Return the JSON form, which `parse` reads."""
        names = {"names": list(self.names)} if self.names else {}
        return {"weights": emit_rows(self.weights), "bias": self.bias.emit(), **names}

    def index_of(self, output: str | int) -> int:
        """Return the index of a class by its name or index.

        Raises:
            SpecError: there is no such class.
        """
        if isinstance(output, str):
            if output in self.names:
                return self.names.index(output)
            known = listed(self.names[:_SHOWN]) or f"indices 0 to {len(self.weights) - 1}"
            more = ", …" if len(self.names) > _SHOWN else ""
            raise SpecError("", f"there is no class {show(output)}; there are {known}{more}")
        if not 0 <= output < len(self.weights):
            raise SpecError("", f"expected 0 to {len(self.weights) - 1}, got {output}")
        return output

    def rule(self) -> ScoreRule:
        """Return how its scores are made of the products with its rows."""
        return ScoreRule(len(self.weights))

    def instructions(self, width: int) -> tuple[Instruction, ...]:
        """Return the products with its rows, for vectors of one size."""
        rows = rows_by_value("weights", self.weights, width)
        return products(rows, self.bias.numpy().tolist())

    def __repr__(self) -> str:
        names = f", names={list(self.names)}" if self.names else ""
        return f"Classes({len(self.weights)} of {self.weights[0].size}{names})"


def read_output(value: object) -> str | int:
    """Read a class by its name or index."""
    if isinstance(value, str):
        return _read_name(value)
    if is_int(value):
        return read_int(value)
    raise SpecError("", f"expected the name or the index of a class, got {kind(value)}")


def _read_name(value: object) -> str:
    if not isinstance(value, str):
        raise SpecError("", f"expected a name, `str`, got {kind(value)}")
    if not 1 <= len(value) <= MOST_CHARACTERS or not value.isprintable():
        raise SpecError(
            "", f"expected 1 to {MOST_CHARACTERS} printable characters, got {show(value)}"
        )
    return str(value)
