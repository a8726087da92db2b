"""One call of `LLM.generate` or `LLM.chat`: its plans on the way in, its results on the way out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from vllm import LLM as VllmLLM
from vllm import RequestOutput, SamplingParams

from midstream.api.arguments import CallArguments, PromptArguments
from midstream.api.default_capture import DefaultCapture
from midstream.api.last_token import (
    EngineLimits,
    check,
    check_controller,
    check_epoch,
    check_prompts,
    requests_of,
)
from midstream.api.sampling_params import check_params
from midstream.errors import ReceiptError, SpecError
from midstream.plan import Plan
from midstream.plan.control.controller import Controller
from midstream.runtime.frontend.request.call_plan import CallPlan, merged_plan, with_plan
from midstream.runtime.frontend.request.controller_run import check_beside
from midstream.runtime.frontend.results.outputs import without_nothing


class OfflineCall:
    """One call of an offline engine."""

    def __init__(
        self,
        llm: VllmLLM,
        front_end: Any,
        default: DefaultCapture | None,
        arguments: CallArguments,
        prompts: Sequence[Any],
    ) -> None:
        check_prompts(default, prompts)
        self._llm = llm
        self._front_end = front_end
        self._default = default
        self._arguments = arguments
        self._prompts = prompts
        self._epoch = front_end.steering.epoch

    def with_plans(
        self,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        call_plan: Callable[[int, Plan | None], Plan | CallPlan | None] = lambda _, plan: plan,
    ) -> list[SamplingParams]:
        """Return a copy of the sampling parameters for each prompt, with its plan attached."""
        check_params(sampling_params)
        arguments, count = self._arguments, len(self._prompts)
        if sampling_params is None:
            sampling_params = self._llm.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            params_list = [sampling_params] * count
        else:
            params_list = list(sampling_params)
            if len(params_list) != count:
                raise SpecError(
                    "sampling_params",
                    f"{len(params_list)} for {count} prompts; give one, or one each",
                )
        plans: dict[tuple[int, ...], Plan | None] = {}
        out = []
        for index, (params, asked) in enumerate(
            zip(params_list, arguments.per_prompt(count), strict=True)
        ):
            beside, prompt_arguments = asked.split_controller()
            key = (id(params), *prompt_arguments.key)
            if key not in plans:
                try:
                    plans[key] = self._plan(params, prompt_arguments)
                except SpecError as error:
                    raise arguments.explain(error, index) from None
            plan = plans[key]
            attached = call_plan(index, plan)
            if beside is not None:
                try:
                    attached = self._controlled(attached, params, beside)
                except SpecError as error:
                    raise arguments.explain(error, index) from None
            # A copy in any case: vLLM's offline engine sets fields of its parameters.
            out.append(with_plan(params, attached))
        return out

    def results(
        self, work: Callable[[], list[RequestOutput]], params: Sequence[SamplingParams]
    ) -> list[Any]:
        """Run a call as `run` does; return outputs without attributes of what was not asked for."""
        try:
            outputs = self.run(work, params)
        except ReceiptError as error:
            for output in error.outputs:
                without_nothing(output)
            raise
        for output in outputs:
            without_nothing(output)
        return outputs

    def run(
        self, work: Callable[[], list[RequestOutput]], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        """Run a call of vLLM with `params` of `with_plans`; on an error, abort its requests."""
        # Outside of the rest: the ids counted there are of this call alone.
        with self._front_end.use.whole_call():
            return self._run(work, params)

    def _run(
        self, work: Callable[[], list[RequestOutput]], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        llm, front = self._llm, self._front_end
        before = llm.request_counter.counter
        try:
            with front.report_at_end() as ended:
                outputs = work()
                ended += outputs
                self._attach_default(outputs, params)
        except ReceiptError:
            raise
        except BaseException as error:
            # Otherwise the next call would return the outputs of this call's requests.
            mine = [str(number) for number in range(before, llm.request_counter.counter)]
            llm.llm_engine.abort_request(mine)
            front.drop(set(mine))
            if isinstance(error, SpecError):
                index = llm.request_counter.counter - before - 1
                raise self._arguments.explain(error, index) from None
            raise
        return outputs

    def _attach_default(
        self, outputs: Sequence[RequestOutput], params: Sequence[SamplingParams]
    ) -> None:
        if self._default is None:
            return
        limits = EngineLimits.of(self._llm, self._front_end)
        wanted = []
        for output, prompt, sampling_params in zip(outputs, self._prompts, params, strict=True):
            self._default.attach(output, limits.num_layers)
            wanted += requests_of(self._default, output, prompt, sampling_params, limits)
        if not wanted:
            return
        adapters = [request.lora_request for request in wanted]
        last_outputs = VllmLLM.generate(
            self._llm,
            [request.prompt for request in wanted],
            [request.params for request in wanted],
            use_tqdm=False,
            lora_request=adapters if any(adapters) else None,
        )
        check_epoch(self._epoch, self._front_end)
        for last_request, output in zip(wanted, last_outputs, strict=True):
            last_request.add(output)

    def _controlled(
        self, attached: Plan | CallPlan | None, params: SamplingParams, controller: Controller
    ) -> CallPlan:
        call_plan = attached if isinstance(attached, CallPlan) else CallPlan(attached)
        check_beside(call_plan.plan, params, controller)
        check_controller(self._default)
        return replace(call_plan, controller=controller)

    def _plan(self, params: SamplingParams, arguments: PromptArguments) -> Plan | None:
        plan = merged_plan(arguments.plan(), params)
        assert not isinstance(plan, CallPlan), "no caller attaches one to parameters of its own"
        if self._default is not None:
            check(self._default, plan, self._front_end)
            plan = self._default.join(plan, params.max_tokens)
        return plan
