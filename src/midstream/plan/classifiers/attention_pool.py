"""`AttentionPool`: the heads of an attention probe, or of MultiMax."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import SupportsIndex

from midstream.errors import SpecError
from midstream.ops.layout import Flags, Op
from midstream.plan.argument_names import FrozenFields, only_set, read_form
from midstream.plan.forms import RowsLike
from midstream.plan.instructions import Instruction
from midstream.plan.operation import rows_by_value
from midstream.plan.scores.rule import MAX, SOFTMAX, ScoreRule
from midstream.plan.vectors.matrix import emit_rows, read_rows
from midstream.plan.vectors.vector import Vector
from midstream.validation import read_int, read_word

MOST_HEADS, MOST_WINDOW = 128, 64


@dataclass(frozen=True, slots=True, init=False)
class AttentionPool(FrozenFields):
    """The heads of a probe that attends to the tokens so far: those that it selects.

    With the kind "softmax", an attention probe: the score at token t is the sum over heads of
    Σ_s exp(⟨query, h_s⟩) ⟨value, h_s⟩ / Σ_s exp(⟨query, h_s⟩) over the tokens s ≤ t, plus the bias
    of the probe. Kantamneni et al. 2025 (arXiv:2502.16681), McKenzie et al. 2025
    (arXiv:2506.10805); with several heads as in Kramár et al. 2026 (arXiv:2601.11516). With
    `window`, the sums are over the last tokens only: with `pool="max"` of the probe, the maximum of
    rolling means of Kramár et al.

    With the kind "max", MultiMax of Kramár et al.: the sum over heads of max_s ⟨value, h_s⟩.

    Each differs from the papers in this: the score is that of every prefix, the last one that of
    the whole text; h is read as it is, but for a `Hidden` layer; the first windows are shorter;
    rolling means are added over the heads before their maximum is taken.

    Sums are kept in float64, so a prompt of any length loses nothing. Each query and each value is
    one of the scores of a token; see the settings `probes` and `edits_per_site`.

    Attributes:
        value: a vector for each head, [heads, width], 1 to 128 heads.
        query: likewise; empty with the kind "max".
        kind: "softmax" or "max".
        window: number of the last tokens, 2 to 64; None: all.
    """

    value: tuple[Vector, ...]
    query: tuple[Vector, ...]
    kind: str
    window: int | None

    def __init__(
        self,
        *,
        value: RowsLike,
        query: RowsLike | None = None,
        kind: str = SOFTMAX,
        window: SupportsIndex | None = None,
    ) -> None:
        """Create it; each field accepts any of its forms.

        Args:
            value: a matrix [heads, width], or a vector for one head.
            query: likewise; required with "softmax".
            kind: "softmax" or "max".
            window: 2 to 64 tokens, with "softmax" only.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        self._read(partial(read_word, known=(SOFTMAX, MAX)), kind=kind)
        self._read(partial(read_rows, most=MOST_HEADS), value=value)
        if kind == MAX:
            for name, field in (("query", query), ("window", window)):
                if field is not None:
                    raise SpecError(name, f'the kind "max" reads values alone; omit `{name}`')
            self._set(query=(), window=None)
            return
        if query is None:
            raise SpecError("query", 'missing; MultiMax, without queries, is kind="max"')
        self._read(partial(read_rows, most=MOST_HEADS), query=query)
        shapes = [(len(rows), rows[0].size) for rows in (self.value, self.query)]
        if shapes[0] != shapes[1]:
            raise SpecError(
                "query", f"expected {list(shapes[0])} numbers, as in `value`, got {list(shapes[1])}"
            )
        self._read_given(_read_window, window=window)

    @staticmethod
    def parse(value: object) -> AttentionPool:
        """Read an AttentionPool, or a dict of its arguments."""
        return read_form(AttentionPool, value)

    def emit(self) -> dict[str, object]:
        """Return the JSON form, which `parse` reads."""
        query = emit_rows(self.query) if self.query else None
        return {
            "value": emit_rows(self.value),
            **only_set(query=query, window=self.window),
            "kind": self.kind,
        }

    def rule(self, bias: float) -> ScoreRule:
        """Return how its scores are made of the products with its rows, queries first."""
        return ScoreRule(len(self.rows), self.kind, self.window or 0, bias)

    @property
    def rows(self) -> tuple[Vector, ...]:
        """What is multiplied, in the order of the columns."""
        return self.query + self.value

    def instructions(self, width: int) -> tuple[Instruction, ...]:
        """Return the products with its rows, for vectors of one size."""
        rows = rows_by_value("query", self.query, width) + rows_by_value("value", self.value, width)
        return products(rows, [0.0] * len(rows))

    def __repr__(self) -> str:
        window = "" if self.window is None else f", window={self.window}"
        heads, width = len(self.value), self.value[0].size
        return f"AttentionPool({heads} heads of {width}, kind={self.kind!r}{window})"


def products(rows: tuple[Vector, ...], biases: list[float]) -> tuple[Instruction, ...]:
    """Return instructions that score a vector by each row, plus its bias; the last is counted."""
    last = len(rows) - 1
    return tuple(
        Instruction(
            Op.PROBE, read=row, a=bias,
            flags=(Flags.NONE if index else Flags.FRESH)
            | (Flags.COUNTED if index == last else Flags.NONE),
        )
        for index, (row, bias) in enumerate(zip(rows, biases, strict=True))
    )  # fmt: skip


def _read_window(value: object) -> int:
    size = read_int(value)
    if not 2 <= size <= MOST_WINDOW:
        raise SpecError("", f"expected 2 to {MOST_WINDOW} tokens, got {size}")
    return size
