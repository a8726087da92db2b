"""Engine of a dataset capture: prompts in, captured rows out, in order of completion."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from midstream.config.config import KEY
from midstream.errors import MidstreamError, SpecError
from midstream.lab.jobs.job import Job, check_model
from midstream.lab.jobs.prompt_tokens import PromptParts, PromptTokens
from midstream.lab.jobs.records import Failed, Record
from midstream.lab.replay.engine_identity import identify, settings_of
from midstream.lab.replay.record import recorded, sampling_to_dict
from midstream.plan import Capture, Plan
from midstream.plan.positions.positions import Positions, Span
from midstream.results.activations import Activations, with_heads
from midstream.results.receipt import Receipt
from midstream.runtime.frontend.request.prompt.message_spans import has_media
from midstream.sinks.base import Origin

if TYPE_CHECKING:
    from midstream.api.llm import LLM


@dataclass(frozen=True, slots=True)
class Reply:
    """Result of one prompt."""

    line: int  # in the data, from 1
    prompt: str | None  # None if the engine does not report it
    prompt_token_ids: tuple[int, ...]
    text: str  # empty unless prompts are kept
    generated_token_ids: tuple[int, ...]  # the last one was never computed on
    finish_reason: str | None
    receipt: Receipt
    activations: Activations = field(repr=False)  # [rows, width] at every site
    parts: PromptParts = field(default_factory=PromptParts)
    record: Mapping[str, Any] | None = None  # for `midstream replay`; None: not asked for


class EngineWork(Protocol):
    """What an engine does with each prompt; a `Job`, for one."""

    @property
    def plan(self) -> Plan: ...

    @property
    def chat(self) -> bool: ...

    @property
    def max_tokens(self) -> int: ...

    @property
    def keep_prompts(self) -> bool: ...

    @property
    def record(self) -> bool: ...


class Engine(Protocol):
    """An engine that serves one job; `window` unfinished prompts keep it busy."""

    @property
    def origin(self) -> Origin: ...

    @property
    def window(self) -> int: ...

    def add(self, record: Record) -> None:
        """Add a prompt."""
        ...

    def step(self) -> Sequence[Reply | Failed]:
        """Run for a while and return the prompts that finished, each added prompt exactly once."""
        ...


def start_vllm(job: Job) -> VllmEngine:
    """Start an engine whose taps are exactly those of the job."""
    check_model(job)
    from midstream import LLM
    from midstream.config.config import Config

    capture = job.capture
    config = Config.parse(
        {
            "sites": capture.sites.names,
            "layers": capture.layers.indices,
            # The job reports failed requests itself.
            "on_mismatch": "warn",
        }
    )
    settings: dict[str, Any] = {"disable_log_stats": True, **job.engine_args}
    if job.revision:
        settings["revision"] = job.revision
    with _unknown_arguments_rejected(job):
        llm = LLM(job.model, midstream=config, dtype=job.dtype, **settings)
    return VllmEngine(llm, job)


@contextmanager
def _unknown_arguments_rejected(job: Job) -> Iterator[None]:
    """Convert vLLM's TypeError for an unknown engine argument to a SpecError of the job's field."""
    try:
        yield
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is None or unknown[1] not in job.engine_args:
            raise
        raise SpecError(f"engine_args.{unknown[1]}", "not an argument of `vllm.LLM`") from error


def plan_of(plan: Plan, prompt: PromptTokens) -> Plan:
    """Return a job's plan with the positions of one prompt, if it has its own."""
    if prompt.positions is None:
        return plan
    (capture,) = plan.captures
    assert isinstance(capture, Capture)
    where = Positions([Span(start, stop) for start, stop in prompt.positions])
    return Plan(captures=(replace(capture, positions=where),))


