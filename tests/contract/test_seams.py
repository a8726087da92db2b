"""The places where midstream takes hold of vLLM: as expected, or refused before any is touched."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest

from midstream.errors import SeamError, UnsupportedError
from midstream.runtime import install as patches
from midstream.runtime.frontend.request.prompt.message_spans import TEMPLATE_ARGUMENTS
from midstream.runtime.vllm import seams

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
    seams.check("process")
    seams.check("offline")
    seams.check("async")


def test_a_changed_async_engine_is_named(monkeypatch):
    from vllm.v1.engine.async_llm import AsyncLLM

    monkeypatch.setattr(AsyncLLM, "abort", lambda self, request_id: None)
    seams.check("process")
    with pytest.raises(SeamError, match=r"AsyncLLM\.abort takes \(request_id\), expected \(requ"):
        seams.check("async")


def test_the_arguments_of_a_chats_template_are_part_of_a_seam():
    chat = next(seam for seam in seams.SEAMS if seam.name == "LLM.chat")
    assert chat.named == TEMPLATE_ARGUMENTS


def test_a_changed_offline_engine_is_named(monkeypatch):
    from vllm import LLM

    def chat(self, messages, sampling_params, chat_template=None, tools=None):
        """Takes fewer of the template's arguments."""

    monkeypatch.setattr(LLM, "chat", chat)
    seams.check("process")
    with pytest.raises(
        SeamError, match=r"LLM\.chat takes no chat_template_content_format, .*continue_final_mess"
    ):
        seams.check("offline")


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_the_classes_of_both_runners_fit(runner):
    group = seams.GROUPS[runner]
    for seam in group.functions:
        function = seams._reach(importlib.import_module(seam.module), seam.name)
        assert seams._problems(function, seam, seam.name) == []
    for fields in group.fields:
        assert seams._lacking(fields) == []


def changed(self, request, prompt, params):
    """Takes `request` where there was `request_id`."""


def fewer(self, request_id):
    """Takes too little."""


def by_name(self, request_id, *, prompt, params):
    """Takes by name what it took by position."""


def more(self, request_id, prompt, params, something_new=None, *, newer=None):
    """Takes more."""


