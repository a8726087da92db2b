"""`Attention`: what of the attention patterns of some queries to return, reduced on the worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from midstream.errors import SpecError
from midstream.plan.argument_names import accept_spellings, only_set, read_named
from midstream.plan.forms import IndicesLike, LayersLike, PhaseLike, PositionsLike
from midstream.plan.heads import head_size, read_ordered_indices
from midstream.plan.positions.position_set import Where
from midstream.plan.positions.positions import Positions
from midstream.plan.positions.ranges import Ranges
from midstream.plan.positions.row_order import check_row_order
from midstream.plan.positions.select import PromptSelections
from midstream.plan.readouts.base import Context, ReadOut
from midstream.plan.readouts.capture import REDUCTIONS
from midstream.plan.resolved import Pattern, PatternKind, ResolvedCapture
from midstream.plan.selection import Layers, Sites
from midstream.plan.shape import ModelShape
from midstream.plan.sink_target import MEMORY, Metadata, read_name
from midstream.plan.tap_lookup import find_layer
from midstream.sites import Tap
from midstream.validation import at, kind, listed, read_int, show

ATTENTION = "attention"
# Queries are read at the first of these that the engine taps.
QUERY_SITES = ("rot_q", "q")
# Rows of the whole pattern are as long as a multiple of this, so that few lengths occur.
_KEYS_STEP = 64
MAX_TOP_KEYS = 1024
MAX_FULL_KEYS = 4096
FULL: Literal["full"] = "full"
SCORES: Literal["scores"] = "scores"
_WORDS = ("top_keys", "mass", "entropy", "full", "scores")


@dataclass(frozen=True, slots=True)
class TopKeys:
    """The k keys with the largest weights, and these weights.

    Attributes:
        k: number of keys, 1 to 1024. A query that sees fewer keys has the position −1 and the
            weight 0 in the remaining places.
    """

    k: int

    def __post_init__(self) -> None:
        with at("k"):
            k = read_int(self.k)
            if not 1 <= k <= MAX_TOP_KEYS:
                raise SpecError("", f"expected 1 to {MAX_TOP_KEYS}, got {k}")
        object.__setattr__(self, "k", k)

    def emit(self) -> object:
        """Return the JSON form."""
        return {"top_keys": self.k}


@dataclass(frozen=True, slots=True, init=False)
class Mass:
    """The sum of the weights of the keys at some positions.

    Attributes:
        positions: the keys; those after the query have no weight.
    """

    positions: Positions

    def __init__(
        self,
        positions: PositionsLike,
        phase: PhaseLike | None = None,
        exclude: PositionsLike | None = None,
    ) -> None:
        """Create it; see `Capture` for the arguments."""
        object.__setattr__(self, "positions", Positions.within(positions, phase, exclude))

    def emit(self) -> object:
        """Return the JSON form."""
        return {"mass": self.positions.to_dict()}


@dataclass(frozen=True, slots=True)
class Entropy:
    """The entropy of the weights, −Σ w · ln w, in nats."""

    def emit(self) -> object:
        """Return the JSON form."""
        return "entropy"


Reduction = TopKeys | Mass | Entropy | Literal["full", "scores"]


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Attention(ReadOut):
    """Return the attention weights of some queries, reduced to a few numbers for each head.

    The weights are those of the softmax over all keys that the query sees: the keys at its own
    position and before it, within the layer's sliding window. The rows of an `Attention` are in
    `output.attention`, see `midstream.results.readouts.attention.AttentionResults`. With a `sink`
    they are in the attribute `attention` of what the sink is given.

    The engine must tap the queries: `rot_q` in the setting `sites`, or `q` for models without
    rotary embedding.
    """

    layers: Layers
    sites: Sites
    positions: Positions
    heads: tuple[int, ...] | None
    reduce: Reduction
    name: str
    sink: str
    tag: str
    request_id: str
    metadata: Metadata = field(hash=False)
    stream: bool
    layout: str

    key = ATTENTION

    @accept_spellings
    def __init__(
        self,
        layers: LayersLike,
        heads: IndicesLike | Literal["all"] | None = "all",
        queries: PositionsLike = "all",
        *,
        reduce: Reduction | Mapping[str, Any] | str,
        phase: PhaseLike | None = None,
        exclude: PositionsLike | None = None,
        name: str = "",
        stream: bool = False,
        sink: str = MEMORY,
        tag: str = "",
        request_id: str = "",
        metadata: Mapping[str, Any] | None = None,
        layout: str = "",
    ) -> None:
        """Create it; each field accepts any of its forms.

        Args:
            layers: "all", an index, or a list of indices.
            heads: query heads, from 0: "all", an index, or a list of indices, whose order the
                result keeps.
            queries: the positions whose queries are read; any form of Positions.
            reduce: `TopKeys(k)`, `Mass(positions)`, `Entropy()`, "full": the weight of every key,
                for queries before position 4096; or "scores": the same before the softmax.
            phase: "prompt" or "generated" restricts the queries to tokens of that phase.
            exclude: queries to exclude.
            name: key of the result, for several of one layer: `output.attention[name, layer]`.
            stream: as in `Capture`.
            sink: "memory", or the name of a sink that keeps attention, such as `filesystem`.
            tag, request_id, metadata, layout: as in `Capture`.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        chosen = None if isinstance(heads, str) and heads == "all" else heads
        place: dict[str, Any] = {"sink": sink, "tag": tag, "request_id": request_id}
        place |= {"metadata": metadata, "stream": stream, "layout": layout}
        with self.named_positions():
            self._set_where(layers, "rot_q", queries, phase, exclude)
            self._set_destination(place)
            check_row_order(self.positions, None)
        self._set(heads=None if chosen is None else read_ordered_indices(chosen, "heads"))
        self._read(read_reduction, reduce=reduce)
        self._read(read_name, name=name)

    @staticmethod
    def is_form(value: Mapping[str, Any]) -> bool:
        return "queries" in value or ("reduce" in value and not _reduces_rows(value))

    @property
    def selections(self) -> tuple[Positions, ...]:
        """Queries, and keys of a `Mass`."""
        keys = (self.reduce.positions,) if isinstance(self.reduce, Mass) else ()
        return (self.positions, *keys)

    def named_positions(self) -> AbstractContextManager[None]:
        return _named("positions", "queries")

    def resolve(self, source: int, context: Context) -> list[ResolvedCapture]:
        with self.named_positions():
            where = context.select(self.positions)
        shape = context.shape
        layers = layers_of(self.layers, shape, "layers")
        with at("reduce"):
            reduced = reduction_of(self.reduce, where, context.selections)
        heads = tuple(sorted(self.heads or ()))
        pattern = pattern_of(layers, heads, reduced, shape, ("layers", "heads"))
        site = f"{self.key}.{self.name}" if self.name else self.key
        return [ResolvedCapture(tuple((site, layer) for layer in layers), where, source, pattern)]

    @classmethod
    def check_together(cls, captures: Sequence[ResolvedCapture]) -> None:
        sources: dict[Tap, int] = {}
        for capture in captures:
            for tap in capture.taps:
                other = sources.setdefault(tap, capture.source)
                if other != capture.source:
                    raise SpecError(
                        f"capture[{capture.source}].name",
                        f"capture[{other}] also returns attention of layer {tap[1]} under this "
                        "name; give one of them another `name`",
                    )

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form, which `parse` reads."""
        queries = self.positions.to_dict()
        return {
            "layers": self.layers.emit(),
            **only_set(heads=list(self.heads or ())),
            "queries": queries.pop("positions"),
            **queries,
            "reduce": self.reduce if isinstance(self.reduce, str) else self.reduce.emit(),
            **only_set(name=self.name),
            **self._destination(),
        }


def _reduces_rows(value: Mapping[str, Any]) -> bool:
    """Return whether a dict with `reduce` is the form of a Capture."""
    word = value["reduce"]
    if not isinstance(word, str) or word in ("entropy", FULL, SCORES):
        return False
    return word in ("", *REDUCTIONS) or "sites" in value or "site" in value


def read_reduction(value: object) -> Reduction:
    """Read a reduction, or its JSON form such as `{"top_keys": 16}` or `{"mass": positions}`."""
    if isinstance(value, (TopKeys, Mass, Entropy)):
        return value
    if isinstance(value, str) and value in ("entropy", FULL, SCORES):
        return Entropy() if value == "entropy" else FULL if value == FULL else SCORES
    if isinstance(value, Mapping) and len(value) == 1:
        ((word, argument),) = value.items()
        if word == "top_keys":
            with at("top_keys"), _named("k", ""):
                return TopKeys(argument)
        if word == "mass":
            with at("mass"):
                return _read_mass(argument)
    if isinstance(value, str) or (isinstance(value, Mapping) and len(value) == 1):
        word = value if isinstance(value, str) else next(iter(value))
        raise SpecError("", f"unknown reduction {show(str(word))}; known: {listed(_WORDS)}")
    raise SpecError(
        "",
        'expected TopKeys(k), Mass(positions), Entropy(), "full" or "scores", got ' + kind(value),
    )


def _read_mass(value: object) -> Mass:
    if isinstance(value, Mapping) and "positions" in value:
        return Mass(**read_named(value, ("positions",), ("phase", "exclude")))
    return Mass(value)  # type: ignore[arg-type]


@contextmanager
def _named(theirs: str, ours: str) -> Iterator[None]:
    """Give the first field in the path of a SpecError in the `with` block another name."""
    try:
        yield
    except SpecError as error:
        path = error.path
        if path == theirs or path.startswith((f"{theirs}[", f"{theirs}.")):
            path = ours + path[len(theirs) :]
        raise type(error)(path, error.problem) from None


def pattern_of(
    layers: Sequence[int],
    heads: tuple[int, ...],
    reduced: tuple[PatternKind, int, Ranges],
    shape: ModelShape,
    fields: tuple[str, str],
) -> Pattern:
    """Return what is computed of the queries of some layers; `fields` names layers and heads."""
    with at(fields[0]):
        reads = tuple(_query_tap(layer, shape) for layer in layers)
    for tap in reads:
        if heads:
            head_size(heads, shape.size(tap), fields[1], f"{tap[0]} of layer {tap[1]}")
    counts = tuple(len(heads) or shape.num_heads(tap) for tap in reads)
    return Pattern(*reduced, heads, reads, counts)


def layers_of(selection: Layers, shape: ModelShape, field: str) -> list[int]:
    """Return the layers, ascending; `field` names them in messages."""
    indices = selection.indices
    if indices == "all":
        every = range(shape.num_layers)
        layers = [layer for layer in every if shape.reason((ATTENTION, layer)) is None]
        if not layers:
            raise SpecError(field, f"no layer's attention can be read: {_why(0, shape)}")
        return layers
    index_by_layer: dict[int, int] = {}
    for place, index in enumerate(indices):
        path = field if len(indices) == 1 else f"{field}[{place}]"
        with at(path):
            layer = find_layer(index, shape)
            if layer in index_by_layer:
                raise SpecError("", f"layer {index} is the same as layer {index_by_layer[layer]}")
            index_by_layer[layer] = index
            if shape.reason((ATTENTION, layer)) is not None:
                raise SpecError(
                    "", f"attention of layer {index} cannot be read: {_why(layer, shape)}"
                )
    return sorted(index_by_layer)


def _why(layer: int, shape: ModelShape) -> str:
    return shape.reason((ATTENTION, layer)) or ""


def _query_tap(layer: int, shape: ModelShape) -> Tap:
    for site in QUERY_SITES:
        if (site, layer) in shape.taps:
            return site, layer
    raise SpecError("", f"attention of layer {layer} cannot be read: {NO_QUERIES}")


NO_QUERIES = (
    'the engine does not tap its queries; add "rot_q" to midstream\'s setting `sites`, or "q" '
    "for a model without rotary embedding, as in "
    'LLM(…, midstream={"sites": ["resid_post", "rot_q"]})'
)


def reduction_of(
    reduction: Reduction, where: Where, selections: PromptSelections
) -> tuple[PatternKind, int, Ranges]:
    """Return the kind of a reduction, its numbers for a head, and the keys of a mass."""
    match reduction:
        case TopKeys(k):
            return "top", 2 * k, ()
        case Entropy():
            return "entropy", 1, ()
        case Mass(positions=positions):
            keys = selections.select(positions)
            if keys.matches or keys.last_from is not None:
                raise SpecError(
                    "positions",
                    "the keys of a mass must be known before tokens are generated: ids of "
                    'generated tokens and "last_row" are unsupported; restrict them with '
                    'phase="prompt"',
                )
            return "mass", 1, keys.ranges
        case _:
            return reduction, _full_keys(reduction, where, selections), ()


def _full_keys(word: str, where: Where, selections: PromptSelections) -> int:
    """Return the number of keys that a query at the last of some positions may see, rounded up."""
    last, max_tokens = where.possible[-1][1], selections.max_tokens
    length = None if max_tokens is None else selections.prompt.length + max_tokens - 1
    if last is None or (length is not None and length < last):
        last = length
    if last is None or last > MAX_FULL_KEYS:
        number = "any number of" if last is None else str(last)
        raise SpecError(
            "",
            f'a query may see {number} keys, and "{word}" returns at most {MAX_FULL_KEYS}; use '
            "TopKeys, Mass or Entropy, or earlier queries",
        )
    return -(-last // _KEYS_STEP) * _KEYS_STEP
