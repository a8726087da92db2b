"""`Steer`: adding a steering vector to h."""

from __future__ import annotations

import math
import numbers
import warnings
from dataclasses import dataclass
from typing import Any, Literal, SupportsIndex, TypeGuard

from midstream.errors import ScaleWarning, SpecError
from midstream.ops.layout import Flags, Op
from midstream.plan import forms
from midstream.plan.argument_names import accept_spellings
from midstream.plan.captured_rows import CapturedRows, is_captured, not_here
from midstream.plan.instructions import Instruction
from midstream.plan.operation import Operation, by_value, one_edit, read_scalar, rows_by_value
from midstream.plan.tokens import LOGIT, STREAM, read_kind, read_token
from midstream.plan.vectors.algebra import check_nonzero, unit
from midstream.plan.vectors.matrix import read_rows
from midstream.plan.vectors.named_vector import Named
from midstream.plan.vectors.row_per_layer import check_per_layer, read_per_layer
from midstream.plan.vectors.vector import Vector
from midstream.validation import MAX_ITEMS, as_number, at, float32, is_int, listed, read_word

NORMS = ("match", "keep")
# A larger edit warns: above MAX_RMS per coordinate, a norm of MAX_RMS · √width; with norm="match",
# above MAX_MATCHED times the norm of h. Token vectors have norms of 1 to 30 per √width, a few
# massive ones excepted.
MAX_RMS = 100.0
MAX_MATCHED = 10.0
_has_warned = False


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Steer(Operation):
    """Add a steering vector to the selected tokens: h ← h + scale · v.

    With `norm="match"` the vector is first rescaled to the norm of h:
    h ← h + scale · (‖h‖/‖v‖) · v. With `norm="keep"` the sum is rescaled to the norm of h:
    s = h + scale · v, h ← (‖h‖/‖s‖) · s; an s of zero stays zero. With `rows`, the k-th listed
    token gets the k-th row as v: a schedule of one vector is `rows=torch.outer(scales, v)`.

    Turner et al. 2023 (activation addition, arXiv:2308.10248), Rimsky et al. 2024 (contrastive
    activation addition, arXiv:2312.06681), Zou et al. 2023 (representation engineering,
    arXiv:2310.01405).

    With `token`, v is the unit vector along which a lens reads the token: h moves so that the
    logit of the token rises most, for a given size of the final norm's input. With W the head,
    γ the weights of the final norm, and J the lens's map of the layer (1 for "logit"; I + W_l for a
    tuned lens): v = g / ‖g‖, g = Jᵀ (γ ⊙ W[token]). Where the final norm subtracts the mean, its
    mean is subtracted from γ ⊙ W[token] as well.

    Attributes:
        vector: v, a vector of the model's hidden size; or a name, whose scale multiplies `scale`;
            or several vectors, one per layer; None with `rows` and with `token`.
        rows: two or more vectors of that size, one per selected token, in the order of
            `positions`, or a reference to rows that a server has; else empty.
        scale: finite, within float32's range.
        norm: None, "match" or "keep".
        token: id or text of a token, whose direction is v; None: `vector` or `rows` is.
        lens: "logit", or the name of a registered lens, which gives that direction.
    """

    op = "steer"

    vector: Vector | Named | tuple[Vector, ...] | None
    rows: tuple[Vector, ...] | CapturedRows
    scale: float
    norm: str | None
    token: int | str | None
    lens: str

    @accept_spellings
    def __init__(
        self,
        vector: forms.RowsOrNames | None = None,
        layer: forms.LayersLike | None = None,
        scale: forms.NumberLike = 1.0,
        site: forms.SitesLike | None = None,
        positions: forms.PositionsLike = "all",
        phase: forms.PhaseLike | None = None,
        norm: Literal["match", "keep"] | None = None,
        exclude: forms.PositionsLike | None = None,
        rows: forms.RowsLike | CapturedRows | None = None,
        head: forms.IndicesLike | None = None,
        *,
        token: SupportsIndex | str | None = None,
        lens: str | None = None,
    ) -> None:
        """Create an edit; each field accepts any of its forms.

        Args:
            vector: any form of Vector.parse, not zero: a list, array, tensor or base64; or the
                name of a registered vector, as `str`, Named or `{"name": …, "scale": …}`. Or one
                vector per layer: `{layer: vector}` without `layer`, or a matrix with as many rows
                as there are layers.
            layer: "all", an int, or a list, tuple or range of ints. May be omitted for a name:
                see `bind`.
            scale: a number.
            site: a site's name or alias, or a list of these; default "resid_post", or for a name
                the sites it is registered for.
            positions: any form of Positions, except "last_row".
            phase: "prompt" or "generated" restricts the positions to tokens of that phase.
            norm: None, "match", or "keep".
            exclude: positions to exclude.
            rows: instead of `vector`: [n, width], n at most 4096, with n selected positions, which
                get them in the order in which they are listed; their number is checked when the
                plan is resolved. A row may be zero. One row is one vector. In a request to a server
                also a CapturedRows: rows that the server cached for an earlier request.
            head: an attention head, counted from 0, or several: only these are changed, each in the
                same way, at a site whose vectors are of heads. Vectors then have the size of a
                head. None: the whole vector.
            token: instead of `vector`: a token's id, or a text that is one token of the model, such
                as `" Paris"`. The site is resid_pre, resid_mid or resid_post.
            lens: with `token`: "logit" (the default), or the name under which a lens was
                registered.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        with at("norm"):
            self._set(norm=None if norm is None else read_word(norm, NORMS))
        self._set(rows=(), token=None, lens=LOGIT)
        if token is not None:
            self._read_token(token, lens, vector, rows)
        elif lens is not None:
            raise SpecError("lens", "is for `token`, which is missing")
        elif rows is not None:
            vector = self._read_rows(vector, rows)
        elif vector is None:
            raise SpecError(
                "vector", "missing; give a vector, one row per position as `rows`, or a `token`"
            )
        if vector is not None:
            vector, layer = self._read_vector(vector, layer)
        self._set(vector=vector)
        self._read(read_scalar, scale=scale)
        self._set_place(layer, site, positions, phase, exclude, head)
        if isinstance(self.vector, tuple):
            check_per_layer("vector", len(self.vector), self.layers)
        if self.token is not None:
            self._check_token()
        self._warn_of_scale()

    def _read_token(self, token: object, lens: object, vector: object, rows: object) -> None:
        for name, value in (("vector", vector), ("rows", rows)):
            if value is not None:
                raise SpecError("token", f"`{name}` is given too; give one of them")
        self._read(read_token, token=token)
        if lens is not None:
            self._read(read_kind, lens=lens)

    def _check_token(self) -> None:
        if self.heads:
            raise SpecError("head", "the direction of a token is of the whole vector")
        for site in self.sites:
            if site not in STREAM:
                raise SpecError(
                    "site", f"a lens reads the stream: expected {listed(STREAM)}, got {site!r}"
                )

    def _read_rows(self, vector: object, rows: object) -> Vector | None:
        """Set the rows; return the vector if there is one row."""
        if vector is not None:
            raise SpecError("rows", "`vector` is given too; give one of them")
        with at("rows"):
            if is_captured(rows):
                self._set(rows=CapturedRows.parse(rows))
                return None
            vectors = read_rows(rows, MAX_ITEMS)
            if not any(row.norm for row in vectors):
                raise SpecError("", "all rows are zero, so that the edit would change nothing")
        if len(vectors) == 1:
            return vectors[0]
        self._set(rows=vectors)
        return None

    def _read_vector(
        self, vector: object, layer: object
    ) -> tuple[Vector | Named | tuple[Vector, ...], Any]:
        vectors, layer = read_per_layer("vector", vector, layer)
        rows = vectors if isinstance(vectors, tuple) else (vectors,)
        for index, row in enumerate(rows):
            if isinstance(row, Vector):
                with at("vector" if len(rows) == 1 else f"vector[{index}]"):
                    check_nonzero(row, "the vector is zero, so that the edit would change nothing")
        return vectors, layer

    def own(self) -> dict[str, Any]:
        what: dict[str, Any] = {"rows": self.rows} if self.rows else {"vector": self.vector}
        if self.token is not None:
            what = {"token": self.token, "lens": self.lens}
        return {**what, "scale": self.scale, "norm": self.norm}

    def per_layer(self) -> tuple[Steer, ...]:
        if not isinstance(self.vector, tuple):
            return (self,)
        pairs = zip(self.vector, self.layers.indices, strict=True)
        return tuple(self.replace(vector=row, layer=layer) for row, layer in pairs)

    def bound(self, vectors: dict[str, Vector]) -> dict[str, object]:
        assert isinstance(self.vector, Named)
        scale = self.vector.scale * self.scale
        return {"vector": vectors[self.vector.name], "scale": scale, "norm": self.norm}

    def instructions(self, width: int) -> tuple[Instruction, ...]:
        if self.token is not None:
            raise SpecError(
                "token",
                "is replaced by its direction in the edits of a request alone; use "
                "llm.lenses.direction(token, layer) as the vector here",
            )
        if isinstance(self.rows, CapturedRows):
            raise not_here()
        if self.rows:
            rows = rows_by_value("rows", self.rows, width)
        else:
            assert self.vector is not None
            assert not isinstance(self.vector, tuple), "binding gives one edit per layer"
            with at("vector"):
                rows = (by_value(self.vector, width),)
        a = float32(self.scale)
        flags = Flags.ROW_BY_POSITION if len(rows) > 1 else Flags.NONE
        if self.norm == "match":
            # scale/‖v‖ as a factor would overflow for very short vectors.
            units = tuple(unit(row) if row.norm else row for row in rows)
            return one_edit([Instruction(Op.ADD_MATCHED, write=units, a=a, flags=flags)])
        return one_edit([Instruction(Op.ADD, write=rows, a=a, flags=flags)], self.norm)

    def _warn_of_scale(self) -> None:
        """Warn, once per process, of an edit that drowns the residual stream."""
        global _has_warned
        if _has_warned or self.norm == "keep":
            return
        size = abs(self.scale)
        if self.norm == "match":
            is_huge, shown = size > MAX_MATCHED, f"{size:.3g} times the norm of h"
        else:
            listed_rows = self.rows if isinstance(self.rows, tuple) else ()
            rows = self.vector if isinstance(self.vector, tuple) else (self.vector, *listed_rows)
            # All have one size.
            vectors = [row for row in rows if isinstance(row, Vector)]
            norm = size * max((row.norm for row in vectors), default=0.0)
            is_huge = bool(vectors) and norm > MAX_RMS * math.sqrt(vectors[0].size)
            shown = f"|scale| · ‖vector‖ = {norm:.3g}"
        if is_huge:
            _has_warned = True
            warnings.warn(
                f"Steer adds a vector with {shown}, far above the residual stream of most models, "
                "so the output is likely to be noise; a scale that is relative to the stream is "
                'norm="match" with scale=1. This is shown once per process.',
                ScaleWarning,
                stacklevel=4,
            )


def in_full(value: object) -> object:
    """Return what a short form of an edit stands for: a pair (vector, layer), or an object with
    `as_edit()`, as a `Direction`. Other values are returned as they are.
    """
    as_edit = getattr(value, "as_edit", None)
    if as_edit is not None:
        return as_edit()
    return Steer(*value) if is_placed_vector(value) else value


def is_placed_vector(value: object) -> TypeGuard[tuple[Any, SupportsIndex]]:
    """Return whether a value is the pair (vector, layer), a tuple, which stands for its Steer.

    Raises:
        SpecError: it is (name, number), where the number may be a layer or a scale.
    """
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    vector, layer = value
    if isinstance(vector, (str, Named)):
        if isinstance(layer, numbers.Real):
            shown = repr(vector) if isinstance(vector, str) else repr(vector.name)
            raise SpecError(
                "",
                f"({shown}, {layer}) can be read two ways: write Steer({shown}, layer={layer}) or "
                f"Steer({shown}, scale={layer})",
            )
        return False
    if not is_int(as_number(layer)):
        return False
    if isinstance(vector, (list, tuple)):
        return all(isinstance(number, numbers.Real) for number in vector)
    return isinstance(vector, Vector) or hasattr(vector, "__array__")
