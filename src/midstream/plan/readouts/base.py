"""`ReadOut`: what a request returns of some positions; the base of its kinds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar

from midstream.errors import SpecError
from midstream.plan.argument_names import (
    FrozenFields,
    only_set,
    parameters_of,
    read_named,
    shown_names,
)
from midstream.plan.positions.position_set import Where
from midstream.plan.positions.positions import Positions
from midstream.plan.positions.row_order import check_row_order
from midstream.plan.positions.select import PromptSelections
from midstream.plan.resolved import LensMap, ResolvedCapture, SaeEncoder
from midstream.plan.selection import LOGITS, Layers, Sites, read_taps
from midstream.plan.shape import ModelShape
from midstream.plan.short_repr import short_repr
from midstream.plan.sink_target import MEMORY, NO_METADATA, Metadata, read_name
from midstream.sites import Tap
from midstream.validation import kind, show

# What `without_place` leaves of each field of a destination that a kind has.
_NO_PLACE = {
    "sink": MEMORY, "tag": "", "request_id": "", "metadata": NO_METADATA, "stream": False,
    "layout": "",
}  # fmt: skip

R = TypeVar("R", bound="ReadOut")


@dataclass(frozen=True, slots=True)
class Context:
    """What the read-outs of a plan are resolved with."""

    shape: ModelShape
    selections: PromptSelections
    select: Callable[[Positions], Where]


class ReadOutEngine(Protocol):
    """What an engine has for read-outs: `last_stage`, the taps of the pipeline stage with norm and
    head; `parts`, the number of parts of a tap's vectors, where ranks have these in parts.
    """

    @property
    def vocabulary(self) -> int: ...

    @property
    def last_stage(self) -> frozenset[Tap]: ...

    @property
    def parts(self) -> Mapping[Tap, int]: ...

    def token_id(self, text: str) -> int:
        """Return the id of a token's text."""

    def lens_maps(self, name: str, depths: list[int]) -> tuple[LensMap, ...]:
        """Return the maps of a registered lens after so many layers."""

    def sae_tap(self, name: str) -> Tap | None:
        """Return where a registered SAE was trained; None: unknown."""

    def sae_encoder(self, name: str) -> SaeEncoder:
        """Return the encoder of a registered SAE."""