class VllmEngine:
    """Engine of a job on a `midstream.LLM`, which nothing else may use at the same time."""

    def __init__(self, llm: LLM, work: EngineWork) -> None:
        from midstream import SamplingParams

        self._llm = llm
        self._chat = work.chat
        self._plan = work.plan
        self._identity = (identify(llm), settings_of(llm)) if work.record else None
        self._params: Any = SamplingParams(
            temperature=0,
            max_tokens=work.max_tokens,
            detokenize=work.keep_prompts,
            logprobs=0 if work.record else None,
            extra_args={KEY: self._plan},
        )
        self._lines: dict[str, int] = {}
        self._ended: list[Any] = []

    @property
    def origin(self) -> Origin:
        from midstream.runtime.frontend.results.sink_setup import origin_of

        return origin_of(self._llm.llm_engine.vllm_config, self._llm.info)

    @property
    def window(self) -> int:
        # Twice the batch size, so that prompts are waiting even if a whole batch ends at once.
        return 2 * int(self._llm.llm_engine.vllm_config.scheduler_config.max_num_seqs)

    def add(self, record: Record) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        from midstream.runtime.frontend.request.prompt.inputs import named_refusals

        if (
            self._identity is not None
            and not isinstance(record.prompt, PromptTokens)
            and has_media(record.prompt)
        ):
            raise SpecError("", "it has media, which a record has not: omit --record")
        number = self._llm.request_counter.counter
        try:
            with named_refusals():
                if isinstance(record.prompt, PromptTokens):
                    self._add_tokens(record.prompt)
                elif self._chat:
                    self._add_chat(record.prompt)
                else:
                    self._llm.enqueue([{"prompt": record.prompt}], self._params, use_tqdm=False)
        except (MidstreamError, EngineDeadError):
            raise
        except Exception as error:
            # Media are decoded here, by libraries that raise errors of their own.
            if isinstance(record.prompt, PromptTokens) or not has_media(record.prompt):
                raise
            raise SpecError("", f"{type(error).__name__}: {error}") from error
        self._lines[str(number)] = record.line

    def step(self) -> Sequence[Reply | Failed]:
        engine = self._llm.llm_engine
        if engine.has_unfinished_requests():
            self._ended += [output for output in engine.step() if output.finished]
        # Results arrive for many requests together, some steps after these have ended.
        replies = [self._reply(output) for output in self._ended if output.receipt is not None]
        self._ended = [output for output in self._ended if output.receipt is None]
        if engine.has_unfinished_requests() or self._ended:
            return replies
        lost, self._lines = self._lines, {}
        return [*replies, *(Failed(line, "vLLM gave no output") for line in lost.values())]

    def abort(self) -> None:
        """End the requests that have not ended, and drop their results."""
        from midstream.runtime import install

        engine, left = self._llm.llm_engine, set(self._lines)
        self._lines, self._ended = {}, []
        if left:
            engine.abort_request(list(left))
            install.front_end(engine).drop(left)

    def _add_chat(self, messages: Any) -> None:
        from midstream.runtime.frontend.request.call_plan import CallPlan, with_plan

        params = self._params
        if self._plan.needs_prompt:
            template = {"chat_template": getattr(self._llm, "chat_template", None)}
            params = with_plan(params, CallPlan(self._plan, messages, template))
        self._llm.enqueue_chat([messages], params, use_tqdm=False)

    def _add_tokens(self, prompt: PromptTokens) -> None:
        from midstream.runtime.frontend.request.call_plan import with_plan

        params = self._params
        if prompt.positions is not None:
            params = with_plan(params, plan_of(self._plan, prompt))
        self._llm.enqueue([{"prompt_token_ids": list(prompt.token_ids)}], params, use_tqdm=False)

    def _reply(self, output: Any) -> Reply | Failed:
        (completion,) = output.outputs
        line = self._lines.pop(output.request_id)
        receipt: Receipt = output.receipt
        if receipt.problems:
            return Failed(line, "; ".join(receipt.problems))
        return Reply(
            line=line,
            prompt=output.prompt,
            prompt_token_ids=tuple(output.prompt_token_ids),
            text=completion.text,
            generated_token_ids=tuple(completion.token_ids),
            finish_reason=completion.finish_reason,
            receipt=receipt,
            activations=with_heads(output.activations, {}),  # stores have whole vectors
            record=self._record(output),
        )

    def _record(self, output: Any) -> dict[str, Any] | None:
        if self._identity is None:
            return None
        (capture,) = self._plan.captures
        assert isinstance(capture, Capture)
        # By number, whatever of the conversation or the documents they were found by.
        rows = output.activations
        places = [Span(place, place + 1) for place in rows.positions_of(*rows.keys()[0]).tolist()]
        plan = Plan(captures=(replace(capture, positions=Positions(places)),))
        sampling = sampling_to_dict(self._params)
        return recorded(output, sampling, plan, *self._identity).to_dict()
