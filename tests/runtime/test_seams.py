"""The places where midstream takes hold of vLLM: as expected, or refused before any is touched."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest

from midstream.errors import SeamError, UnsupportedError
from midstream.runtime import patches, seams

PATCHED = [
    ("vllm.engine.arg_utils", "EngineArgs"),
    ("vllm.v1.worker.worker_base", "WorkerWrapperBase"),
    ("vllm.v1.engine.input_processor", "InputProcessor"),
    ("vllm.v1.engine.llm_engine", "LLMEngine"),
    ("vllm.v1.engine.core", "EngineCore"),
]


def classes():
    return [getattr(importlib.import_module(module), name) for module, name in PATCHED]


def test_the_installed_vllm_fits():
    seams.check_process()
    seams.check_async()


def test_a_changed_async_engine_is_named(monkeypatch):
    from vllm.v1.engine.async_llm import AsyncLLM

    monkeypatch.setattr(AsyncLLM, "abort", lambda self, request_id: None)
    seams.check_process()
    with pytest.raises(SeamError, match=r"AsyncLLM\.abort takes \(request_id\), expected \(requ"):
        seams.check_async()


def test_the_classes_of_both_runners_fit():
    runners = [
        ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", seams.V1_SEAMS),
        ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", seams.V2_SEAMS[:1]),
    ]
    for module, name, wanted in runners:
        cls = getattr(importlib.import_module(module), name)
        for seam in wanted:
            assert seams._problems(cls, seam, f"{module}.{seam.name}") == []


def changed(self, request, prompt, params):
    """Takes `request` where there was `request_id`."""


def fewer(self, request_id):
    """Takes too little."""


def more(self, request_id, prompt, params, something_new=None, *, newer=None):
    """Takes more."""


@pytest.mark.parametrize(
    ("replacement", "difference"),
    [
        (changed, r"takes (request, prompt, params), expected (request_id, prompt, params, …)"),
        (fewer, r"takes (request_id), expected (request_id, prompt, params, …)"),
        (None, r"is missing (the front door: plans are checked and resolved)"),
        (3, r"is missing (the front door: plans are checked and resolved)"),
    ],
)
def test_a_changed_signature_is_refused_by_name_and_nothing_is_patched(
    monkeypatch, replacement, difference
):
    from vllm.v1.engine.input_processor import InputProcessor

    monkeypatch.setattr(patches, "_active", False)
    if replacement is None:
        monkeypatch.delattr(InputProcessor, "process_inputs")
    else:
        monkeypatch.setattr(InputProcessor, "process_inputs", replacement)
    before = [dict(vars(cls)) for cls in classes()]
    with pytest.raises(SeamError) as caught:
        patches.activate()
    where = "vllm.v1.engine.input_processor.InputProcessor.process_inputs"
    assert f"\n  {where} {difference}" in str(caught.value)
    assert "is not one that this midstream fits" in str(caught.value)
    assert not patches.is_active()
    assert [dict(vars(cls)) for cls in classes()] == before
    assert isinstance(caught.value, UnsupportedError)


def test_parameters_that_a_release_adds_do_no_harm(monkeypatch):
    from vllm.v1.engine.input_processor import InputProcessor

    monkeypatch.setattr(InputProcessor, "process_inputs", more)
    seams.check_process()


def test_every_difference_is_named_at_once(monkeypatch):
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.llm_engine import LLMEngine

    monkeypatch.setattr(InputProcessor, "process_inputs", changed)
    monkeypatch.delattr(LLMEngine, "has_unfinished_requests")
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.worker_base", None)
    with pytest.raises(SeamError) as caught:
        seams.check_process()
    assert len(str(caught.value).splitlines()) == 1 + 3
    assert "InputProcessor.process_inputs takes" in str(caught.value)
    assert "LLMEngine.has_unfinished_requests is missing" in str(caught.value)
    assert "vllm.v1.worker.worker_base: " in str(caught.value)


# ---------------------------------------------------------------- runners


class V1Runner:
    def __init__(self):
        self.input_batch = SimpleNamespace(req_ids=[], num_reqs=0, num_computed_tokens_cpu=[])
        self.query_start_loc = SimpleNamespace(np=[])

    def _update_states(self, scheduler_output):
        """Requests come and go."""

    def _model_forward(self, input_ids, positions, intermediate_tensors, inputs_embeds, **rest):
        """A forward."""


class V2State:
    def preprocess_state(self, input_batch, req_states):
        """Before the forward."""


class V2Runner:
    def __init__(self):
        self.model_state = V2State()

    def execute_model(self, scheduler_output, intermediate_tensors=None, dummy_run=False):
        """A step."""


def test_the_two_runners_are_told_apart_and_fit():
    assert not seams.is_v2_runner(V1Runner())
    assert seams.is_v2_runner(V2Runner())
    seams.check_runner(V1Runner(), is_v2=False)
    seams.check_runner(V2Runner(), is_v2=True)


@pytest.mark.parametrize("path", seams.V1_ATTRIBUTES)
def test_an_attribute_that_a_v1_runner_lacks_is_named(path):
    runner = V1Runner()
    *holders, name = path.split(".")
    holder = runner
    for one in holders:
        holder = getattr(holder, one)
    delattr(holder, name)
    with pytest.raises(SeamError, match=rf"V1Runner has no {path}"):
        seams.check_runner(runner, is_v2=False)


@pytest.mark.parametrize("seam", seams.V1_SEAMS, ids=lambda seam: seam.name)
def test_a_changed_method_of_a_v1_runner_is_named(seam):
    runner = V1Runner()
    setattr(runner, seam.name, lambda something: something)
    with pytest.raises(SeamError, match=rf"V1Runner\.{seam.name} takes \(something\), expected"):
        seams.check_runner(runner, is_v2=False)


def test_a_changed_v2_runner_is_named(monkeypatch):
    runner = V2Runner()
    runner.model_state.preprocess_state = lambda batch: batch
    with pytest.raises(SeamError, match=r"model_state\.preprocess_state takes \(batch\)"):
        seams.check_runner(runner, is_v2=True)
    runner.model_state = None
    with pytest.raises(SeamError, match=r"model_state\.preprocess_state is missing"):
        seams.check_runner(runner, is_v2=True)
    monkeypatch.setattr(seams, "V2_BATCH_FIELDS", ("req_ids", "renamed"))
    with pytest.raises(SeamError, match="InputBatch has no renamed$"):
        seams.check_runner(V2Runner(), is_v2=True)
