"""The guards of each engine call of a server: which it has, and what they do with its outputs."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from midstream.deadlines import within
from midstream.errors import MidstreamError, SpecError
from midstream.plan.probe import Probe
from midstream.results.readouts import RESULTS
from midstream.server import audit_log
from midstream.server.guards.guard_event import GuardEvent
from midstream.server.guards.hidden import hide
from midstream.server.guards.judgement import GuardJudgement, judge
from midstream.server.guards.second_stage import read_again
from midstream.server.metrics import Metrics
from midstream.steering.guard_definition import Webhook
from midstream.steering.guards import ActiveGuard

# Fingerprint of the key, or address, of the client whose request is answered; None: no guard
# concerns it, as it is the server's own.
ASKER: ContextVar[str | None] = ContextVar("midstream_asker", default=None)
STOPPED = "content_filter"  # a finish reason that OpenAI's clients know
READ_SECONDS = 60.0  # longest time of a second stage's request, with its waiting
_TEXT = 500  # characters at the end of the generated text in an event
_SHOWN = 500  # characters of a problem in the log
# Actions that need not be done, where scores cannot be had.
_OBSERVING = ("shadow", "flag", "webhook")
BEAMS = "use_beam_search"
_BEAM = re.compile(r"-beam-[0-9]+$")  # the end of vLLM's ids of a search for beams

Outputs = AsyncGenerator[Any, None]  # of an engine call


@dataclass(eq=False)
class GuardedCalls:
    """Chooses the guards of calls. Call on the event loop."""

    metrics: Metrics
    # Is called with each event and its guard's webhook, on the event loop, and returns at once.
    publish: Callable[[GuardEvent, Webhook | None], None]
    _llm: Any = None
    _generate: Any = None  # the engine's own method

    def connect(self, llm: Any, generate: Any) -> None:
        self._llm, self._generate = llm, generate

    def begin(self, request_id: str, params: Any, lora_request: Any) -> GuardedCall | None:
        """Return a call with the guards that are active now; None: none concerns it."""
        client = ASKER.get()
        active = () if client is None else self._llm.guards.active()
        if client is None or not active or not hasattr(params, "output_kind"):
            return None
        start = time.perf_counter()
        names = self.models if lora_request is None else (lora_request.lora_name,)
        guards = tuple(
            guard
            for guard in active
            if guard.definition.scope.has(guard.name, request_id, names, client)
        )
        mixed = _mixed(request_id, params)
        if mixed is not None:
            if any(guard.definition.action not in _OBSERVING for guard in guards):
                raise SpecError(mixed, "unsupported while a guard of this server stops or switches")
            guards = ()
        reading = {guard.name for guard in guards if guard.probe is not None}
        guards = tuple(
            guard
            for guard in guards
            if guard.definition.when is None or guard.definition.when.guard in reading
        )
        for guard in active:
            if guard not in guards:
                self.metrics.count_guarded(guard, False)
        if not guards:
            return None
        call = GuardedCall(self, guards, request_id, client, names[0], lora_request)
        call.is_delta = params.output_kind.name == "DELTA"
        call.seconds = time.perf_counter() - start
        return call

    @property
    def models(self) -> tuple[str, ...]:
        """The names of the model that is served, without those of adapters."""
        config = self._llm.vllm_config.model_config
        names = getattr(config, "served_model_name", None) or config.model
        several = [names] if isinstance(names, str) else names
        return tuple(dict.fromkeys((*several, config.model)))

    @property
    def longest(self) -> int:
        """Most tokens of a prompt with which one more can be generated."""
        most: int = self._llm.vllm_config.model_config.max_model_len
        return most - 1

    def generate(self, *args: Any, **named: Any) -> Outputs:
        """Generate for the server itself: no guard reads it."""
        stream: Outputs = self._generate(*args, **named)
        return stream

    def tell(self, event: GuardEvent, guard: ActiveGuard) -> None:
        """Count an event, log it, and pass it on."""
        self.metrics.count_action(guard, event.action)
        audit_log.log_event("guard.action", **event.to_dict())
        self.publish(event, guard.definition.webhook)


@dataclass(eq=False)
class GuardedCall:
    """One engine call, and the versions of the guards that it has from beginning to end."""

    _calls: GuardedCalls
    guards: tuple[ActiveGuard, ...]
    request_id: str
    client: str
    model: str
    lora_request: Any
    is_delta: bool = False
    seconds: float = 0.0  # that the guards took in this process
    _tokens: dict[int, list[int]] = field(default_factory=dict)  # by completion, if `is_delta`
    _texts: dict[int, str] = field(default_factory=dict)  # ends, by completion

    @property
    def probes(self) -> tuple[Probe, ...]:
        """The probes that its request gets."""
        return tuple(guard.probe for guard in self.guards if guard.probe is not None)

    async def watch(self, stream: Outputs, prompt: Any, is_asked: bool | None = None) -> Outputs:
        """Yield the outputs with what the guards do. `is_asked`: whether the client asked for
        results; None: they are for nobody.
        """
        try:
            async for output in stream:
                ended = [await self._take(output, part, prompt) for part in output.outputs]
                for completion, shown in zip(output.outputs, ended, strict=True):
                    if is_asked is not None:
                        hide(completion, self.probes, is_asked)
                        completion.guards = shown
                yield output
        finally:
            await stream.aclose()

    async def _take(self, output: Any, completion: Any, prompt: Any) -> list[dict[str, Any]] | None:
        """Take one output of a completion; return the flags for its client, if it has ended."""
        index = completion.index
        before = self._texts.get(index, "") if self.is_delta else ""
        text = self._texts[index] = (before + completion.text)[-_TEXT:]
        if self.is_delta:
            self._tokens.setdefault(index, []).extend(completion.token_ids)
        if not output.finished or completion.finish_reason in (None, "abort", "error"):
            return None
        start = time.perf_counter()
        judgements: dict[str, GuardJudgement] = {}
        shown: list[dict[str, Any]] = []
        stopping: ActiveGuard | None = None
        for guard in sorted(self.guards, key=lambda guard: guard.definition.when is not None):
            verdict = await self._judge(guard, judgements, output, completion, prompt)
            judgement = verdict.judgement
            self._calls.metrics.count_guarded(guard, verdict.is_read)
            if judgement is not None:
                judgements[guard.name] = judgement
                if guard.definition.probe is not None:
                    self._calls.metrics.observe_score(guard, judgement.peak)
            if not verdict.acts:
                continue
            event = self._event(guard, verdict, index, text)
            self._calls.tell(event, guard)
            definition = guard.definition
            if definition.visible and definition.action != "shadow":
                shown.append({name: event.to_dict().get(name) for name in _SHOWN_FIELDS})
            if definition.action == "stop" and stopping is None:
                stopping = guard
        if stopping is not None:
            self._stop(stopping, completion)
        self.seconds += time.perf_counter() - start
        self._calls.metrics.observe_guards(self.seconds)
        self.seconds = 0.0
        return shown

    async def _judge(
        self,
        guard: ActiveGuard,
        before: dict[str, GuardJudgement],
        output: Any,
        completion: Any,
        prompt: Any,
    ) -> _Verdict:
        """Return what a guard says; it may make a request of its own."""
        definition, condition = guard.definition, guard.definition.condition
        if guard.probe is not None and condition is not None:
            return _verdict(judge(condition, completion.probes, guard.probe))
        when = definition.when
        assert when is not None
        first = before.get(when.guard)
        if first is None or not first.is_beyond(when.above, when.below):
            return _verdict(None)
        if guard.later is None or condition is None:
            # It acts whenever its first stage lets it run.
            return _verdict(first._replace(position=first.position or 0))
        whole = completion
        if self.is_delta:
            whole = _Ended(self._tokens[completion.index])
        named = {
            "probe": guard.later, "most": self._calls.longest, "lora_request": self.lora_request,
            "name": f"{self.request_id}-{guard.name}-{completion.index}",
        }  # fmt: skip
        try:
            reading = read_again(self._calls.generate, prompt, output, whole, named)
            probes = await within(READ_SECONDS, reading)
        except (MidstreamError, ValueError, asyncio.TimeoutError) as error:
            problem = str(error)[:_SHOWN] or f"no scores within {READ_SECONDS:g} s"
            self._calls.metrics.count_failure(guard)
            audit_log.log_event(
                "guard.failed",
                guard=guard.name,
                version=guard.version,
                request_id=self.request_id,
                problem=problem,
            )
            return _Verdict(False, None, definition.if_unavailable == "act", problem)
        return _verdict(judge(condition, probes, guard.later))

    def _event(self, guard: ActiveGuard, verdict: _Verdict, index: int, text: str) -> GuardEvent:
        judgement = None if guard.definition.probe is None else verdict.judgement
        return GuardEvent(
            guard.name,
            guard.version,
            guard.definition.action,
            None if judgement is None else judgement.position,
            None if judgement is None else judgement.score,
            self.request_id,
            index,
            self.client,
            self.model,
            text if guard.definition.text else None,
            verdict.problem,
        )

    def _stop(self, guard: ActiveGuard, completion: Any) -> None:
        """End a completion as its client sees it. A second stage withholds an answer that was not
        streamed, as it is complete by then.
        """
        definition = guard.definition
        completion.finish_reason = STOPPED
        completion.stop_reason = f"guard:{guard.name}" if definition.visible else None
        if definition.when is None or self.is_delta:
            completion.text += definition.message
            return
        completion.text, completion.token_ids = definition.message, []
        if completion.logprobs is not None:
            completion.logprobs = []
        # Rows and scores have the ids of the withheld tokens, or tell them.
        for name in ("activations", "probes", *RESULTS):
            setattr(completion, name, None)


class _Verdict(NamedTuple):
    """What a guard says of one completion."""

    is_read: bool  # whether it ran, and its probe has read the completion
    judgement: GuardJudgement | None
    acts: bool
    problem: str | None = None  # why it could not run


def _verdict(judgement: GuardJudgement | None) -> _Verdict:
    acts = judgement is not None and judgement.position is not None
    return _Verdict(judgement is not None, judgement, acts)


def is_of_beams(request_id: str, params: Any) -> bool:
    """Return whether a request is one of those of a search for beams."""
    # A client may choose such an id, but not the kind of output, which no other request has.
    kind = getattr(params, "output_kind", None)
    return kind is not None and kind.name == "CUMULATIVE" and bool(_BEAM.search(request_id))


def _mixed(request_id: str, params: Any) -> str | None:
    """Return the field of a request that no guard can read; None: guards can."""
    # A search for beams makes a request for each token, of which a guard would read the prompt.
    if is_of_beams(request_id, params):
        return BEAMS
    # vLLM mixes the outputs of several completions of a stream: none has results.
    return "n" if params.n > 1 and params.output_kind.name != "FINAL_ONLY" else None


@dataclass(frozen=True, slots=True)
class _Ended:
    """All tokens of a completion whose outputs have the new ones only."""

    token_ids: Sequence[int]


_SHOWN_FIELDS = ("guard", "version", "action", "position", "score")
