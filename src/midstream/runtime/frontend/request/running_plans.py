"""The plans of running requests, as they were given and have changed since."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from midstream.errors import SpecError
from midstream.plan import Capture, Plan, ResolvedPlan
from midstream.plan.operations import Edit
from midstream.plan.plan import ServerWide
from midstream.runtime.frontend.request.call_plan import CallPlan
from midstream.runtime.frontend.request.prepared_plan import LaterPlan
from midstream.runtime.frontend.request.prompt.media import places_of

# Server-wide edits and captures at one time.
Others = tuple[tuple[ServerWide, ...], tuple[Capture, ...]]


# What a plan is resolved with, of vLLM's EngineCoreRequest.
_OF_REQUEST = ("prompt_token_ids", "prompt_is_token_ids", "prompt_embeds", "sampling_params")


@dataclass(slots=True)
class PlanHistory:
    """The plan of a running request, as it was given and has changed since."""

    name: str  # the id that its caller gave the request
    completions: int  # number of its completions
    first: ResolvedPlan  # the plan with which it was sent
    asked: CallPlan  # its own plan as it was given, which no other request has
    call_plan: CallPlan
    before: tuple[ServerWide, ...]  # server-wide edits when it was admitted, which it keeps
    also: tuple[Capture, ...]
    prompt: SimpleNamespace
    # Edits given last, with names bound, and their origins; see `Plan`.
    given: tuple[tuple[Edit, ...], tuple[int, ...]] = ((), ())
    later: dict[int, LaterPlan] = field(default_factory=dict)  # by number, from 1 on
    request_ids: list[str] = field(default_factory=list)  # vLLM's, of those submitted

    def with_edits(self, edits: tuple[Edit, ...], origins: tuple[int, ...]) -> CallPlan:
        own, plan = self.call_plan.plan, None
        captures, probes = ((), ()) if own is None else (own.captures, own.probes)
        if captures or edits or probes:
            searched = () if own is None else own.marked
            plan = Plan(captures, edits, probes, origins if edits else (), searched=searched)
        return replace(self.call_plan, plan=plan)


class RunningPlans:
    """The plans of running requests, by midstream's ids."""

    def __init__(self, bind: Callable[[Plan | None], Plan | None]) -> None:
        self._bind = bind
        self._running: dict[str, PlanHistory] = {}

    def __len__(self) -> int:
        return len(self._running)

    def add(
        self,
        uid: str,
        first: ResolvedPlan,
        request: Any,
        call_plan: CallPlan,
        others: Others,
        later: dict[int, LaterPlan],
    ) -> None:
        """Add an admitted request, which keeps the `others`; `later` gets all later versions."""
        asked = call_plan
        prompt = {name: getattr(request, name, None) for name in _OF_REQUEST}
        # A name may mean something else later.
        own = self._bind(asked.plan)
        if own is not asked.plan:
            call_plan = replace(asked, plan=own)
        self._running[uid] = PlanHistory(
            name=request.request_id,
            completions=request.sampling_params.n,
            first=first,
            asked=asked,
            call_plan=call_plan,
            before=others[0],
            also=others[1],
            prompt=SimpleNamespace(**prompt, mm_features=places_of(request)),
            given=((), ()) if own is None else (own.edits, own.origins),
            later=later,
        )

    def submitted(self, uid: str, request_id: str) -> None:
        """Record the id of a vLLM request that was submitted, if it can change."""
        history = self._running.get(uid)
        if history is not None:
            history.request_ids.append(request_id)

    def ids_of(self, uid: str) -> Sequence[str]:
        """Return vLLM's ids of the requests that were submitted for one with a plan."""
        history = self._running.get(uid)
        return () if history is None else history.request_ids

    def remove(self, uids: Iterable[str]) -> None:
        for uid in uids:
            self._running.pop(uid, None)

    def find(self, name: str | CallPlan) -> tuple[str, PlanHistory]:
        """Return a request's uid and history, by its caller's id or the plan it was sent with."""
        matches = [
            (uid, history)
            for uid, history in list(self._running.items())  # a thread may admit others
            if name in (history.asked if isinstance(name, CallPlan) else history.name,)
        ]
        if not matches:
            raise ended(name if isinstance(name, str) else "")
        if len(matches) > 1:
            raise SpecError("request_id", f"{len(matches)} running requests have the id {name!r}")
        return matches[0]


def ended(name: str) -> SpecError:
    """Return the error of a change of a request that is not running."""
    return SpecError(
        "request_id",
        f"request {name!r} is not running: it has ended, or no request with a plan has this id; "
        "one that begins with edits=[] can be changed later",
    )
