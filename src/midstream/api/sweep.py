"""A sweep on an engine: its prompts as tokens, its runs as vLLM's requests."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from vllm import LLM as VllmLLM
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from midstream.api.arguments import CallArguments
from midstream.api.async_call import AsyncEngineCall
from midstream.api.offline_call import OfflineCall
from midstream.errors import SpecError
from midstream.runtime.frontend.request.call_plan import CallPlan, with_plan
from midstream.runtime.frontend.request.prompt.tokenized import (
    is_chat,
    token_id,
    token_texts,
    tokenize,
)
from midstream.runtime.vllm.seam_functions import TEMPLATE_ARGUMENTS
from midstream.spec.captured_rows import OpenRows
from midstream.spec.shape import ModelShape
from midstream.sweep import Metric, Sweep, SweepRequest
from midstream.sweep.cells import SweepCell
from midstream.sweep.job import SweepContext, SweepJob, SweepPrompt, SweepRun
from midstream.sweep.source import PromptSource
from midstream.validation import at

# Bytes of logits that are on outputs at the same time.
_LOGIT_BYTES = 256 << 20
_NOTHING = CallArguments()

# Called with each cell and its value, as soon as it is known.
OnCell = Callable[[SweepCell, float], object]


@dataclass(frozen=True)
class PreparedSweep:
    """A sweep that was checked against its engine.

    Attributes:
        job: its runs.
        params: sampling parameters of each run, without its plan.
        at_once: number of runs whose outputs may be kept at the same time.
    """

    job: SweepJob
    params: SamplingParams
    at_once: int


def prepare(
    engine: Any,
    front: Any,
    prompt: Any,
    request: SweepRequest,
    template: Mapping[str, Any],
    sampling_params: SamplingParams | None = None,
    open_rows: OpenRows | None = None,
) -> PreparedSweep:
    """Check a sweep against its engine.

    Args:
        engine: vLLM's LLMEngine or AsyncLLM.
        front: its front end.
        prompt: the prompt that is patched.
        request: the sweep.
        template: arguments of the chat template, for prompts that are messages.
        sampling_params: of each run; only for a metric that is a function. None: one token, the
            most likely one.
        open_rows: returns the rows of an earlier request by id; None: there are none.

    Raises:
        SpecError: the engine or a prompt lacks something that the sweep names.
    """
    source = request.source.prompt if isinstance(request.source, PromptSource) else None
    for name in template:
        if name not in TEMPLATE_ARGUMENTS:
            raise SpecError(name, "sweep() has no such argument")
        if not (is_chat(prompt) or is_chat(source)):
            raise SpecError(name, "the prompt is not a chat; omit it")
    shown = request.metric if isinstance(request.metric, Metric) else None
    if shown is not None:
        with at("metric"):
            request = request.with_metric(shown.with_ids(partial(token_id, engine)))
    target = _prompt_of(engine, "prompt", prompt, template)
    other = None if source is None else _prompt_of(engine, "source", source, template)
    config = engine.vllm_config.model_config
    if isinstance(request.metric, Metric) and request.metric.reads_all:
        _check_final_norm(front.info.shape)
    params = _params_of(request.metric, sampling_params, config)
    context = SweepContext(front.info.shape, front.vectors.lookup, open_rows)
    job = SweepJob(request, context, target, other, shown)
    reads_all = isinstance(request.metric, Metric) and request.metric.reads_all
    at_once = max(1, _LOGIT_BYTES // (4 * config.get_vocab_size())) if reads_all else 1 << 30
    return PreparedSweep(job, params, at_once)


def run_offline(
    llm: VllmLLM, front: Any, sweep: PreparedSweep, vllm_args: Mapping[str, Any]
) -> Sweep:
    """Carry out a sweep on an offline engine.

    Args:
        llm: the engine.
        front: its front end.
        sweep: the sweep.
        vllm_args: arguments of `vllm.LLM.generate`.

    Raises:
        ReceiptError: results differ from their plan.
    """
    job = sweep.job
    job.begin(_generate(llm, front, sweep, job.first_runs(), {**vllm_args, "use_tqdm": False}))
    runs = iter(job.runs())
    while batch := list(islice(runs, sweep.at_once)):
        for run, output in zip(batch, _generate(llm, front, sweep, batch, vllm_args), strict=True):
            job.add(run, output)
    return job.result()


async def run_async(
    llm: Any,
    front: Any,
    sweep: PreparedSweep,
    vllm_args: Mapping[str, Any],
    on_cell: OnCell | None = None,
) -> Sweep:
    """Carry out a sweep on an asynchronous engine. If the caller is cancelled, its requests are.

    A few more runs than the engine computes at the same time are sent to it, so that requests of
    others do not wait for all of a sweep.

    Args:
        llm: the engine.
        front: its front end.
        sweep: the sweep.
        vllm_args: arguments of vLLM's `generate`.
        on_cell: called with each cell and its value.

    Raises:
        ReceiptError: results differ from their plan.
    """
    job = sweep.job

    async def output_of(run: SweepRun) -> Any:
        call = AsyncEngineCall(llm, front, None, _NOTHING)
        params = with_plan(sweep.params, CallPlan(run.plan))
        prompt = {"prompt_token_ids": list(run.token_ids)}
        outputs = call.outputs(prompt, params, f"sweep-{uuid.uuid4().hex}", vllm_args)
        return [output async for output in outputs][-1]

    job.begin(await _all(output_of(run) for run in job.first_runs()))
    runs = iter(job.runs())

    async def work() -> None:
        for run in runs:
            value = job.add(run, await output_of(run))
            if on_cell is not None and run.cell is not None:
                on_cell(run.cell, value)

    width = min(2 * llm.vllm_config.scheduler_config.max_num_seqs, sweep.at_once)
    await _all(work() for _ in range(width))
    return job.result()


async def _all(work: Any) -> list[Any]:
    """Return the results of coroutines; if one fails, or the caller is cancelled, all end."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


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
        found = tokenize(engine, prompt, template)
        return SweepPrompt(found, token_texts(engine, found))


def _check_final_norm(shape: ModelShape) -> None:
    """Check that the logits of all tokens can be read.

    Raises:
        SpecError: they cannot.
    """
    if not shape.tapped_layers("final_norm"):
        raise SpecError(
            "metric",
            "KL reads the logits of all tokens: tap final_norm, "
            'LLM(…, midstream={"sites": [..., "final_norm"]})',
        )


def _params_of(metric: Any, given: SamplingParams | None, config: Any) -> SamplingParams:
    """Return the sampling parameters of each run, which ask for what the metric reads."""
    one = SamplingParams(
        max_tokens=1, temperature=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )
    if not isinstance(metric, Metric):
        if given is None:
            return one
        if given.n != 1:
            raise SpecError("sampling_params.n", f"expected 1, got {given.n}")
        return _whole(given)
    if given is not None:
        raise SpecError(
            "sampling_params", "only for a metric that is a function; each run is one token here"
        )
    if metric.reads_all:
        return one
    if "logprobs" not in str(getattr(config.logprobs_mode, "value", config.logprobs_mode)):
        raise SpecError(
            "metric",
            f"needs log-probabilities, and this engine has logprobs_mode={config.logprobs_mode!r}; "
            'start it with "raw_logprobs"',
        )
    one.logprob_token_ids = [int(token) for token in metric.tokens]
    return one


def _whole(params: SamplingParams) -> SamplingParams:
    """Return a copy of sampling parameters whose outputs come when they are whole."""
    found = params.clone()
    found.output_kind = RequestOutputKind.FINAL_ONLY
    return found
