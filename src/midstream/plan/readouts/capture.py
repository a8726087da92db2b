"""`Capture`: which activations of a request to record, and where to send them."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

from midstream.errors import SpecError
from midstream.plan.argument_names import (
    accept_spellings,
    only_set,
    other_argument,
    parameters_of,
    read_named,
)
from midstream.plan.forms import IndicesLike, LayersLike, PhaseLike, PositionsLike, SitesLike
from midstream.plan.heads import head_size, read_ordered_indices
from midstream.plan.positions.positions import Positions
from midstream.plan.positions.row_order import check_row_order
from midstream.plan.readouts.base import Context, ReadOut
from midstream.plan.readouts.reduced import check_reduced, resolve_reduced
from midstream.plan.resolved import REDUCING, ResolvedCapture, limited
from midstream.plan.selection import Layers, Sites
from midstream.plan.sink_target import MEMORY, Metadata
from midstream.plan.tap_lookup import find_taps
from midstream.validation import INT_LIMIT, as_list, at, is_int, kind, read_int, show

_FORMS = "Capture(layers=[3, 4]); or short: True, layers, or names such as `resid_post.10`"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Capture(ReadOut):
    """Record the vectors of the selected tokens at every selected site of every selected layer.

    Captured rows of captures with equal sink, tag and request_id are delivered together.
    """

    layers: Layers
    sites: Sites
    positions: Positions
    codec: str
    return_: str
    sink: str
    tag: str
    request_id: str
    metadata: Metadata = field(hash=False)
    stream: bool
    layout: str
    heads: tuple[int, ...] | None
    reduce: str
    max_rows: int | None
    reuse: bool

    key = "activations"

    @accept_spellings
    def __init__(
        self,
        layers: LayersLike | None = None,
        sites: SitesLike | None = None,
        positions: PositionsLike = "all",
        phase: PhaseLike | None = None,
        exclude: PositionsLike | None = None,
        *,
        codec: Any = None,
        return_: Literal["sharded", "gathered"] | None = None,
        sink: str = MEMORY,
        tag: str = "",
        request_id: str = "",
        metadata: Mapping[str, Any] | None = None,
        stream: bool = False,
        layout: str = "",
        heads: IndicesLike | None = None,
        reduce: str = "",
        max_rows: int | None = None,
        reuse: bool = False,
    ) -> None:
        """Create a capture; each field accepts any of its forms.

        Args:
            layers: any form of Layers: "all", an int, or a list, tuple, range or array of ints.
                May be omitted where the names of `sites` have layers, and must be where no site
                has any, as `embed` and `final_norm`; among others, they are captured once.
            sites: any form of Sites: a name or a list of names; default "resid_post". Or names
                that have layers, such as `blocks.10.hook_resid_post`, see `midstream.sites.parse`.
            positions: any form of Positions. Rows are in the order of their positions; a list of
                single ones ascends, see `Positions`.
            phase: "prompt" or "generated" restricts the positions to tokens of that phase.
            exclude: positions to exclude.
            codec: encoding of the captured rows, the same for all captures of a request: "raw", or
                a compressed form, see `midstream.codecs`. None: midstream's setting `codec`.
            return_: which ranks of a tensor-parallel group transfer the captured rows, the same
                for all captures of a request. All ranks hold the same vectors. "gathered": the
                first rank transfers all; "sharded": of n ranks, each transfers every n-th tap of
                a token, 1/n of the bytes. The result is the same. None: midstream's setting
                `return`. In a dict the field is `return`.
            sink: where the captured rows go: "memory" (they are returned on the output), or the
                name of a sink that the engine was started with.
            tag: name under which the sink stores them, possibly shared with other requests; 1 to
                128 of A-Z a-z 0-9 _ . -
            request_id: unique name under which the sink stores them; empty: generated from the
                request's own id and a unique suffix.
            metadata: JSON values that the sink stores with them.
            stream: whether intermediate outputs include the rows captured so far, or with `DELTA`
                those that no output has had; the last output has all rows in either case. Only for
                the sink "memory" and `AsyncLLM.generate`.
            layout: layout of the files of sinks that have several, such as `filesystem`:
                "per_file", "packed" or "sharded"; empty: that of the sink's settings.
            heads: an attention head or a list of heads to return, at sites whose vectors are of
                heads: [rows, heads, head_dim], in the given order. At k, v and rot_k, key-value
                heads.
                Only for the sink "memory". The vectors of all heads are transferred, and count as
                bytes; heads are chosen as the rows are read. If several captures of a request
                select a site of a layer, its rows have the heads of any of them. None: all heads.
            reduce: what of the rows is returned, float32, computed on the device. "norm": the
                length of each row, [rows, 1]. The others reduce all selected rows, which must be
                of the prompt, to one that has the position of the last of them: "mean" and "max",
                of each component, [1, width]; "moments": mean and population variance of each
                component, [2, width]. "device": the rows, of tokens of the prompt, stay in the
                device memory of the workers for as long as the `Activations` exist, for `LLM.ask`
                and as `rows` of a Steer or Replace of later requests (see `Activations.on_device`);
                what is returned is "norm". Only for the sink "memory", without `stream`, `heads`
                and a lossy codec; no other capture of the request may select the same site and
                layer. Empty: the rows themselves.
            max_rows: record the first `max_rows` selected positions of the request and leave the
                others out, at every site and layer. The receipt tells how many were left out. Only
                these rows count for the engine's memory. None: all.
            reuse: whether rows may come from earlier requests with `reuse` that had the same tokens
                and edits up to there, so that a hit in the prefix cache need not be computed again
                for its rows. The receipt tells how many did. Needs midstream's setting
                `reuse_bytes`; not with `reduce`, `stream` or a sink that gets rows while requests
                run.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        self._set_where(layers, sites, positions, phase, exclude)
        self._set(codec="" if codec in (None, "") else _read_codec(codec))
        with at("return"):
            self._set(return_="" if return_ is None else _read_choice(return_, RETURNS))
        place = {"sink": sink, "tag": tag, "request_id": request_id, "metadata": metadata}
        self._set_destination({**place, "stream": stream, "layout": layout})
        self._set(heads=_read_heads(heads, self.sink))
        self._read(partial(_read_choice, choices=REDUCTIONS), reduce=reduce)
        self._read_given(_read_max_rows, max_rows=max_rows)
        self._read(partial(_read_reuse, is_streamed=self.stream), reuse=reuse)
        if self.reduce:
            self._check_reduced()
        if self.returns_each:
            check_row_order(self.positions, None)

    @staticmethod
    def is_form(value: Mapping[str, Any]) -> bool:
        return True

    @classmethod
    def parse(cls, value: object) -> Capture:
        """Read a Capture, a dict of the constructor's arguments with `return` for `return_`, or a
        short form, see `read_short_capture`.
        """
        if isinstance(value, Capture):
            return value
        if isinstance(value, ReadOut):
            problem = f"`{type(value).__name__}` is for single requests; capture activations here"
            raise SpecError("", problem)
        short = read_short_capture(value)
        if short is not None:
            return short
        if not isinstance(value, Mapping):
            raise SpecError(
                "",
                f"expected a `Capture`, or its dict, got {kind(value)}"
                + (other_argument(value) or f", such as {_FORMS}"),
            )
        fields = read_named(value, (), FIELDS)
        by_rank = fields.pop("return", None)
        return Capture(**fields, return_=by_rank)

    def resolve(self, source: int, context: Context) -> list[ResolvedCapture]:
        shape = context.shape
        taps = find_taps(self.layers, self.sites, shape, "layers", "sites")
        if self.heads is not None:
            for site, layer in taps:
                size = shape.size((site, layer))
                head_size(self.heads, size, "heads", f"{site} of layer {layer}")
        where = context.select(self.positions)
        if self.reduce:
            length = context.selections.prompt.length
            return resolve_reduced(self.reduce, source, taps, where, length, shape)
        return [limited(ResolvedCapture(taps, where, source), self.max_rows)]

    @classmethod
    def check_together(cls, captures: Sequence[ResolvedCapture]) -> None:
        if any(capture.pattern is not None for capture in captures):
            check_reduced(captures)

    @property
    def returns_each(self) -> bool:
        return self.reduce not in REDUCING

    @property
    def returns_vectors(self) -> bool:
        return not self.reduce

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form, which `parse` reads; destination fields only where set."""
        return {
            **({"layers": self.layers.emit()} if self.sites.in_layers else {}),
            "sites": self.sites.emit(),
            **self.positions.to_dict(),
            **only_set(**{"codec": self.codec, "return": self.return_}),
            **self._destination(),
            **only_set(
                heads=list(self.heads or ()),
                reduce=self.reduce,
                max_rows=self.max_rows,
                reuse=self.reuse,
            ),
        }

    def _check_reduced(self) -> None:
        """Check that the other fields are possible where rows are reduced."""
        for name, is_set, right in (
            ("codec", self.codec not in ("", "raw"), "codec raw"),
            ("sink", self.sink != MEMORY, 'sink "memory"'),
            ("stream", self.stream, "stream=False"),
            ("heads", self.heads is not None, "all heads"),
            ("max_rows", self.max_rows is not None, "every selected row"),
            ("reuse", self.reuse, "reuse=False"),
        ):
            if is_set:
                raise SpecError(name, f'with reduce="{self.reduce}" there is only {right}')


FIELDS = tuple(name.rstrip("_") for name in parameters_of(Capture)[1])  # of its dict


def read_short_capture(value: object) -> Capture | None:
    """Return the capture of every token that a short form stands for: True or "all", layers as an
    int, a list, a range or an array, or sites whose names have layers; None: it is none of these.
    """
    if isinstance(value, bool):
        return Capture("all") if value else None
    value = as_list(value)
    items = [value] if isinstance(value, (str, numbers.Integral)) else value
    if not isinstance(items, (list, tuple, range)) or not items:
        return None
    if isinstance(items, range) or all(map(is_int, items)) or value == "all":
        return Capture(value)  # type: ignore[arg-type]
    if all(isinstance(name, str) for name in items) and "all" not in items:
        return Capture(sites=value)  # type: ignore[arg-type]
    return None


def _read_heads(value: object, sink: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    heads = read_ordered_indices(value, "heads")
    if sink != MEMORY:
        raise SpecError(
            "heads",
            f'heads are chosen only for the sink "memory", got {show(sink)}, which gets whole '
            "vectors: omit `heads`",
        )
    return heads


def _read_max_rows(value: object) -> int:
    max_rows = read_int(value)
    if not 1 <= max_rows <= INT_LIMIT:
        raise SpecError("", f"expected at least 1, got {max_rows}")
    return max_rows


def _read_reuse(value: object, is_streamed: bool) -> bool:
    if not isinstance(value, bool):
        raise SpecError("", f"expected `bool`, got {kind(value)}")
    if value and is_streamed:
        raise SpecError("", "with stream=True every row is computed: omit `reuse` or `stream`")
    return value


def _read_choice(value: object, choices: Sequence[str]) -> str:
    if not isinstance(value, str):
        raise SpecError("", f"expected `str`, got {kind(value)}")
    if value and value not in choices:
        raise SpecError("", f"expected one of {', '.join(choices)}, got {show(value)}")
    return value


def _read_codec(value: object) -> str:
    from midstream.codecs import parse_codec

    return parse_codec(value).spec


Return = Literal["gathered", "sharded"]
RETURNS: tuple[Return, ...] = get_args(Return)
GATHERED, SHARDED = RETURNS
REDUCTIONS = ("mean", "max", "norm", "moments", "device")
