"""The engine as a dataset capture sees it: prompts in, rows out, in whichever order they end."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from midstream.config.config import KEY
from midstream.errors import SpecError
from midstream.jobs.job import Job
from midstream.jobs.records import Failed, Record
from midstream.results.activations import Activations
from midstream.results.receipt import Receipt
from midstream.sinks.base import Origin
from midstream.validation import show

if TYPE_CHECKING:
    from midstream.api.llm import LLM


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of one prompt.

    Attributes:
        line: where in the data it is.
        prompt: its text; None where the engine does not say.
        prompt_token_ids: what the text became.
        text: the answer; empty unless prompts are kept.
        generated_token_ids: the last of them was sampled and never computed on.
        finish_reason: vLLM's.
        receipt: what was done, which is all that was asked for.
        activations: the rows.
    """

    line: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    text: str
    generated_token_ids: tuple[int, ...]
    finish_reason: str | None
    receipt: Receipt
    activations: Activations = field(repr=False)


class Engine(Protocol):
    """An engine for one job.

    Attributes:
        origin: what the rows come from.
        window: how many prompts it should have, so that it never waits for one.
    """

    @property
    def origin(self) -> Origin: ...

    @property
    def window(self) -> int: ...

    def add(self, record: Record) -> None:
        """Hands it a prompt.

        Raises:
            SpecError: it cannot be taken: it is too long, has not the positions that are to be
                captured, or is no conversation.
        """
        ...

    def step(self) -> Sequence[Reply | Failed]:
        """Works for a while; whatever has ended. Each prompt that was added ends once."""
        ...


def start_vllm(job: Job) -> VllmEngine:
    """An engine of the job's own, which taps what it captures and nothing else.

    Raises:
        SpecError: there is no such model or argument of engines.
        Exception: of any kind: the job asks for what the model has not, or vLLM cannot start.
    """
    if job.model.startswith((".", "/")) and not os.path.exists(job.model):
        raise SpecError("model", f"there is no folder {show(job.model)}")
    from midstream import LLM, Config

    capture = job.capture
    config = Config.parse(
        {
            "sites": capture.sites.names,
            "layers": capture.layers.indices,
            # Of a request that fails the job says so itself.
            "on_mismatch": "warn",
        }
    )
    settings: dict[str, Any] = {"disable_log_stats": True, **job.engine_args}
    if job.revision:
        settings["revision"] = job.revision
    with _named_arguments(job):
        llm = LLM(job.model, midstream=config, dtype=job.dtype, **settings)
    return VllmEngine(llm, job)


@contextmanager
def _named_arguments(job: Job) -> Iterator[None]:
    """An argument that vLLM does not have is raised as a SpecError of the job's field."""
    try:
        yield
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is None or unknown[1] not in job.engine_args:
            raise
        raise SpecError(f"engine_args.{unknown[1]}", "`vllm.LLM` takes no such argument") from error


class VllmEngine:
    """A `midstream.LLM` at work on a job; nobody else uses it meanwhile."""

    def __init__(self, llm: LLM, job: Job) -> None:
        """Args:
        llm: taps what the job captures.
        job: what is captured of each prompt.
        """
        from midstream import SamplingParams

        self._llm = llm
        self._chat = job.chat
        self._plan = job.plan
        self._params: Any = SamplingParams(
            temperature=0,
            max_tokens=job.max_tokens,
            detokenize=job.keep_prompts,
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
        # As many again as it runs together: there are others when all of them end at once.
        return 2 * int(self._llm.llm_engine.vllm_config.scheduler_config.max_num_seqs)

    def add(self, record: Record) -> None:
        from midstream.runtime.frontend.request.prompt.inputs import named_refusals

        number = self._llm.request_counter.counter
        with named_refusals():
            if self._chat:
                self._add_chat(record.prompt)
            else:
                self._llm.enqueue([{"prompt": record.prompt}], self._params, use_tqdm=False)
        self._lines[str(number)] = record.line

    def step(self) -> Sequence[Reply | Failed]:
        engine = self._llm.llm_engine
        if engine.has_unfinished_requests():
            self._ended += [output for output in engine.step() if output.finished]
        # Results come for many requests together, some steps after these have ended.
        found = [self._reply(output) for output in self._ended if output.receipt is not None]
        self._ended = [output for output in self._ended if output.receipt is None]
        if engine.has_unfinished_requests() or self._ended:
            return found
        lost, self._lines = self._lines, {}
        return [*found, *(Failed(line, "vLLM gave no output") for line in lost.values())]

    def _add_chat(self, messages: Any) -> None:
        from midstream.runtime.frontend.request.prompt.chat import ChatPlan

        params = self._params
        if self._plan.needs_prompt:
            template = {"chat_template": getattr(self._llm, "chat_template", None)}
            params = copy.copy(params)
            params.extra_args = {KEY: ChatPlan(self._plan, messages, template)}
        self._llm.enqueue_chat([messages], params, use_tqdm=False)

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
            activations=output.activations,
        )
