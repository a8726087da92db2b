"""A sweep on an engine: its prompts as tokens, its runs as vLLM's requests."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from vllm import LLM as VllmLLM
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from midstream.api.arguments import CallArguments
from midstream.api.async_call import AsyncEngineCall, only_front
from midstream.api.offline_call import OfflineCall
from midstream.api.traffic import RUN_ID
from midstream.errors import SpecError
from midstream.lab.sweep import Metric, Sweep, SweepRequest
from midstream.lab.sweep.async_run import OnCell, OnStart, Turn, run_job
from midstream.lab.sweep.cells import MAX_CELLS
from midstream.lab.sweep.job import SweepContext, SweepJob, SweepPrompt, SweepRun
from midstream.lab.sweep.metrics import check_logprobs_mode
from midstream.lab.sweep.request import OPTIONS
from midstream.lab.sweep.source import PromptSource
from midstream.plan.captured_rows import OpenRows
from midstream.runtime.frontend.request.call_plan import CallPlan, with_plan
from midstream.runtime.frontend.request.prompt.message_spans import TEMPLATE_ARGUMENTS
from midstream.runtime.frontend.request.prompt.tokenized import (
    is_chat,
    token_id,
    token_texts,
    tokenize,
)
from midstream.validation import at, hint

# Bytes of logits that are on outputs at the same time.
_LOGIT_BYTES = 256 << 20
_NOTHING = CallArguments()


@dataclass(frozen=True)
class PreparedSweep:
    """A sweep that was checked against its engine."""

    job: SweepJob
    params: SamplingParams  # of each run, without its plan
    at_once: int  # runs whose outputs may be kept at the same time


@dataclass(frozen=True)
class SweepCall:
    """A sweep as it is asked for."""

    prompt: Any
    request: SweepRequest
    template: Mapping[str, Any]  # arguments of the chat template, for messages
    sampling_params: SamplingParams | None = None  # for a function; None: one token, greedy


@dataclass(frozen=True)
class RunOptions:
    """How the runs of a sweep are sent to an asynchronous engine."""

    on_start: OnStart | None = None
    on_cell: OnCell | None = None
    turn: Turn = nullcontext
    at_once: int | None = None  # None: a few more than the engine computes
    most_bytes: int | None = None  # of rows of the source prompt; None: any


def prepare(
    engine: Any,
    front: Any,
    call: SweepCall,
    open_rows: OpenRows | None = None,
    most_cells: int = MAX_CELLS,
) -> PreparedSweep:
    """Check a sweep against its engine, vLLM's LLMEngine or AsyncLLM."""
    prompt, request, template = call.prompt, call.request, call.template
    source = request.source.prompt if isinstance(request.source, PromptSource) else None
    for name in template:
        if name not in TEMPLATE_ARGUMENTS:
            known = (*OPTIONS, *TEMPLATE_ARGUMENTS)
            raise SpecError(name, f"sweep() has no such argument{hint(name, known)}")
        if not (is_chat(prompt) or is_chat(source)):
            raise SpecError(name, "the prompt is not a chat; omit it")
    shown = request.metric if isinstance(request.metric, Metric) else None
    if shown is not None:
        with at("metric"):
            metric = shown.with_ids(partial(token_id, engine))
            _check_tokens(metric.tokens, engine.vllm_config.model_config)
            request = request.with_metric(metric)
    target = _prompt_of(engine, "prompt", prompt, template)
    other = None if source is None else _prompt_of(engine, "source", source, template)
    config = engine.vllm_config.model_config
    request.check_readable(front.info.shape)
    params = _params_of(request.metric, call.sampling_params, config)
    context = SweepContext(front.info.shape, front.vectors.lookup, open_rows, most_cells)
    job = SweepJob(request, context, target, other, shown)
    most = max(1, _LOGIT_BYTES // (4 * config.get_vocab_size()))
    at_once = most if request.reads_all else 1 << 30
    return PreparedSweep(job, params, at_once)


def run_offline(
    llm: VllmLLM, front: Any, sweep: PreparedSweep, vllm_args: Mapping[str, Any]
) -> Sweep:
    """Carry out a sweep on an offline engine; `vllm_args` are of `vllm.LLM.generate`."""
    job = sweep.job
    generate = partial(_generate, llm, front, sweep)
    with front.use.whole_call():
        job.begin(generate(job.first_runs(), {**vllm_args, "use_tqdm": False}))
        runs = iter(job.runs())
        while batch := list(islice(runs, sweep.at_once)):
            for run, output in zip(batch, generate(batch, vllm_args), strict=True):
                job.add(run, output)
    return job.result()


async def run_async(
    llm: Any,
    front: Any,
    sweep: PreparedSweep,
    vllm_args: Mapping[str, Any],
    options: RunOptions,
) -> Sweep:
    """Carry out a sweep on an asynchronous engine. If the caller is cancelled, its requests are."""
    job = sweep.job

    async def output_of(run: SweepRun, more: Mapping[str, Any]) -> Any:
        call = AsyncEngineCall(llm, only_front(front), _NOTHING)
        params = with_plan(sweep.params, CallPlan(run.plan, most_bytes=options.most_bytes))
        prompt = {"prompt_token_ids": list(run.token_ids)}
        args = {**vllm_args, **more}
        outputs = call.outputs(prompt, params, f"{RUN_ID}{uuid.uuid4().hex}", args)
        return [output async for output in outputs][-1]

    at_once = options.at_once
    if at_once is None:
        at_once = 2 * llm.vllm_config.scheduler_config.max_num_seqs
    most = min(at_once, sweep.at_once)
    return await run_job(job, output_of, most, options.on_start, options.on_cell, options.turn)


def _generate(
    llm: VllmLLM,
    front: Any,
    sweep: PreparedSweep,
    runs: Sequence[SweepRun],
    vllm_args: Mapping[str, Any],
) -> list[Any]:
    prompts: list[Any] = [{"prompt_token_ids": list(run.token_ids)} for run in runs]
    call = OfflineCall(llm, front, None, _NOTHING, prompts)
    params = [with_plan(sweep.params, run.plan) for run in runs]
    return call.run(lambda: VllmLLM.generate(llm, prompts, params, **vllm_args), params)


def _prompt_of(engine: Any, name: str, prompt: Any, template: Mapping[str, Any]) -> SweepPrompt:
    with at(name):
        tokenized = tokenize(engine, prompt, template)
        longest = engine.vllm_config.model_config.max_model_len - 1
        if tokenized.length > longest:
            raise SpecError(
                "", f"{tokenized.length} tokens, and this engine computes {longest} at most"
            )
        return SweepPrompt(tokenized, token_texts(engine, tokenized))


def _check_tokens(tokens: Iterable[Any], config: Any) -> None:
    count = config.get_vocab_size()
    for token in tokens:
        if token >= count:
            raise SpecError(
                "", f"there is no token {token}: the model has {count}, 0 to {count - 1}"
            )


def _params_of(metric: Any, sampling_params: SamplingParams | None, config: Any) -> SamplingParams:
    """Return the sampling parameters of each run, which ask for what the metric reads."""
    params = SamplingParams(
        max_tokens=1, temperature=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )
    if not isinstance(metric, Metric):
        if sampling_params is None:
            return params
        if sampling_params.n != 1:
            raise SpecError("sampling_params.n", f"expected 1, got {sampling_params.n}")
        params = sampling_params.clone()
        params.output_kind = RequestOutputKind.FINAL_ONLY
        return params
    if sampling_params is not None:
        raise SpecError(
            "sampling_params", "only for a metric that is a function; each run is one token here"
        )
    if metric.reads_all:
        return params
    check_logprobs_mode(config.logprobs_mode)
    params.logprob_token_ids = [int(token) for token in metric.tokens]
    return params
