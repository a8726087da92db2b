"""A plan that was checked against a model and a prompt, and the versions that it changes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from midstream.plan import ModelShape, Plan, ResolvedPlan
from midstream.runtime.frontend.request.budget import Need, prompt_bytes, returned_captures
from midstream.runtime.protocol.acting_probes import ActingProbe
from midstream.runtime.protocol.cache_keys import CacheKeys
from midstream.runtime.protocol.control import Control
from midstream.runtime.protocol.rank_parts import SplitScore
from midstream.runtime.protocol.request_payload import RequestPayload


@dataclass(frozen=True, slots=True)
class LaterPlan:
    """A version of a request's plan."""

    plan: ResolvedPlan
    source: str  # who changed it: "update", or "probe:NAME" or "controller:NAME"
    scale: float  # factor on the strength of the edits given last


@dataclass(frozen=True, slots=True)
class PreparedPlan:
    """A plan that was checked against the model and a prompt."""

    plan: ResolvedPlan
    need: Need
    packed: bytes  # the resolved plan as bytes
    keys: CacheKeys
    acts: tuple[ActingProbe, ...] = ()  # its probes that end the request or switch its edits
    control: Control | None = None  # its controller in the engine core
    later: Mapping[int, LaterPlan] = field(default_factory=dict)  # by number
    split: tuple[SplitScore, ...] = ()  # scores that these need and of which ranks have parts
    _returned: dict[tuple[int, ...], int] = field(default_factory=dict, compare=False, repr=False)

    def returned_bytes(self, own: Plan, shape: ModelShape) -> int:
        """Return the bytes of the prompt's rows for the caller, counted once for its captures."""
        captures = returned_captures(self.plan, own)
        nbytes = self._returned.get(captures)
        if nbytes is None:
            nbytes = self._returned[captures] = prompt_bytes(self.plan, captures, shape)
        return nbytes

    def payload(self, uid: str, mm_prefix: bool) -> RequestPayload:
        return RequestPayload(
            uid,
            self.packed,
            self.keys,
            acts=self.acts,
            control=self.control,
            split=self.split,
            mm_prefix=mm_prefix,
        )

    @property
    def is_empty(self) -> bool:
        """Whether nothing is captured, edited or probed."""
        return not (self.plan.edits or self.plan.captures or self.plan.probes)
