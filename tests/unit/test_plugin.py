"""Installed but not enabled, midstream does nothing at all; enabled, its hooks are in."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import zygote
from support.engines import HAS_GPU

import midstream

# It imports vLLM in a process of its own, which takes as long as an engine's start.
pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(midstream.__file__).parents[1]  # the package that is tested
PATCHED = [
    "vllm.engine.arg_utils.EngineArgs.create_engine_config",
    "vllm.plugins.load_endpoint_plugins",
    "vllm.v1.engine.async_llm.AsyncLLM.from_vllm_config",
    "vllm.v1.engine.core.DPEngineCoreProc.run_busy_loop",
    "vllm.v1.engine.core.EngineCore._initialize_kv_caches",
    "vllm.v1.engine.core.EngineCore.add_lora",
    "vllm.v1.engine.core.EngineCore.add_request",
    "vllm.v1.engine.core.EngineCore.collective_rpc",
    "vllm.v1.engine.core.EngineCore.preprocess_add_request",
    "vllm.v1.engine.core.EngineCore.remove_lora",
    "vllm.v1.engine.core.EngineCore.reset_prefix_cache",
    "vllm.v1.engine.core.EngineCore.wake_up",
    "vllm.v1.engine.core.EngineCoreProc.run_busy_loop",
    "vllm.v1.engine.input_processor.InputProcessor.process_inputs",
    "vllm.v1.engine.llm_engine.LLMEngine.__init__",
    "vllm.v1.engine.llm_engine.LLMEngine.abort_request",
    "vllm.v1.engine.llm_engine.LLMEngine.step",
    "vllm.v1.engine.output_processor.OutputProcessor.do_tracing",
    "vllm.v1.engine.output_processor.instrument_manual",
    "vllm.v1.worker.worker_base.WorkerWrapperBase.init_device",
]


def run(*arguments, has_vllm=False):
    kept = {k: v for k, v in os.environ.items() if k not in ("MIDSTREAM", "VLLM_PLUGINS")}
    given = {
        "env": {
            **kept,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(SOURCE)]),
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    if has_vllm and not HAS_GPU:
        process = zygote.start(arguments, has_midstream=False, **given)
    else:
        process = subprocess.Popen([sys.executable, *arguments], **given)
    out, error = process.communicate(timeout=300)
    for line in out.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise AssertionError(f"exit {process.returncode}\n{out[-3000:]}\n{error[-3000:]}")


@pytest.fixture(scope="module")
def found():
    """What `unit.enabling` saw, in a process with vLLM."""
    return run("-m", "unit.enabling", has_vllm=True)


def test_loading_the_plugins_changes_nothing_in_vllm(found):
    assert found["watched"] > 1000, "too little was watched for this to mean anything"
    assert found["ours_before"] == found["after_plugins"] == found["after_engine_args"] == []
    assert found["environment_kept"]
    assert "midstream.plugin" in found["ours"], "the plugin was not called"


def test_loading_the_plugins_imports_only_light_modules(found):
    heavy = [
        name
        for name in found["ours"]
        if name.startswith("midstream.runtime.") and name != "midstream.plugin"
    ]
    assert heavy == []
    # `ops.layout` is a table of numbers, in which edits are written down.
    for name in ("ops.site", "transport", "llm", "activations", "demo", "models"):
        assert f"midstream.{name}" not in found["ours"]
    # vLLM ships general plugins of its own.
    own = ("midstream", "vllm.plugins.lora_resolvers", "vllm.lora.resolver")
    outside = {name.split(".")[0] for name in found["imported"] if not name.startswith(own)}
    assert outside <= set(sys.stdlib_module_names), "vLLM alone would not have imported these"


def test_enabled_the_hooks_are_in_and_no_others(found):
    for scenario, seen in found["enabled"].items():
        assert seen["changed"] == PATCHED, scenario
        assert seen["error"].split(":")[0] in ("", "Stop"), scenario


def test_only_enabling_patches_and_no_import_does(found):
    assert found["imported_only"] == []


def test_not_enabled_nothing_is_patched_wherever_the_plugins_are_loaded(found):
    for scenario, seen in found["idle"].items():
        assert seen["changed"] == [], scenario
        assert "midstream.runtime.install" not in seen["ours"], scenario
        assert seen["error"].split(":")[0] in ("", "Stop"), scenario


@pytest.mark.xfail(
    strict=True,
    reason="vLLM loads plugins once in a process (plugins_loaded): register() is not called again "
    "for a second engine, so a plain engine before an enabled vllm.LLM keeps the hooks out of this "
    "process; without midstream.activate(), an engine that runs in it does nothing, silently",
)
def test_an_engine_enabled_after_a_plain_one_in_the_same_process_has_the_hooks(found):
    assert found["plain, then enabled"]["changed"] == PATCHED


IMPORTS = """
import sys
before = set(sys.modules)
{statement}
import json
print("RESULT", json.dumps(sorted(set(sys.modules) - before)))
"""


def test_importing_midstream_brings_in_neither_torch_nor_vllm_nor_numpy():
    for statement in ("import midstream", "from midstream.plugin import register; register()"):
        imported = run("-c", IMPORTS.format(statement=statement))
        assert any(name.startswith("midstream.plan") for name in imported), statement
        others = {name.split(".")[0] for name in imported} - {"midstream"}
        assert others <= set(sys.stdlib_module_names), "the base install has no more than numpy"
        assert not others & {"asyncio", "multiprocessing", "urllib", "http", "email"}, (
            "not for free"
        )


def test_register_looks_at_the_environment_only_when_called():
    program = (
        "import os, sys, json\n"
        "import midstream.plugin\n"
        "sys.modules['midstream.runtime.install'] = fake = type(sys)('fake')\n"
        "fake.activate = lambda: calls.append(1)\n"
        "seen = []\n"
        "for value in json.loads(sys.argv[1]):\n"
        "    os.environ['MIDSTREAM'] = value\n"
        "    calls = []\n"
        "    midstream.plugin.register()\n"
        "    seen.append(len(calls))\n"
        "print('RESULT', json.dumps(seen))\n"
    )
    expected = {"1": 1, "{}": 1, "0": 0, "": 0, " ": 0, "nonsense": 1}
    assert run("-c", program, json.dumps(list(expected))) == list(expected.values())
