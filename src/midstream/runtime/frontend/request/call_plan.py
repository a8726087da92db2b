"""The plan of a request before request validation, in `SamplingParams.extra_args["midstream"]`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from midstream.compat.foreign_fields import check_extra_args
from midstream.compat.translation import rename_path, translate, without_translated
from midstream.config.config import KEY
from midstream.errors import SpecError
from midstream.plan import Plan
from midstream.plan.control.controller import Controller
from midstream.plan.positions.items import CONTENT
from midstream.plan.positions.prompt import MediaItem, Message
from midstream.plan.probe import Probe
from midstream.runtime.frontend.request.prompt.message_spans import (
    chat_params,
    chat_renderer,
    message_spans,
)


@dataclass(frozen=True, slots=True, eq=False)
class CallPlan:
    """The plan of one call, with the conversation of its prompt. Equal only to itself: callers may
    use a request id twice, so an asynchronous front end finds the call of a request by it.
    """

    plan: Plan | None  # None: only what applies to every request
    messages: Any = None  # the conversation, as given; None: the prompt is not a chat
    template: Mapping[str, Any] = field(default_factory=dict)  # arguments of the chat template
    # Of rows that can be returned to the caller: a request whose prompt alone has more is rejected.
    most_bytes: int | None = None
    # Changes its edits between the steps of an engine that its caller steps, in `mode="async"`.
    controller: Controller | None = None
    guards: tuple[Probe, ...] = ()  # of the server; they come after its server-wide edits
    client: str = ""  # of a server; empty: there is none
    # The server's own request, which reads an answer again: server-wide captures leave it out.
    is_own: bool = False

    def __deepcopy__(self, _memo: dict[int, object]) -> CallPlan:
        # vLLM copies a request's parameters; an immutable plan can be shared.
        return self

    def spans(
        self,
        engine: Any,
        tokenizer: Any,
        tokens: Sequence[int],
        media: Sequence[MediaItem],
        part: str = CONTENT,
    ) -> tuple[Message, ...]:
        render = chat_renderer(engine.renderer, chat_params(**self.template))
        return message_spans(
            tokenizer, self.messages, tokens, render=render, media=media, part=part
        )


def has_plan(params: Any) -> bool:
    return (getattr(params, "extra_args", None) or {}).get(KEY) is not None


def plan_of(params: Any) -> Plan | CallPlan | None:
    """Return the plan in parameters' `extra_args`, or one made of fields of other tools there."""
    extra_args = getattr(params, "extra_args", None)
    if not extra_args:
        return None
    value = extra_args.get(KEY)
    if isinstance(value, CallPlan) and len(extra_args) == 1:
        return value
    try:
        translated = translate(extra_args)
    except SpecError as error:
        raise rename_path(error, "extra_args[{!r}]".format) from None
    check_extra_args(extra_args if translated is None else without_translated(extra_args))
    if translated is not None:
        if value is not None:
            name = translated.coming_from[0][0]
            raise SpecError(f"extra_args[{name!r}]", f"there is a plan in {KEY!r} too; give one")
        return translated
    if value is None or isinstance(value, CallPlan):
        return value
    try:
        return Plan.parse(value)
    except SpecError as error:
        raise error.under(f"extra_args[{KEY!r}]") from None


def other_args(params: Any) -> dict[str, Any]:
    """Return the `extra_args` of a request's parameters that midstream does not read."""
    rest = without_translated(params.extra_args or {})
    rest.pop(KEY, None)
    return rest


def merged_plan(plan: Plan | None, params: Any) -> Plan | CallPlan | None:
    """Return the plan of one prompt: that of the call's arguments, or that in its parameters."""
    attached = plan_of(params)
    if attached is None:
        return plan
    if plan is not None:
        translated = isinstance(attached, Plan) and attached.coming_from
        name = translated[0][0] if translated else KEY
        raise SpecError(
            f"sampling_params.extra_args[{name!r}]",
            "there is a plan here and in the call's own arguments; give it in one place",
        )
    return attached


def with_plan(params: Any, plan: Plan | CallPlan | None) -> Any:
    """Return a shallow copy of sampling parameters with this plan, or with their own if None."""
    own = copy.copy(params)
    if plan is not None:
        own.extra_args = {**other_args(params), KEY: plan} if params.extra_args else {KEY: plan}
    return own


def without_plan(params: Any) -> Any:
    """Return a shallow copy of sampling parameters without what midstream reads of `extra_args`."""
    plain = copy.copy(params)
    plain.extra_args = other_args(params) or None
    return plain
