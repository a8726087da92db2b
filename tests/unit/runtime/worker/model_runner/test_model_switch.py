"""Which model each forward pass runs, and which CUDA graphs it replays."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from torch import nn

from midstream.runtime.worker.model_runner.model_switch import PLAIN, TAPPED, ModelSwitch
from midstream.runtime.worker.taps.tapped_model import Replacement


class Manager:
    """vLLM's graph manager: what it captures of the model that it is given, it replays."""

    def __init__(self):
        self.graphs = {}
        self.breakable_cg_runner = None
        self._capture_mem_samples = []

    def capture(self, model, sizes):
        self.breakable_cg_runner = f"runner of {name_of(model)}"
        for size in sizes:
            assert size not in self.graphs
            self.graphs[size] = name_of(model)
            self._capture_mem_samples.append(100 if model.inner.name == "tapped" else 10)

    def replay(self, size):
        return self.graphs[size]


class Inner(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner("plain")


def name_of(model):
    return model.inner.name


class Runner:
    """The dummy runs and captures of vLLM's V2 runner."""

    max_num_tokens = 64
    lora_config = None

    def __init__(self):
        self.model = Outer()
        self.cudagraph_manager = Manager()
        self.ran = []

    def _dummy_run(self, size, **options):
        self.ran.append((name_of(self.model), size))
        return len(self.ran)

    def capture_model(self):
        self.cudagraph_manager.capture(self.model, [1, 8])
        return 5

    def profile_cudagraph_memory(self):
        return 100

    def maybe_setup_dummy_loras(self, _config):
        return nullcontext()


class Worker:
    vllm_config = None

    def __init__(self):
        self.model_runner = Runner()

    def compile_or_warm_up_model(self):
        self.model_runner._dummy_run(64)
        self.model_runner.capture_model()
        return "times"

    def execute_dummy_batch(self):
        self.model_runner._dummy_run(1)


def check(run):
    """Stands for the check of taps."""
    run()


@pytest.fixture
def no_vllm_config(monkeypatch):
    import vllm.config

    monkeypatch.setattr(vllm.config, "set_current_vllm_config", lambda _: nullcontext())


def switched(*, lazy=False, single=False):
    worker = Worker()
    outer = worker.model_runner.model
    inner = Replacement(outer, "inner", outer.inner, Inner("tapped"))
    switch = ModelSwitch(worker, [] if single else [inner], lazy, True, check)
    switch.attach()
    return worker, worker.model_runner, switch


def test_dummy_runs_of_the_start_run_both_models_and_later_ones_vllms_own():
    worker, runner, _ = switched()
    assert runner._dummy_run(16) == 1, "vLLM uses what its own model returned"
    assert worker.compile_or_warm_up_model() == "times"
    both = [("plain", 16), ("tapped", 16), ("plain", 64), ("tapped", 64)]
    assert runner.ran == [*both, ("tapped", 1)]
    runner._dummy_run(2)
    assert runner.ran[-1] == ("plain", 2)
    assert name_of(runner.model) == "plain"


def test_each_model_replays_its_own_graphs():
    worker, runner, switch = switched()
    worker.compile_or_warm_up_model()
    manager = runner.cudagraph_manager
    for model, name in ((PLAIN, "plain"), (TAPPED, "tapped"), (TAPPED, "tapped"), (PLAIN, "plain")):
        switch.use(model)
        assert name_of(runner.model) == name
        assert [manager.replay(size) for size in (1, 8)] == [name, name]
        assert manager.breakable_cg_runner == f"runner of {name}"


def test_memory_of_a_graph_is_that_of_both_models():
    worker, runner, _ = switched()
    worker.compile_or_warm_up_model()
    assert runner.cudagraph_manager._capture_mem_samples == [110, 110]
    assert runner.profile_cudagraph_memory() == 100


def test_the_graphs_of_a_manager_that_is_given_up_are_used_no_more():
    worker, runner, switch = switched()
    runner.capture_model()
    runner.cudagraph_manager = Manager()
    worker.compile_or_warm_up_model()
    switch.use(TAPPED)
    assert runner.cudagraph_manager.replay(8) == "tapped"
    runner.cudagraph_manager = None
    switch.use(PLAIN)
    assert name_of(runner.model) == "plain"


@pytest.mark.usefixtures("no_vllm_config")
def test_a_lazy_switch_compiles_and_captures_the_tapped_model_once_and_reserves_memory_for_it():
    worker, runner, switch = switched(lazy=True)
    worker.compile_or_warm_up_model()
    assert runner.ran == [("plain", 64)]
    assert runner.profile_cudagraph_memory() == 200
    switch.prepare()
    assert runner.ran == [("plain", 64), ("tapped", 64), ("tapped", 1)]
    assert runner.cudagraph_manager.replay(8) == "plain"
    switch.use(TAPPED)
    assert runner.cudagraph_manager.replay(8) == "tapped"
    switch.prepare()
    assert len(runner.ran) == 3


def test_with_one_model_dummy_runs_run_once_and_the_taps_are_checked_too():
    worker, runner, switch = switched(single=True)
    worker.compile_or_warm_up_model()
    assert runner.ran == [("plain", 64), ("plain", 1)]
    switch.prepare()
    switch.use(TAPPED)
    assert name_of(runner.model) == "plain"


def test_a_dummy_run_that_fails_leaves_vllms_own_model():
    _, runner, switch = switched()

    def fail():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        switch._run(lambda: fail() if name_of(runner.model) == "tapped" else None)
    assert name_of(runner.model) == "plain"


class Wrapper:
    """The V1 runner's wrapper of a model, which keeps its graphs itself."""

    def __init__(self, runnable, vllm_config, runtime_mode):
        self.runnable = runnable
        self.vllm_config = vllm_config
        self.runtime_mode = runtime_mode


def test_the_v1_runners_wrapper_is_made_anew_for_the_tapped_model():
    outer = Outer()
    wrapper = Wrapper(outer, "config", "FULL")
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=wrapper))
    inner = Replacement(outer, "inner", outer.inner, Inner("tapped"))
    switch = ModelSwitch(worker, [inner], False, False, check)
    switch.use(TAPPED)
    mine = worker.model_runner.model
    assert mine is not wrapper
    assert (mine.runnable, mine.vllm_config, mine.runtime_mode) == (outer, "config", "FULL")
    assert name_of(outer) == "tapped"
    switch.use(PLAIN)
    assert worker.model_runner.model is wrapper
    # Where the whole model is copied, the wrapper holds the copy.
    copied = Outer()
    whole = ModelSwitch(worker, [Replacement(None, "", outer, copied)], False, False, check)
    for model, runs in ((TAPPED, copied), (PLAIN, outer)):
        whole.use(model)
        assert worker.model_runner.model.runnable is runs
