"""CUDA graphs of both models in vLLM's V2 model runner, whose manager has one set of graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from midstream.runtime.vllm.attributes import GRAPHS


class GraphSets:
    """The graphs that one of vLLM's graph managers has captured, by model."""

    def __init__(self, runner: Any, manager: Any) -> None:
        self._runner = runner
        self._manager = manager
        self._original: Callable[..., Any] = manager.capture
        self._again: Callable[[], Any] | None = None
        self._sets: dict[bool, tuple[Any, Any]] = {}

    def use(self, tapped: bool) -> None:
        """Make the manager replay the graphs of one of the models."""
        if tapped in self._sets:
            self._manager.graphs, self._manager.breakable_cg_runner = self._sets[tapped]

    def capture(self, models: Sequence[bool], select: Callable[[bool], None]) -> None:
        """Capture some models' graphs, as the manager's last capture did; `select` chooses one."""
        assert self._again is not None
        manager = self._manager
        # vLLM extrapolates from the memory of the first graphs: of each, that of all models.
        samples: list[int] | None = getattr(manager, "_capture_mem_samples", None)
        memory: list[list[int]] = []
        for tapped in models:
            select(tapped)
            manager.graphs, manager.breakable_cg_runner = {}, None
            self._again()
            self._sets[tapped] = manager.graphs, manager.breakable_cg_runner
            if samples is not None:
                memory.append(samples.copy())
                samples.clear()
        if samples is not None:
            samples.extend(map(sum, zip(*memory, strict=True)))

    def keep_arguments(self, *args: Any, **kwargs: Any) -> None:
        """Set the arguments of captures, without the model."""
        self._again = lambda: self._original(self._runner.model, *args, **kwargs)


def graph_sets(runner: Any) -> GraphSets | None:
    """Return the sets of a runner's present graph manager; None if it has captured nothing."""
    manager = getattr(runner, "cudagraph_manager", None)
    return None if manager is None else GRAPHS.get(manager)


Capture = Callable[[Sequence[bool], Callable[[bool], None]], None]


def capture_every_model(runner: Any, run: Callable[[Capture], None]) -> None:
    """Wrap `capture_model`: `run` captures several models' graphs, a measuring manager's too."""
    capture_model = runner.capture_model

    def capture_model_hooked(*args: Any, **kwargs: Any) -> Any:
        manager = runner.cudagraph_manager
        if manager is not None and GRAPHS.get(manager) is None:
            sets = GraphSets(runner, manager)
            GRAPHS.set(manager, sets)

            def capture(_model: Any, *args: Any, **kwargs: Any) -> None:
                sets.keep_arguments(*args, **kwargs)
                run(sets.capture)

            manager.capture = capture
        return capture_model(*args, **kwargs)

    runner.capture_model = capture_model_hooked
