"""The places where midstream takes hold of vLLM: as expected, or refused before any is touched."""

import importlib
import inspect
import re
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


def test_the_arguments_of_a_chats_template_are_part_of_a_seam():
    chat = next(seam for seam in seams.SEAMS if seam.name == "LLM.chat")
    assert chat.named == TEMPLATE_ARGUMENTS


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


def by_name(self, request_id, *, prompt, params):
    """Takes by name what it took by position."""


@pytest.mark.parametrize(
    ("replacement", "difference"),
    [
        (changed, r"takes (request, prompt, params), expected (request_id, prompt, params, …)"),
        (
            by_name,
            r"takes (request_id, *, prompt, params), expected (request_id, prompt, params, …)",
        ),
        (3, r"is missing (plans are validated and resolved)"),
    ],
)
def test_a_changed_signature_is_refused_by_name_and_nothing_is_patched(
    monkeypatch, replacement, difference
):
    from vllm.v1.engine.input_processor import InputProcessor

    monkeypatch.setattr(patches, "_active", False)
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


@pytest.mark.parametrize(
    ("seam", "replacement", "difference"),
    [
        ("AsyncLLM.abort", lambda self, request_id: None, r"takes \(request_id\), expected \(requ"),
        (
            "LLM.chat",
            lambda self, messages, sampling_params, chat_template=None, tools=None: None,
            "takes no chat_template_content_format, .*continue_final_mess",
        ),
        (
            "BlockPool.evict_blocks",
            lambda self, block_ids, reason, *, by: None,
            r"requires reason, by, which midstream does not pass \(the prefix",
        ),
        ("BlockPool.evict_blocks", lambda self, block_ids, why=1, *more, by=2, **rest: None, None),
        # vLLM calls it through midstream, which passes all on.
        (
            "InputProcessor.process_inputs",
            lambda self, request_id, prompt, params, more: None,
            None,
        ),
    ],
)
def test_parameters_are_those_that_midstream_passes_and_others_may_be_left_out(
    seam, replacement, difference
):
    (found,) = {one for one in seams.SEAMS if one.name == seam}
    problems = seams._problems(replacement, found, seam)
    if difference is None:
        assert problems == []
    else:
        (problem,) = problems
        assert re.search(f"{seam} {difference}", problem)


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


def test_a_class_has_what_it_declares_and_what_its_methods_set_and_not_what_it_only_reads():
    has = ["inherited", "late", "declared", "given", "made", "first", "second", "captured"]
    lacks = ["elsewhere", "Made", "append", "nothing", "given_away", "deeper"]
    assert [name for name in [*has, *lacks] if seams._has(Holder, name)] == has


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


def test_attributes_of_some_releases_are_looked_for_in_those():
    fields = seams.Fields("vllm", "", ("a",), "why", since="0.28", until="0.30")
    versions = ["0.27.1", "0.28.0", "0.30.2+cpu", "0.31.0", "1.0", "dev"]
    assert [one for one in versions if fields.is_in(one)] == ["0.28.0", "0.30.2+cpu"]
    assert all(seams.Fields("vllm", "", ("a",), "why").is_in(one) for one in versions)


class Runner(SimpleNamespace):
    """What is attributes and methods of a model runner."""


def runner_of(group):
    """A runner with all that a group names, and nothing else."""
    runner = Runner()
    for seam in seams.GROUPS[group].functions:
        if seam.at:
            put(runner, seam.at, taking(*seam.parameters, *seam.named))
    for path in paths_of(group):
        put(runner, path, SimpleNamespace())
    return runner


def paths_of(group):
    fields = [one for one in seams.GROUPS[group].fields if one.at is not None]
    return [f"{one.at}.{name}".lstrip(".") for one in fields for name in one.names]


def put(runner, path, value):
    *holders, name = path.split(".")
    for holder in holders:
        runner.__dict__.setdefault(holder, SimpleNamespace())
        runner = getattr(runner, holder)
    runner.__dict__.setdefault(name, value)


def taking(*names):
    function = lambda *_: None  # noqa: E731
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    return function


@pytest.mark.parametrize("group", ["v1", "v2"])
def test_what_a_runner_lacks_or_takes_otherwise_is_named(group):
    is_v2 = group == "v2"
    assert seams.is_v2_runner(runner_of(group)) == is_v2
    seams.check_runner(runner_of(group), is_v2)
    paths = paths_of(group)
    assert len(paths) > 3
    for path in paths:
        runner = runner_of(group)
        holder, _, name = path.rpartition(".")
        delattr(seams._reach(runner, holder) if holder else runner, name)
        with pytest.raises(SeamError, match=rf"Runner has no {path}\b"):
            seams.check_runner(runner, is_v2)
    for seam in seams.GROUPS[group].functions:
        if not (seam.at and seam.parameters):
            continue
        holder, _, name = seam.at.rpartition(".")
        for replacement, problem in (
            (taking("something"), r"takes \(something\), expected"),
            (None, "is missing"),
        ):
            runner = runner_of(group)
            setattr(seams._reach(runner, holder) if holder else runner, name, replacement)
            with pytest.raises(SeamError, match=rf"Runner\.{seam.at} {problem}"):
                seams.check_runner(runner, is_v2)


def test_what_a_v2_runner_requires_takes_no_more_or_has_under_another_name_is_named(monkeypatch):
    for name, function, problem in (
        (
            "_dummy_run",
            lambda num_tokens, mode, is_profile=False, skip_attn=False: None,
            "requires mode, which midstream",
        ),
        (
            "execute_model",
            taking("scheduler_output", "intermediate_tensors"),
            "takes no dummy_run$",
        ),
    ):
        runner = runner_of("v2")
        setattr(runner, name, function)
        with pytest.raises(SeamError, match=rf"Runner\.{name} {problem}"):
            seams.check_runner(runner, is_v2=True)
    batch = ("vllm.v1.worker.gpu.input_batch", "InputBatch")
    wanted = seams.Fields(*batch, ("req_ids", "renamed"), "rows")
    monkeypatch.setitem(seams.GROUPS, "v2", seams.SeamGroup((), (wanted,)))
    with pytest.raises(SeamError, match=r"InputBatch has no renamed \(rows\)$"):
        seams.check_runner(Runner(), is_v2=True)
