"""`ReadOut`: what a request returns of some positions; the base of its kinds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from midstream.errors import SpecError
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
from midstream.validation import at, kind, show


@dataclass(frozen=True, slots=True)
class Context:
    """What the read-outs of a plan are resolved with."""

    shape: ModelShape
    selections: PromptSelections
    select: Callable[[Positions], Where]


class ReadOutEngine(Protocol):
    """What an engine has for read-outs.

    `last_stage` are the taps of the pipeline stage with the final norm and the head; `parts` the
    number of parts of a tap's vectors, where the ranks have these in parts.
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


class ReadOut(ABC):
    """What a request returns of some positions; `KINDS` has all kinds.

    The properties here are what the kinds without such a field have.
    """

    __slots__ = ()

    # Attribute of outputs with the result, and first part of the site of each resolved tap.
    key: ClassVar[str]
    # Whether it reads rows of the stream with registered weights or the head: see `readout_rows`.
    decodes: ClassVar[bool] = False

    layers: Layers
    sites: Sites
    positions: Positions

    @staticmethod
    @abstractmethod
    def is_form(value: Mapping[str, Any]) -> bool:
        """Return whether a dict is the form of this kind, and of none before it in `KINDS`."""

    @classmethod
    @abstractmethod
    def parse(cls, value: object) -> ReadOut:
        """Read one, or a dict of the constructor's arguments."""

    @abstractmethod
    def to_dict(self) -> dict[str, object]:
        """Return the JSON form, which `parse` reads."""

    @abstractmethod
    def without_place(self) -> ReadOut:
        """Return a copy without sink, tag, request_id, metadata, stream and layout."""

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
    def stream(self) -> bool:
        """Whether intermediate outputs have the rows so far."""
        return False

    @property
    def reuse(self) -> bool:
        """Whether rows may come from earlier requests."""
        return False

    @property
    def heads(self) -> tuple[int, ...] | None:
        """The attention heads that are returned; None: all."""
        return None

    @property
    def sink(self) -> str:
        """Where the rows go."""
        return MEMORY

    @property
    def tag(self) -> str:
        """Name under which a sink stores them."""
        return ""

    @property
    def request_id(self) -> str:
        """Unique name under which a sink stores them."""
        return ""

    @property
    def metadata(self) -> Metadata:
        """JSON values that a sink stores with them."""
        return NO_METADATA

    @property
    def layout(self) -> str:
        """Layout of a sink's files."""
        return ""

    @property
    def place(self) -> tuple[str, str, str]:
        """(sink, tag, request_id): the destination of the rows."""
        return self.sink, self.tag, self.request_id

    def __repr__(self) -> str:
        return short_repr(type(self), self.to_dict())

    def _set(self, **fields: object) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def _set_where(
        self, layers: object, sites: object, positions: object, phase: object, exclude: object
    ) -> None:
        """Read which vectors are read, in any of their forms."""
        chosen_layers, chosen_sites = read_taps(layers, sites, "layers", "sites")
        if chosen_layers is None:
            raise SpecError("", 'missing field `layers`: give a list, or "all"')
        if chosen_sites is not None and "logits" in chosen_sites:
            raise SpecError("sites", LOGITS)
        self._set(layers=chosen_layers, sites=chosen_sites or Sites("resid_post"))
        self._set(positions=Positions.within(positions, phase, exclude))

    def _set_stream(self, stream: object) -> None:
        """Read `stream`, and check the order of the positions, each of which has a row."""
        with at("stream"):
            self._set(stream=read_stream(stream, MEMORY))
        check_row_order(self.positions, None)

    def _set_destination(self, fields: Mapping[str, Any]) -> None:
        """Read sink, tag, request_id, metadata, stream and layout."""
        with at("sink"):
            sink = read_name(fields["sink"], may_be_empty=False)
        with at("tag"):
            tag = read_name(fields["tag"])
        with at("request_id"):
            request_id = read_name(fields["request_id"])
        with at("metadata"):
            metadata = fields["metadata"]
            kept = NO_METADATA if metadata is None else Metadata(metadata) or NO_METADATA
        with at("stream"):
            stream = read_stream(fields["stream"], sink)
        with at("layout"):
            layout = _read_layout(fields["layout"], sink)
        self._set(sink=sink, tag=tag, request_id=request_id, metadata=kept)
        self._set(stream=stream, layout=layout)

    @property
    def _has_place(self) -> bool:
        """Whether `without_place` leaves anything out."""
        described = self.metadata is not NO_METADATA
        return self.place != (MEMORY, "", "") or described or self.stream or bool(self.layout)

    def _destination(self) -> dict[str, object]:
        """Return the JSON form of the fields of `_set_destination` that are set."""
        fields: dict[str, object] = {}
        if self.sink != MEMORY:
            fields["sink"] = self.sink
        if self.tag:
            fields["tag"] = self.tag
        if self.request_id:
            fields["request_id"] = self.request_id
        if self.metadata:
            fields["metadata"] = self.metadata.to_dict()
        if self.stream:
            fields["stream"] = True
        if self.layout:
            fields["layout"] = self.layout
        return fields


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
