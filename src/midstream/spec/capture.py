"""A request to read vectors."""

from __future__ import annotations

from dataclasses import dataclass, replace

from midstream.errors import SpecError
from midstream.returning import RETURNS
from midstream.spec.destination import MEMORY, NO_METADATA, Metadata, read_name
from midstream.spec.fields import at, kind, read_fields, show
from midstream.spec.positions import Positions
from midstream.spec.selection import Layers, Sites

_REQUIRED = ("layers",)
_OPTIONAL = (
    "sites",
    "positions",
    "phase",
    "exclude",
    "codec",
    "return",
    "sink",
    "tag",
    "request_id",
    "metadata",
    "stream",
)
FIELDS = (*_REQUIRED, *_OPTIONAL)


@dataclass(frozen=True, slots=True, init=False)
class Capture:
    """Read the vectors of some tokens, at each of some sites of each of some layers.

    Rows of captures whose sink, tag and request_id are the same go there together.
    """

    layers: Layers
    sites: Sites
    positions: Positions
    codec: str
    return_: str
    sink: str
    tag: str
    request_id: str
    metadata: Metadata
    stream: bool

    def __init__(
        self,
        layers: object,
        sites: object = "resid_post",
        positions: object = "all",
        phase: object = None,
        exclude: object = None,
        *,
        codec: object = None,
        return_: object = None,
        sink: object = MEMORY,
        tag: object = "",
        request_id: object = "",
        metadata: object = None,
        stream: object = False,
    ) -> None:
        """Reads each field in any of its forms.

        Args:
            layers: what Layers takes: "all", an int, or a list, tuple or range of ints.
            sites: what Sites takes: a name or a list of names.
            positions: what Positions takes.
            phase: "prompt" or "generated" leaves only such tokens of the positions.
            exclude: positions to leave out.
            codec: how the rows leave the device, the same for all captures of a request: "raw", or
                reduced, see `midstream.codecs`. None: as midstream's setting of that name says.
            return_: through which of the ranks of a tensor-parallel group, all of which have the
                same vectors, they leave; the same for all captures of a request. "gathered": the
                first; "sharded": of n ranks each moves every n-th tap of a token, so that each has
                1/n of the bytes. What comes back is the same. None: as midstream's setting `return`
                says. In a dict the field is `return`.
            sink: where the rows go: "memory" (they come back on the output), or the name of a sink
                that the engine was started with.
            tag: under which the sink keeps them, with others; 1 to 128 of A-Z a-z 0-9 _ . -
            request_id: under which the sink keeps them, alone; empty: one is made of the request's
                own id and of something that no other has.
            metadata: JSON values that the sink is to keep with them.
            stream: whether outputs that come before the request's end have the rows that there are
                by then; only of rows that go to "memory", and only with `AsyncLLM.generate`.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        with at("layers"):
            object.__setattr__(self, "layers", Layers.parse(layers))
        with at("sites"):
            object.__setattr__(self, "sites", Sites.parse(sites))
        object.__setattr__(self, "positions", Positions.within(positions, phase, exclude))
        object.__setattr__(self, "codec", "" if codec in (None, "") else _read_codec(codec))
        with at("return"):
            found = "" if return_ in (None, "") else _read_return(return_)
            object.__setattr__(self, "return_", found)
        with at("sink"):
            object.__setattr__(self, "sink", read_name(sink, may_be_empty=False))
        with at("tag"):
            object.__setattr__(self, "tag", read_name(tag))
        with at("request_id"):
            object.__setattr__(self, "request_id", read_name(request_id))
        with at("metadata"):
            kept = NO_METADATA if metadata is None else Metadata(metadata)
            object.__setattr__(self, "metadata", kept)
        with at("stream"):
            object.__setattr__(self, "stream", _read_stream(stream, self.sink))

    @staticmethod
    def parse(value: object) -> Capture:
        """A Capture, or a dict of the constructor's arguments, where `return_` is `return`.

        Raises:
            SpecError: a field is unknown, missing or malformed.
        """
        if isinstance(value, Capture):
            return value
        given = read_fields(value, _REQUIRED, _OPTIONAL)
        by_rank = given.pop("return", None)
        return Capture(**given, return_=by_rank)

    @property
    def place(self) -> tuple[str, str, str]:
        """(sink, tag, request_id): where its rows go."""
        return self.sink, self.tag, self.request_id

    def without_place(self) -> Capture:
        """The same without a word of where its rows go, and when."""
        if self.place == (MEMORY, "", "") and not self.metadata and not self.stream:
            return self
        return replace(self, sink=MEMORY, tag="", request_id="", metadata=NO_METADATA, stream=False)

    def to_dict(self) -> dict[str, object]:
        """The JSON form, which `parse` reads back; where the rows go only if it is written."""
        found: dict[str, object] = {
            "layers": self.layers.emit(),
            "sites": self.sites.emit(),
            **self.positions.to_dict(),
        }
        if self.codec:
            found["codec"] = self.codec
        if self.return_:
            found["return"] = self.return_
        if self.sink != MEMORY:
            found["sink"] = self.sink
        if self.tag:
            found["tag"] = self.tag
        if self.request_id:
            found["request_id"] = self.request_id
        if self.metadata:
            found["metadata"] = self.metadata.to_dict()
        if self.stream:
            found["stream"] = True
        return found


def _read_stream(value: object, sink: str) -> bool:
    if not isinstance(value, bool):
        raise SpecError("", f"expected `bool`, got {kind(value)}")
    if value and sink != MEMORY:
        raise SpecError(
            "",
            f"rows that go to the sink {show(sink)} are on no output; leave it out, or capture "
            "them for memory as well",
        )
    return value


def _read_return(value: object) -> str:
    if not isinstance(value, str):
        raise SpecError("", f"expected `str`, got {kind(value)}")
    if value not in RETURNS:
        raise SpecError("", f"expected one of {', '.join(RETURNS)}, got {show(value)}")
    return value


def _read_codec(value: object) -> str:
    from midstream.codecs import parse_codec  # which imports torch

    return parse_codec(value).spec
