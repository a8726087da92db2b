"""Choice between vLLM's own model and the tapped model, for each forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from midstream.runtime.worker.model_runner.graph_sets import capture_every_model, graph_sets
from midstream.runtime.worker.taps.tapped_model import Replacement

PLAIN, TAPPED = False, True


class ModelSwitch:
    """Exchanges what differs between the two models; dummy runs run both until the start ends."""

    def __init__(
        self,
        worker: Any,
        replacements: Sequence[Replacement],
        lazy: bool,
        is_v2: bool,
        check_taps: Callable[[Callable[[], object]], None],
    ) -> None:
        self._worker = worker
        self._is_lazy = lazy and bool(replacements)
        self._is_v2 = is_v2
        self._check_taps = check_taps
        self._models: tuple[bool, ...] = (PLAIN,) if self._is_lazy else (PLAIN, TAPPED)
        self._current = PLAIN
        self._places: list[tuple[dict[str, Any], str, tuple[Any, Any]]] = []
        tapped_root = None
        for replacement in replacements:
            if replacement.owner is None:
                tapped_root = replacement.tapped
            else:
                children: dict[str, Any] = replacement.owner._modules
                self._places.append(
                    (children, replacement.name, (replacement.plain, replacement.tapped))
                )
        if replacements:
            runner = worker.model_runner
            both = runner.model, _wrapped_as(runner.model, tapped_root)
            self._places.append((vars(runner), "model", both))

    def use(self, tapped: bool) -> None:
        """Make the next forward passes run one of the models; without effect if there is one."""
        if tapped == self._current or not self._places:
            return
        for owner, name, models in self._places:
            owner[name] = models[tapped]
        graphs = graph_sets(self._worker.model_runner)
        if graphs is not None:
            graphs.use(tapped)
        self._current = tapped

    def attach(self) -> None:
        """Wrap the worker's start-up, and its runner's dummy runs and captures of graphs."""
        worker, runner = self._worker, self._worker.model_runner
        dummy_run, warm_up = runner._dummy_run, worker.compile_or_warm_up_model

        def warm_up_hooked() -> Any:
            out = warm_up()
            self._models = (PLAIN,)
            if not self._is_lazy:
                self._check()
            return out

        worker.compile_or_warm_up_model = warm_up_hooked
        if not self._places:
            return
        runner._dummy_run = lambda *args, **kwargs: self._run(lambda: dummy_run(*args, **kwargs))
        if self._is_v2:
            capture_every_model(runner, lambda capture: capture(self._models, self.use))
        if self._is_lazy:
            profile = runner.profile_cudagraph_memory
            # The graphs of the tapped model are captured later and take as much.
            runner.profile_cudagraph_memory = lambda: 2 * profile()

    def prepare(self) -> None:
        """Compile the tapped model and capture its graphs, unless that is done."""
        if not self._is_lazy:
            return
        self._is_lazy = False
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self._worker.vllm_config):
            self._with_tapped(self._compile)
            self._check()

    def _compile(self) -> None:
        runner = self._worker.model_runner
        if not self._is_v2:
            runner._dummy_run(runner.max_num_tokens, is_profile=True)
            if runner.compilation_config.cudagraph_mode.value:
                runner.capture_model()
            return
        runner._dummy_run(runner.max_num_tokens, is_profile=True, skip_attn=True)
        graphs = graph_sets(runner)
        if graphs is not None:
            with runner.maybe_setup_dummy_loras(runner.lora_config):
                graphs.capture(self._models, self.use)
            self.use(PLAIN)

    def _check(self) -> None:
        run = self._worker.execute_dummy_batch
        self._check_taps(lambda: self._with_tapped(run))

    def _with_tapped(self, run: Callable[[], Any]) -> None:
        """Call a function whose dummy runs run the tapped model."""
        self._models = (TAPPED,)
        try:
            run()
        finally:
            self._models = (PLAIN,)

    def _run(self, run: Callable[[], Any]) -> Any:
        """Call a function for each model of dummy runs; return what the first call returned."""
        results = []
        try:
            for tapped in self._models:
                self.use(tapped)
                results.append(run())
        finally:
            self.use(PLAIN)
        return results[0]


def _wrapped_as(wrapper: Any, model: nn.Module | None) -> Any:
    """Return the V1 runner's wrappers around a model (None: its own), without CUDA graphs."""
    if isinstance(wrapper, nn.Module):
        return wrapper if model is None else model
    own = vars(wrapper)
    modes = {"runtime_mode": own["runtime_mode"]} if "runtime_mode" in own else {}
    return type(wrapper)(_wrapped_as(wrapper.runnable, model), wrapper.vllm_config, **modes)
