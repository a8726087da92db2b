"""`Attention`: what of the attention patterns of some queries to return, reduced on the worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from midstream.errors import SpecError
from midstream.spec.argument_names import accept_spellings, read_named
from midstream.spec.capture import REDUCTIONS, Capture
from midstream.spec.features import Features
from midstream.spec.forms import IndicesLike, LayersLike, PhaseLike, PositionsLike
from midstream.spec.heads import read_ordered_indices
from midstream.spec.lens import Lens, is_lens
from midstream.spec.logits import Logits
from midstream.spec.positions.positions import Positions
from midstream.spec.sink_target import MEMORY, read_name
from midstream.validation import at, kind, listed, read_int, show

MAX_TOP_KEYS = 1024
MAX_FULL_KEYS = 4096
FULL: Literal["full"] = "full"
SCORES: Literal["scores"] = "scores"
_FIELDS = (
    "heads", "queries", "phase", "exclude", "name", "stream", "sink", "tag", "request_id",
    "metadata", "layout",
)  # fmt: skip
# Fields that a Capture has in its JSON form alike.
_PLACE = ("sink", "tag", "request_id", "metadata", "stream", "layout")
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
class Attention(Capture):
    """Return the attention weights of some queries, reduced to a few numbers for each head.

    The weights are those of the softmax over all keys that the query sees: the keys at its own
    position and before it, within the layer's sliding window. The rows of an `Attention` are in
    `output.attention`, see `midstream.results.attention.AttentionResults`. With a `sink` they are
    in the attribute `attention` of what the sink is given.

    The engine must tap the queries: `rot_q` in the setting `sites`, or `q` for models without
    rotary embedding.
    """

    reduce: Reduction
    name: str

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
        place |= {"metadata": metadata, "layout": layout}
        with queries_named():
            Capture.__init__(self, layers, "rot_q", queries, phase, exclude, stream=stream, **place)
        if chosen is not None:
            object.__setattr__(self, "heads", read_ordered_indices(chosen, "heads"))
        with at("reduce"):
            object.__setattr__(self, "reduce", read_reduction(reduce))
        with at("name"):
            object.__setattr__(self, "name", read_name(name))

    @staticmethod
    def parse(value: object) -> Attention:
        """Read an Attention, or a dict of the constructor's arguments.

        Raises:
            SpecError: a field is unknown, missing or malformed.
        """
        if isinstance(value, Attention):
            return value
        assert isinstance(value, Mapping)
        return Attention(**read_named(value, ("layers", "reduce"), _FIELDS))

    @property
    def selections(self) -> tuple[Positions, ...]:
        """All positions that it names: queries, and keys of a `Mass`."""
        keys = (self.reduce.positions,) if isinstance(self.reduce, Mass) else ()
        return (self.positions, *keys)

    def without_place(self) -> Capture:
        """Return a copy without sink, tag, request_id, metadata, stream and layout."""
        if self.place == (MEMORY, "", "") and not (self.metadata or self.stream):
            return self
        return Attention(
            self.layers, self.heads, self.positions, reduce=self.reduce, name=self.name
        )

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form, which `parse` reads."""
        fields: dict[str, object] = {"layers": self.layers.emit()}
        if self.heads:
            fields["heads"] = list(self.heads)
        queries = self.positions.to_dict()
        fields["queries"] = queries.pop("positions")
        fields |= queries
        fields["reduce"] = self.reduce if isinstance(self.reduce, str) else self.reduce.emit()
        if self.name:
            fields["name"] = self.name
        capture_fields = Capture.to_dict(self)
        return fields | {name: capture_fields[name] for name in _PLACE if name in capture_fields}


def parse_capture(value: object) -> Capture:
    """Read a Capture, an Attention, a Features, a Lens, a Logits, or the dict of one."""
    is_attention = isinstance(value, Mapping) and (
        "queries" in value or ("reduce" in value and not _reduces_rows(value))
    )
    if is_attention or isinstance(value, Attention):
        return Attention.parse(value)
    if (isinstance(value, Mapping) and "sae" in value) or isinstance(value, Features):
        return Features.parse(value)
    if (isinstance(value, Mapping) and is_lens(value)) or isinstance(value, Lens):
        return Lens.parse(value)
    is_logits = isinstance(value, Mapping) and ("top" in value or "tokens" in value)
    if is_logits or isinstance(value, Logits):
        return Logits.parse(value)
    return Capture.parse(value)


def _reduces_rows(value: Mapping[str, Any]) -> bool:
    """Return whether a dict with `reduce` is the form of a Capture."""
    word = value["reduce"]
    if not isinstance(word, str) or word in ("entropy", FULL, SCORES):
        return False
    return word in ("", *REDUCTIONS) or "sites" in value or "site" in value


def read_reduction(value: object) -> Reduction:
    """Read a reduction or its JSON form.

    The forms are `{"top_keys": 16}`, `{"mass": {"positions": …}}`, `"entropy"`, `"full"` and
    `"scores"`. The value of `mass` may also be positions alone.
    """
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
def queries_named() -> Iterator[None]:
    """Name the field `queries` in the path of a SpecError in the `with` block that names
    `positions`.
    """
    with _named("positions", "queries"):
        yield


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
