"""Plans of requests, resolved on the event loop, or before in a thread if that takes long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from midstream.plan import Capture, Plan
from midstream.plan.control.control_laws import MOST_SCALES
from midstream.plan.plan import ServerWide, read_prompts
from midstream.plan.tap_lookup import size_of
from midstream.runtime.frontend.request.call_plan import CallPlan
from midstream.runtime.frontend.request.heavy_work import in_thread
from midstream.runtime.frontend.request.plan_resolver import PlanResolver
from midstream.runtime.frontend.request.prepared_plan import PreparedPlan
from midstream.runtime.frontend.request.prompt.media import places_of_rendered

# Taps, parts, positions and tokens of a plan that is resolved in some 20 ms.
_LONG = 1024


@dataclass(eq=False)
class RequestPlans:
    """Resolves the plans of one engine's requests."""

    _resolver: PlanResolver
    _num_layers: int
    _max_length: int
    # Plans that were resolved before their requests exist, each with what it was resolved for.
    _ahead: dict[CallPlan, tuple[tuple[Any, ...], PreparedPlan]] = field(default_factory=dict)

    def resolve(self, request: Any, call_plan: CallPlan, *others: Any) -> PreparedPlan:
        ahead = self._ahead.pop(call_plan, None)
        if ahead is not None and ahead[0] == _key_of(request, others):
            return ahead[1]
        before, also = others
        return self._resolver.resolve(call_plan, before, also, request)

    async def resolve_ahead(
        self, call_plan: CallPlan, prompt: Any, params: Any, *others: Any
    ) -> None:
        """Resolve a rendered prompt's plan in a thread if it may take long. Pair with `forget`."""
        before, also = others
        tokens = _tokens_of(prompt, self._max_length)
        if tokens is None:
            return
        most = self._max_length - len(tokens) if params.max_tokens is None else params.max_tokens
        if self._resolver.known(call_plan.plan, before, also, len(tokens), most) is not None:
            return
        if not self._is_long(tokens, call_plan, before, also):
            return
        request = _request_of(prompt, tokens, most)
        args = call_plan, before, also, request
        resolved = await in_thread(self._resolver.resolve, *args)
        self._ahead[call_plan] = _key_of(request, others), resolved

    def forget(self, call_plan: CallPlan) -> None:
        self._ahead.pop(call_plan, None)

    def _is_long(
        self,
        prompt: list[int],
        call_plan: CallPlan,
        before: tuple[ServerWide, ...],
        also: tuple[Capture, ...],
    ) -> bool:
        plan = Plan() if call_plan.plan is None else call_plan.plan
        parts: tuple[Any, ...] = (*plan.captures, *plan.edits, *plan.probes, *before, *also)
        versions = 1 + len(plan.switches) + (0 if plan.controller is None else MOST_SCALES)
        is_read = plan.needs_prompt or read_prompts(before, also)
        tokens = len(prompt) if is_read else 0
        return versions * size_of(parts, self._num_layers) + tokens > _LONG


def _key_of(request: Any, others: tuple[Any, ...]) -> tuple[Any, ...]:
    return request.prompt_token_ids, request.sampling_params.max_tokens, others


def _tokens_of(prompt: Any, max_length: int) -> list[int] | None:
    """Return a rendered prompt's tokens; None: its request is made in a thread, or has none."""
    if not isinstance(prompt, dict) or prompt.get("type", "embeds") == "embeds":
        return None
    tokens = prompt.get("prompt_token_ids")
    return tokens if isinstance(tokens, list) and 0 < len(tokens) < max_length else None


def _request_of(prompt: Mapping[str, Any], tokens: list[int], max_tokens: int) -> Any:
    """Return what resolving reads of a rendered prompt's request."""
    return SimpleNamespace(
        prompt_token_ids=tokens,
        prompt_is_token_ids=None,
        mm_features=places_of_rendered(prompt),
        sampling_params=SimpleNamespace(max_tokens=max_tokens),
    )