class ReadOut(FrozenFields, ABC):
    """What a request returns of some positions; `KINDS` has all kinds."""

    __slots__ = ()

    # Attribute of outputs with the result, and first part of the site of each resolved tap.
    key: ClassVar[str]
    # Whether it reads rows of the stream with registered weights or the head: see `readout_rows`.
    decodes: ClassVar[bool] = False

    layers: Layers
    sites: Sites
    positions: Positions

    # What the kinds without such a field have.
    stream: bool = False  # whether intermediate outputs have the rows so far
    reuse: bool = False  # whether rows may come from earlier requests
    heads: tuple[int, ...] | None = None  # the attention heads that are returned; None: all
    sink: str = MEMORY
    tag: str = ""
    request_id: str = ""
    metadata: Metadata = NO_METADATA
    layout: str = ""

    @staticmethod
    @abstractmethod
    def is_form(value: Mapping[str, Any]) -> bool:
        """Return whether a dict is the form of this kind, and of none before it in `KINDS`."""

    @classmethod
    def parse(cls: type[R], value: object) -> R:
        """Read one, or a dict of the constructor's arguments."""
        if isinstance(value, cls):
            return value
        assert isinstance(value, Mapping)
        return cls(**read_named(value, *parameters_of(cls)))

    def __dir__(self) -> list[str]:
        return shown_names(self)

    @abstractmethod
    def to_dict(self) -> dict[str, object]:
        """Return the JSON form, which `parse` reads."""

    def without_place(self: R) -> R:
        """Return a copy without sink, tag, request_id, metadata, stream and layout."""
        if not self._has_place:
            return self
        own = {name: value for name, value in _NO_PLACE.items() if name in self.__slots__}
        return self._changed(**own)

    @abstractmethod
    def resolve(self, source: int, context: Context) -> list[ResolvedCapture]:
        """Resolve it, the plan's read-out `source`, against a model and a prompt."""

    @classmethod
    def check_together(cls, captures: Sequence[ResolvedCapture]) -> None:
        """Check that a request can have all of its read-outs of this kind."""
        return

    def bind(self, engine: ReadOutEngine) -> ReadOut:
        """Return it with ids in place of tokens, and what else is to be known before `resolve`."""
        return self

    def finish(self, capture: ResolvedCapture, engine: ReadOutEngine) -> ResolvedCapture:
        """Return it, resolved, with what the engine has for it; check that the engine can."""
        return capture

    @property
    def weights(self) -> tuple[tuple[str, str], ...]:
        """(kind, name) of the registered weights that it reads."""
        return ()

    @property
    def returns_each(self) -> bool:
        """Whether a row is returned for each position, rather than one of all of them."""
        return True

    @property
    def returns_vectors(self) -> bool:
        """Whether vectors are returned, and nothing that is made of them."""
        return False

    @property
    def selections(self) -> tuple[Positions, ...]:
        """All positions that it names."""
        return (self.positions,)

    def named_positions(self) -> AbstractContextManager[None]:
        """Name the field of the positions in the path of a SpecError in the `with` block."""
        return nullcontext()

    @property
    def place(self) -> tuple[str, str, str]:
        """(sink, tag, request_id): the destination of the rows."""
        return self.sink, self.tag, self.request_id

    def __repr__(self) -> str:
        return short_repr(type(self), self.to_dict())

    def _set_where(
        self, layers: object, sites: object, positions: object, phase: object, exclude: object
    ) -> None:
        """Read which vectors are read, in any of their forms."""
        chosen_layers, chosen_sites = read_taps(layers, sites, "layers", "sites")
        if chosen_layers is None:
            named = (
                f', as {type(self).__name__}("all", sites={show(sites)})'
                if sites is not None
                else ""
            )
            raise SpecError("", f'missing field `layers`: give a list, or "all"{named}')
        if chosen_sites is not None and "logits" in chosen_sites:
            raise SpecError("sites", LOGITS)
        self._set(layers=chosen_layers, sites=chosen_sites or Sites("resid_post"))
        self._set(positions=Positions.within(positions, phase, exclude))

    def _set_stream(self, stream: object) -> None:
        """Read `stream`, and check the order of the positions, each of which has a row."""
        self._read(partial(read_stream, sink=MEMORY), stream=stream)
        check_row_order(self.positions, None)

    def _set_destination(self, fields: Mapping[str, Any]) -> None:
        """Read sink, tag, request_id, metadata, stream and layout."""
        self._read(partial(read_name, may_be_empty=False), sink=fields["sink"])
        self._read(read_name, tag=fields["tag"], request_id=fields["request_id"])
        self._read(lambda value: Metadata(value) or NO_METADATA, metadata=fields["metadata"])
        self._read(partial(read_stream, sink=self.sink), stream=fields["stream"])
        self._read(partial(_read_layout, sink=self.sink), layout=fields["layout"])

    @property
    def _has_place(self) -> bool:
        """Whether `without_place` leaves anything out."""
        described = self.metadata is not NO_METADATA
        return self.place != (MEMORY, "", "") or described or self.stream or bool(self.layout)

    def _destination(self) -> dict[str, object]:
        """Return the JSON form of the fields of `_set_destination` that are set."""
        return only_set(
            sink="" if self.sink == MEMORY else self.sink,
            tag=self.tag,
            request_id=self.request_id,
            metadata=self.metadata.to_dict() if self.metadata else None,
            stream=self.stream,
            layout=self.layout,
        )


def check_tokens(capture: ResolvedCapture, engine: ReadOutEngine) -> None:
    """Check that a model has the tokens whose logits are returned."""
    assert capture.pattern is not None
    for index, (token, _) in enumerate(capture.pattern.keys):
        if token >= engine.vocabulary:
            raise SpecError(
                f"tokens[{index}]",
                f"there is no token {token}: the model has {engine.vocabulary}, 0 to "
                f"{engine.vocabulary - 1}",
            )


def check_names(captures: Sequence[ResolvedCapture], what: str) -> None:
    """Check that no two read-outs of a kind have one name."""
    sources: dict[str, int] = {}
    for capture in captures:
        other = sources.setdefault(capture.taps[0][0], capture.source)
        if other != capture.source:
            raise SpecError(
                f"capture[{capture.source}].name",
                f"capture[{other}] is {what} of this name too; give one of them another `name`",
            )


def read_stream(value: object, sink: str) -> bool:
    """Read whether intermediate outputs have rows, which the sink "memory" allows."""
    if not isinstance(value, bool):
        raise SpecError("", f"expected `bool`, got {kind(value)}")
    if value and sink != MEMORY:
        raise SpecError(
            "",
            f'stream=True requires the sink "memory", got {show(sink)}; remove `stream`, or add a '
            "capture for memory",
        )
    return value


def _read_layout(value: object, sink: str) -> str:
    layout = read_name(value)
    if layout and sink == MEMORY:
        raise SpecError("", "must be omitted for the sink memory, which writes no files")
    return layout