@pytest.mark.parametrize(
    ("replacement", "difference"),
    [
        (changed, r"takes (request, prompt, params), expected (request_id, prompt, params, …)"),
        (fewer, r"takes (request_id), expected (request_id, prompt, params, …)"),
        (
            by_name,
            r"takes (request_id, *, prompt, params), expected (request_id, prompt, params, …)",
        ),
        (None, r"is missing (plans are validated and resolved)"),
        (3, r"is missing (plans are validated and resolved)"),
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
    assert "differs from what this midstream expects" in str(caught.value)
    assert not patches._active
    assert [dict(vars(cls)) for cls in classes()] == before
    assert isinstance(caught.value, UnsupportedError)


def test_parameters_that_a_release_adds_do_no_harm(monkeypatch):
    from vllm.v1.engine.input_processor import InputProcessor

    monkeypatch.setattr(InputProcessor, "process_inputs", more)
    seams.check("process")


@pytest.mark.parametrize(
    ("replacement", "difference"),
    [
        (lambda self, block_ids, reason, *, by: None, "requires reason, by, which midstream does"),
        (lambda self, block_ids, reason=None, *rest, by=None, **named: None, None),
    ],
)
def test_a_parameter_that_is_required_besides_those_that_midstream_passes_is_refused(
    monkeypatch, replacement, difference
):
    from vllm.v1.core.block_pool import BlockPool

    monkeypatch.setattr(BlockPool, "evict_blocks", replacement)
    if difference is None:
        seams.check("process")
        return
    with pytest.raises(SeamError) as caught:
        seams.check("process")
    assert f"BlockPool.evict_blocks {difference} not pass (the prefix" in str(caught.value)


def test_a_function_whose_callers_midstream_does_not_know_may_require_more(monkeypatch):
    """vLLM calls it through midstream, which passes all on."""
    from vllm.v1.engine.input_processor import InputProcessor

    def process_inputs(self, request_id, prompt, params, supported_tasks):
        """Requires more."""

    monkeypatch.setattr(InputProcessor, "process_inputs", process_inputs)
    seams.check("process")


def test_every_difference_is_named_at_once(monkeypatch):
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.llm_engine import LLMEngine

    monkeypatch.setattr(InputProcessor, "process_inputs", changed)
    monkeypatch.delattr(LLMEngine, "has_unfinished_requests")
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.worker_base", None)
    with pytest.raises(SeamError) as caught:
        seams.check("process")
    assert len(str(caught.value).splitlines()) == 1 + 3
    assert "InputProcessor.process_inputs takes" in str(caught.value)
    assert "LLMEngine.has_unfinished_requests is missing" in str(caught.value)
    assert "vllm.v1.worker.worker_base: " in str(caught.value)


# ---------------------------------------------------------------- attributes


class Base:
    inherited: int

    def prepare(self):
        self.late = 1
        self.read_only = self.elsewhere


class Holder(Base):
    declared: str
    given = 3

    def __init__(self):
        self.made = []

        self.first, self.second = 1, 2

    def hand_over(self, other):
        other.given_away = self.given
        self.given.deeper = [lambda: self.given]

    def keep(self):
        self.captured = 1
        return lambda: self

    @property
    def worked_out(self):
        return None


NAMES = (
    "inherited", "late", "declared", "given", "made", "first", "second", "captured", "worked_out",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_class_has_what_it_declares_and_what_its_methods_set(name):
    assert seams._has(Holder, name)


@pytest.mark.parametrize("name", ["elsewhere", "Made", "append", "nothing", "given_away", "deeper"])
def test_what_a_class_only_reads_it_does_not_have(name):
    assert not seams._has(Holder, name)


def test_attributes_that_are_gone_are_named_with_what_they_are_for(monkeypatch):
    wanted = (
        seams.Fields("vllm.v1.request", "RequestStatus", ("FINISHED_ERROR", "LOST"), "ends"),
        seams.Fields("vllm.envs", "", ("VLLM_NEVER_THERE",), "settings"),
        seams.Fields("vllm.v1.request", "Gone", ("a",), "other"),
        seams.Fields("vllm.gone", "", ("a",), "other"),
    )
    monkeypatch.setitem(seams.GROUPS, "process", seams.SeamGroup((), wanted))
    with pytest.raises(SeamError) as caught:
        seams.check("process")
    assert str(caught.value).splitlines()[1:] == [
        "  vllm.v1.request.RequestStatus has no LOST (ends)",
        "  vllm.envs has no VLLM_NEVER_THERE (settings)",
        "  vllm.v1.request.Gone is missing (other)",
        "  vllm.gone: No module named 'vllm.gone'",
    ]


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("0.27.1", False),
        ("0.28.0", True),
        ("0.30.2+cpu", True),
        ("0.31.0", False),
        ("1.0", False),
        ("dev", False),
    ],
)
def test_attributes_of_some_releases_are_looked_for_in_those(version, known):
    fields = seams.Fields("vllm", "", ("a",), "why", since="0.28", until="0.30")
    assert fields.is_in(version) is known
    assert seams.Fields("vllm", "", ("a",), "why").is_in(version)


# ---------------------------------------------------------------- runners


class Runner:
    """What both runners have."""

    def __init__(self):
        self.model = self.compilation_config = object()

    def get_model(self):
        """The model."""

    def _dummy_run(self, num_tokens, is_profile=False, skip_attn=False):
        """A forward pass without requests."""

    def capture_model(self):
        """Capture of graphs."""

    def profile_cudagraph_memory(self):
        """Their memory."""


class V1Runner(Runner):
    def __init__(self):
        super().__init__()
        self.input_batch = SimpleNamespace(req_ids=[], num_reqs=0, num_computed_tokens_cpu=[])
        self.query_start_loc = SimpleNamespace(np=[])
        self.input_ids = SimpleNamespace(gpu=[])
        self.positions = []
        self.device = "cpu"
        self.max_num_tokens = 8
        self.model_memory_usage = 0

    def _update_states(self, scheduler_output):
        """Requests come and go."""

    def _model_forward(self, input_ids, positions, intermediate_tensors, inputs_embeds, **rest):
        """A forward."""

    def execute_model(self, scheduler_output, intermediate_tensors=None):
        """A step."""

    def sample_tokens(self, grammar_output):
        """Its end."""


class V2State:
    def preprocess_state(self, input_batch, req_states):
        """Before the forward."""


class V2Runner(Runner):
    def __init__(self):
        super().__init__()
        self.model_state = V2State()
        self.device = "cpu"
        self.max_num_tokens = 8
        self.model_memory_usage = 0

    def execute_model(self, scheduler_output, intermediate_tensors=None, dummy_run=False):
        """A step."""

    def sample_tokens(self, grammar_output):
        """Its end."""


V1_PATHS = [
    f"{fields.at}.{name}".lstrip(".")
    for fields in seams.GROUPS["v1"].fields
    if fields.at is not None
    for name in fields.names
]


def test_the_two_runners_are_told_apart_and_fit():
    assert not seams.is_v2_runner(V1Runner())
    assert seams.is_v2_runner(V2Runner())
    seams.check_runner(V1Runner(), is_v2=False)
    seams.check_runner(V2Runner(), is_v2=True)


@pytest.mark.parametrize("path", V1_PATHS)
def test_an_attribute_that_a_v1_runner_lacks_is_named(path):
    runner = V1Runner()
    *holders, name = path.split(".")
    holder = runner
    for one in holders:
        holder = getattr(holder, one)
    delattr(holder, name)
    with pytest.raises(SeamError, match=rf"V1Runner has no {path}"):
        seams.check_runner(runner, is_v2=False)


@pytest.mark.parametrize(
    "seam",
    [seam for seam in seams.GROUPS["v1"].functions if seam.at and seam.parameters],
    ids=lambda seam: seam.at,
)
def test_a_changed_method_of_a_v1_runner_is_named(seam):
    runner = V1Runner()
    setattr(runner, seam.at, lambda something: something)
    with pytest.raises(SeamError, match=rf"V1Runner\.{seam.at} takes \(something\), expected"):
        seams.check_runner(runner, is_v2=False)


def test_a_dummy_run_that_requires_more_is_named():
    runner = V2Runner()
    runner._dummy_run = lambda num_tokens, mode, is_profile=False, skip_attn=False: None
    with pytest.raises(SeamError, match=r"V2Runner\._dummy_run requires mode, which midstream"):
        seams.check_runner(runner, is_v2=True)


def test_a_changed_v2_runner_is_named(monkeypatch):
    runner = V2Runner()
    runner.model_state.preprocess_state = lambda batch: batch
    with pytest.raises(SeamError, match=r"model_state\.preprocess_state takes \(batch\)"):
        seams.check_runner(runner, is_v2=True)
    runner.model_state = None
    with pytest.raises(SeamError, match=r"model_state\.preprocess_state is missing"):
        seams.check_runner(runner, is_v2=True)
    runner = V2Runner()
    runner.execute_model = lambda scheduler_output, intermediate_tensors=None: None
    with pytest.raises(SeamError, match=r"V2Runner\.execute_model takes no dummy_run$"):
        seams.check_runner(runner, is_v2=True)
    batch = ("vllm.v1.worker.gpu.input_batch", "InputBatch")
    wanted = seams.Fields(*batch, ("req_ids", "renamed"), "rows")
    monkeypatch.setitem(seams.GROUPS, "v2", seams.SeamGroup((), (wanted,)))
    with pytest.raises(SeamError, match=r"InputBatch has no renamed \(rows\)$"):
        seams.check_runner(V2Runner(), is_v2=True)
