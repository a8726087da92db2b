"""`sweep` of `LLM` and of `AsyncLLM`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from midstream.api.traffic import RUN_ID, Traffic
from midstream.lab.sweep import Metric, Sweep, SweepRequest
from midstream.lab.sweep.metrics import MetricFunction
from midstream.plan.forms import IndicesLike, LayersLike, NumberLike, PositionsLike, SitesLike

if TYPE_CHECKING:
    from vllm import SamplingParams

    from midstream.lab.api.sweep import PreparedSweep
    from midstream.lab.sweep.async_run import OnCell
    from midstream.runtime.frontend.async_frontend import AsyncFrontEnd


class OfflineSweeps:
    """Sweeps of an `LLM`."""

    _front_end: Any

    def sweep(
        self,
        prompt: Any,
        source: Any,
        metric: Metric | MetricFunction | Mapping[str, Any] | str,
        *,
        layers: LayersLike | None = None,
        sites: SitesLike | None = None,
        positions: PositionsLike | None = None,
        exclude: PositionsLike | None = None,
        groups: Mapping[str, PositionsLike] | None = None,
        heads: IndicesLike | Literal["all"] | None = None,
        sae: str | None = None,
        features: IndicesLike | None = None,
        align: Any = "exact",
        alpha: NumberLike = 1.0,
        mask: Any = None,
        repeats: int = 3,
        sampling_params: SamplingParams | None = None,
        use_tqdm: Any = True,
        lora_request: Any = None,
        **template: Any,
    ) -> Sweep:
        """Patch a prompt at each cell of a grid, and return a metric of each cell.

        This is activation patching: Vig et al. 2020 (arXiv:2004.12265), Meng et al. 2022
        (arXiv:2202.05262), Wang et al. 2022 (arXiv:2211.00593). All cells are one batch: each is a
        request with an edit of its own. The prefix cache serves what comes before the first patched
        position.

        Args:
            prompt: the prompt that is patched, the corrupt one: text, token ids, or the messages of
                a chat.
            source: what its vectors are replaced by: the clean prompt, in any of these forms; 0 or
                "zero"; `"mean:NAME"` or `Named(NAME)`, a registered vector for all positions; an
                output with `activations`, or these; or `{(site, layer): [rows, width]}`, a row for
                each position from 0, or one for all of them. At `z`, `q`, `k` and `v` rows are of
                all heads. With `features` also a number: their activation.
            metric: `LogProb(token)`, `LogitDiff(a, b)`, `KL()` or `Recovered(metric)` of the token
                that follows the prompt; their JSON forms; or a function that returns a number for
                an output of `generate`. `KL` needs what `Logits` does.
            layers, sites: any form of Layers and Sites: which vectors are patched. Default: every
                layer at `resid_post`, which engines tap by default; with `sae` where it was
                trained.
            positions: any form of Positions: one cell for each selected token. Default: the prompt.
            exclude: positions to leave out.
            groups: instead of `positions`: positions that are patched together, by name, as
                `{"subject": Text("Japan"), "all": "prompt"}`; one cell for each name.
            heads: at `q`, `k`, `v` and `z`: "all", a head, or a list of heads: one cell for each.
                None: all heads together.
            sae: name of a registered SAE (`llm.saes`), with `features`.
            features: ids of features of `sae`: one cell for each. Its activation a becomes
                (1 − alpha) · a + alpha · that of the source vector, and nothing else changes, as in
                `Feature`.
            align: where the lengths of the two prompts differ, "suffix" or "prefix": positions
                correspond if they are equally far from the end, or from the beginning. Or
                `{position of the prompt: position of the source}`. Positions without one of the
                source have no cell: nan. Activations without their output do not say where their
                prompt ends, so their positions cannot be counted from there.
            alpha: h ← (1 − alpha) · h + alpha · source.
            mask: the components that are patched, those of a head with `heads`: integers are their
                indices, other numbers a factor of alpha for each component. None: all.
            repeats: number of unpatched runs among the cells, for `Sweep.noise_floor`.
            sampling_params: of each run, for a metric that is a function. Default: one token.
            use_tqdm: as in `vllm.LLM.generate`.
            lora_request: adapter of all runs.
            **template: arguments of the chat template, as in `vllm.LLM.chat`.

        Raises:
            SpecError: an argument is malformed, or the model or a prompt lacks something.
            ReceiptError: results differ from their plan.
        """
        from midstream.lab.api.sweep import SweepCall, prepare, run_offline
        from midstream.runtime.frontend.request.prompt.tokenized import is_chat

        request = SweepRequest(
            source, metric, layers, sites, positions, exclude, groups, heads, sae, features, align,
            alpha, mask, repeats,
        )  # fmt: skip
        llm: Any = self
        front = self._front_end
        if is_chat(prompt) or is_chat(source):
            # vLLM's default is the template that the engine was created with.
            template = {"chat_template": getattr(llm, "chat_template", None), **template}
        prepared = prepare(
            llm.llm_engine, front, SweepCall(prompt, request, template, sampling_params)
        )
        vllm_args = {"use_tqdm": use_tqdm, "lora_request": lora_request}
        return run_offline(llm, front, prepared, vllm_args)


class AsyncSweeps:
    """Sweeps of an `AsyncLLM`."""

    _front: AsyncFrontEnd

    def traffic(self) -> Traffic:
        """Return what the engine does besides sweeps. Raises RuntimeError before `ready()`."""
        llm: Any = self
        states = llm.output_processor.request_states
        others = [state for name, state in states.items() if not name.startswith(RUN_ID)]
        starting = sum(state.is_prefilling for state in others)
        engines = len(llm.engine_core.core_engines)
        seats = llm.vllm_config.scheduler_config.max_num_seqs * engines
        waiting = self._front.waiting
        return Traffic(len(others), starting, waiting, seats)

    async def sweep(
        self,
        prompt: Any,
        source: Any,
        metric: Metric | MetricFunction | Mapping[str, Any] | str,
        *,
        sampling_params: SamplingParams | None = None,
        on_cell: OnCell | None = None,
        lora_request: Any = None,
        priority: int = 0,
        template: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Sweep:
        """Patch a prompt at each cell of a grid, and return a metric of each cell.

        Args:
            prompt, source, metric, sampling_params, lora_request: as for `LLM.sweep`.
            on_cell: called with each `SweepCell` and its value as soon as it is known.
            priority: of all runs, as in vLLM's `generate`.
            template: arguments of the chat template.
            **fields: other arguments of `LLM.sweep`.

        Raises:
            SpecError: an argument is malformed, or the model or a prompt lacks something.
            ReceiptError: results differ from their plan.
        """
        request = SweepRequest(source, metric, **fields)
        await self.ready()  # type: ignore[attr-defined]
        prepared = self.prepare_sweep(prompt, request, template or {}, sampling_params)
        vllm_args = {"lora_request": lora_request, "priority": priority}
        return await self.run_sweep(prepared, vllm_args, on_cell=on_cell)

    def prepare_sweep(
        self,
        prompt: Any,
        request: SweepRequest,
        template: Mapping[str, Any],
        sampling_params: SamplingParams | None = None,
        **options: Any,
    ) -> PreparedSweep:
        """Check a sweep against the engine; see `midstream.lab.api.sweep.prepare`. May be called in
        any thread. Raises RuntimeError before `ready()`.
        """
        from midstream.lab.api.sweep import SweepCall, prepare

        call = SweepCall(prompt, request, template, sampling_params)
        return prepare(self, self._front, call, **options)

    async def run_sweep(
        self, sweep: PreparedSweep, vllm_args: Mapping[str, Any], **options: Any
    ) -> Sweep:
        """Carry out a sweep; see `midstream.lab.api.sweep.RunOptions`."""
        from midstream.lab.api.sweep import RunOptions, run_async

        return await run_async(self, self._front, sweep, vllm_args, RunOptions(**options))
