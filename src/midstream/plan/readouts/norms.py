"""`Norms`: how long the vectors of some positions are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from midstream.errors import SpecError
from midstream.plan.argument_names import accept_spellings, parameters_of, read_named
from midstream.plan.forms import LayersLike, PhaseLike, PositionsLike, SitesLike
from midstream.plan.positions.positions import Positions
from midstream.plan.positions.row_order import check_row_order
from midstream.plan.readouts.base import Context, ReadOut, ReadOutEngine
from midstream.plan.resolved import Pattern, ResolvedCapture
from midstream.plan.selection import Layers, Sites
from midstream.plan.sink_target import MEMORY, Metadata
from midstream.plan.tap_lookup import find_taps
from midstream.sites import Tap
from midstream.validation import kind


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Norms(ReadOut):
    """Return the L2 norm of the vectors of some positions, 4 bytes for each instead of a row.

    Norms are computed on the worker, of the vectors after the edits at their site, and returned as
    float32. They are in `output.norms`, by site and layer; see
    `midstream.results.readouts.norms.NormResults`; with a `sink` in `readouts["norms"]` of what
    the sink is given. Captures of the same vectors may be beside them.
    """

    layers: Layers
    sites: Sites
    positions: Positions
    sink: str
    tag: str
    request_id: str
    metadata: Metadata = field(hash=False)
    stream: bool
    layout: str

    key = "norms"

    @accept_spellings
    def __init__(
        self,
        layers: LayersLike | None = None,
        sites: SitesLike | None = None,
        positions: PositionsLike = "all",
        phase: PhaseLike | None = None,
        exclude: PositionsLike | None = None,
        *,
        stream: bool = False,
        sink: str = MEMORY,
        tag: str = "",
        request_id: str = "",
        metadata: Mapping[str, Any] | None = None,
        layout: str = "",
    ) -> None:
        """Create it; each field accepts any of its forms.

        Args:
            layers, sites: as in `Capture`. No two `Norms` of a request may select a site and layer.
            positions: any form of Positions.
            phase: "prompt" or "generated" restricts the positions to tokens of that phase.
            exclude: positions to exclude.
            stream: as in `Capture`.
            sink: "memory", or the name of a sink that keeps norms, such as `filesystem`.
            tag, request_id, metadata, layout: as in `Capture`.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        place: dict[str, Any] = {"sink": sink, "tag": tag, "request_id": request_id}
        place |= {"metadata": metadata, "stream": stream, "layout": layout}
        self._set_where(layers, sites, positions, phase, exclude)
        self._set_destination(place)
        check_row_order(self.positions, None)

    @staticmethod
    def is_form(value: Mapping[str, Any]) -> bool:
        return "norms" in value

    @classmethod
    def parse(cls, value: object) -> Norms:
        """Read a Norms, or a dict of the constructor's arguments with `"norms": true`."""
        if isinstance(value, Norms):
            return value
        assert isinstance(value, Mapping)
        fields = read_named(value, ("norms",), parameters_of(Norms)[1])
        marker = fields.pop("norms")
        if marker is not True:
            shown = marker if isinstance(marker, bool) else kind(marker)
            raise SpecError("norms", f"expected true, got {shown}")
        return Norms(**fields)

    def resolve(self, source: int, context: Context) -> list[ResolvedCapture]:
        reads = find_taps(self.layers, self.sites, context.shape, "layers", "sites")
        where = context.select(self.positions)
        taps = tuple((f"{self.key}.{site}", layer) for site, layer in reads)
        pattern = Pattern("norm", 1, (), (), reads, (1,) * len(reads))
        return [ResolvedCapture(taps, where, source, pattern)]

    @classmethod
    def check_together(cls, captures: Sequence[ResolvedCapture]) -> None:
        sources: dict[Tap, int] = {}
        for capture in captures:
            assert capture.pattern is not None
            for tap, (site, layer) in zip(capture.taps, capture.pattern.reads, strict=True):
                other = sources.setdefault(tap, capture.source)
                if other != capture.source:
                    raise SpecError(
                        f"capture[{capture.source}]",
                        f"capture[{other}] returns norms of {site} of layer {layer} too; ask for "
                        "them once, with all positions",
                    )

    def finish(self, capture: ResolvedCapture, engine: ReadOutEngine) -> ResolvedCapture:
        assert capture.pattern is not None
        for tap in capture.pattern.reads:
            if engine.parts.get(tap, 1) > 1:
                raise SpecError(
                    "sites",
                    f"{tap[0]} is split over the ranks under tensor parallelism, and a norm needs "
                    "all of it; capture the rows, or use tensor_parallel_size=1",
                )
        return capture

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form, which `parse` reads."""
        return {
            "norms": True,
            **({"layers": self.layers.emit()} if self.sites.in_layers else {}),
            "sites": self.sites.emit(),
            **self.positions.to_dict(),
            **self._destination(),
        }
