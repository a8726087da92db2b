"""A request that passed request validation."""

from __future__ import annotations

from dataclasses import dataclass, field

from midstream.codecs import Rp8, parse_codec
from midstream.plan import ModelShape, Plan, ResolvedPlan
from midstream.plan.vectors.device_row import DeviceSource
from midstream.results.arrays import Heads
from midstream.results.media_span import MediaSpan
from midstream.runtime.frontend.request.prepared_plan import LaterPlan
from midstream.runtime.frontend.request.sink_routes import SinkRoute
from midstream.runtime.frontend.row_reuse import ReusedRows
from midstream.sites import Tap


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A running request that has a plan."""

    uid: str  # midstream's id of the request. vLLM may give the request several ids of its own.
    plan: ResolvedPlan
    own: Plan | None = None  # as given; None: only what applies to every request
    routes: tuple[SinkRoute, ...] = ()
    reused: ReusedRows | None = None  # from earlier requests; None: all are computed
    later: dict[int, LaterPlan] = field(default_factory=dict)  # versions since, by number
    media: tuple[MediaSpan, ...] = ()  # of its prompt
    source: DeviceSource | None = None  # of the rows that it leaves on the device

    def heads(self, captures: tuple[int, ...], shape: ModelShape) -> dict[Tap, Heads]:
        """Return the heads shown of captures' taps, in the first order listed; `rp8` has none."""
        if not shape.heads or isinstance(parse_codec(self.plan.codec), Rp8):
            return {}
        own = () if self.own is None else self.own.captures
        heads: dict[Tap, Heads] = {}
        for capture in (self.plan.captures[index] for index in captures):
            mine = own[capture.source].heads if capture.source >= 0 else None
            for tap in capture.taps:
                count = shape.num_heads(tap)
                if count:
                    before = heads.get(tap, Heads(count, ())).chosen
                    if mine is None or before is None:
                        heads[tap] = Heads(count)
                    else:
                        heads[tap] = Heads(count, tuple(dict.fromkeys((*before, *mine))))
        return heads
