"""Changes of a vLLM process by an installed and by an enabled midstream, printed as JSON.

    python -m unit.enabling

One import of vLLM serves all scenarios: each that may change something runs in a fork. What the
first one imports that enables midstream is imported here before the others that do.
"""

import importlib
import inspect
import json
import os
import pkgutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

MODULES = ("vllm.engine.arg_utils", "vllm.outputs", "vllm.sampling_params", "vllm.plugins")
PACKAGES = ("vllm.v1.engine", "vllm.v1.worker")
FOLDER = str(Path(__file__).parent)  # where nothing is looked for yet
ENABLED = {"midstream": {}}
OPTION = "--additional-config"
WORKER = "midstream.worker.CaptureWorker"
OTHERS = {"someone_elses": {"midstream": 1}, "layers": "all"}


def watched() -> list[ModuleType]:
    """Every module that midstream touches, and many that it does not."""
    names = [*MODULES, *PACKAGES]
    for package in PACKAGES:
        folder = importlib.import_module(package).__path__
        names += [found.name for found in pkgutil.iter_modules(folder, f"{package}.")]
    modules = []
    for name in names:
        try:
            modules.append(importlib.import_module(name))
        except ImportError:  # for another platform
            continue
    return modules


def snapshot(modules: list[ModuleType]) -> dict[str, Any]:
    """Every attribute of the modules and of all of vLLM's classes in them, by full name."""
    found = {}
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, ModuleType) or name.startswith("__"):
                continue
            found[f"{module.__name__}.{name}"] = value
            if inspect.isclass(value) and value.__module__.startswith("vllm."):
                for attribute, inner in vars(value).items():
                    found[f"{value.__module__}.{value.__qualname__}.{attribute}"] = inner
    return found


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names whose value is another object now."""
    missing = object()
    return sorted(
        name
        for name in before.keys() | after.keys()
        if before.get(name, missing) is not after.get(name, missing)
        and name != "vllm.plugins.plugins_loaded"  # vLLM's own note that plugins were loaded
        and not name.endswith((".__abstractmethods__", "._abc_impl"))
    )


def ours() -> list[str]:
    return sorted(name for name in sys.modules if name.split(".")[0] == "midstream")


def in_fork(scenario: Callable[[], None], modules: list[ModuleType]) -> Any:
    """What a scenario changes, seen in a process of its own."""
    import vllm.plugins

    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        before = snapshot(modules)
        vllm.plugins.plugins_loaded = False
        try:
            scenario()
            error = ""
        except Exception as caught:  # noqa: BLE001  (reported to the parent)
            error = f"{type(caught).__name__}: {caught}"
        found = {"changed": changed(before, snapshot(modules)), "ours": ours(), "error": error}
        with os.fdopen(writer, "w") as out:
            json.dump(found, out)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as result:
        text = result.read()
    os.waitpid(child, 0)
    return json.loads(text)


def engine_args(
    additional: object = None,
    environment: str | None = None,
    command_line: Sequence[str] = (),
    worker_class: str | None = None,
) -> Callable[[], None]:
    """Makes EngineArgs, whose `__post_init__` loads the plugins."""

    def scenario() -> None:
        from vllm.engine.arg_utils import EngineArgs

        if environment is not None:
            os.environ["MIDSTREAM"] = environment
        sys.argv += command_line
        given: dict[str, Any] = {} if additional is None else {"additional_config": additional}
        if worker_class is not None:
            given["worker_cls"] = worker_class
        EngineArgs(model=FOLDER, **given)

    return scenario


# Files of vLLM's options, which end with this process.
FILES = tempfile.TemporaryDirectory()


def command_line(*words: str) -> Callable[[], None]:
    return engine_args(command_line=words)


def options(text: str) -> Callable[[], None]:
    """As `engine_args`, with a file of vLLM's options."""
    path = Path(FILES.name) / f"{uuid.uuid4().hex}.yaml"
    path.write_text(text)
    return command_line("--config", str(path))


class Stop(Exception):
    """The plugins were loaded, and the engine needs no more of its start."""


class Halting(SimpleNamespace):
    """A VllmConfig as far as the loading of plugins; what comes next needs `parallel_config`."""

    @property
    def parallel_config(self) -> None:
        raise Stop

    def enable_trace_function_call_for_thread(self) -> None:
        """As vLLM calls it before."""


def halt() -> None:
    raise Stop


def engine_core(additional: object) -> Callable[[], None]:
    """Starts vLLM's own `EngineCore.__init__`."""

    def scenario() -> None:
        from vllm.v1.engine.core import EngineCore

        core = EngineCore.__new__(EngineCore)
        EngineCore.__init__(core, Halting(additional_config=additional), None, False)

    return scenario


def worker(additional: object) -> Callable[[], None]:
    """Starts vLLM's own `WorkerWrapperBase.init_worker`."""

    def scenario() -> None:
        from vllm.platforms import current_platform
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        # Right after the plugins; on a CPU it puts other kernels in vLLM's modules.
        current_platform.register_triton_kernel_overrides = halt
        wrapper = WorkerWrapperBase.__new__(WorkerWrapperBase)
        wrapper.rpc_rank = 0
        wrapper.init_worker([{"vllm_config": Halting(additional_config=additional)}])

    return scenario


def plain_then_enabled() -> None:
    """Two engines in one process: vLLM loads plugins for the first one only."""
    engine_args()()
    engine_args(ENABLED)()


def twice() -> None:
    """Two enabled engines in one process."""
    import vllm.plugins

    engine_args(ENABLED)()
    vllm.plugins.plugins_loaded = False
    engine_args(ENABLED)()
    from vllm.v1.engine.llm_engine import LLMEngine

    assert not hasattr(LLMEngine.step.__wrapped__, "__wrapped__"), "wrapped twice"


def main() -> None:
    modules = watched()
    import vllm.plugins
    from vllm.engine.arg_utils import EngineArgs

    known = set(sys.modules)
    environment = dict(os.environ)
    before = snapshot(modules)
    found: dict[str, Any] = {"watched": len(before), "ours_before": ours()}
    vllm.plugins.load_general_plugins()
    found["after_plugins"] = changed(before, snapshot(modules))
    found["imported"] = sorted(set(sys.modules) - known)
    EngineArgs(model=FOLDER)
    EngineArgs(model=FOLDER, additional_config=OTHERS)
    found["after_engine_args"] = changed(before, snapshot(modules))
    found["ours"] = ours()
    found["environment_kept"] = environment == dict(os.environ)
    enabled = {
        "args": engine_args(ENABLED),
        "args, with settings": engine_args({"midstream": {"layers": [1]}, **OTHERS}),
        "args, in the environment": engine_args(environment="1"),
        "args, in the environment as JSON": engine_args(environment='{"layers": [1]}'),
        "args, on the command line": command_line(OPTION, json.dumps(ENABLED)),
        "args, on the command line in one word": command_line(
            f"{OPTION.replace('-', '_')}={json.dumps(ENABLED)}"
        ),
        "args, on the command line by its parts": command_line(f"{OPTION}.midstream.layers", "[1]"),
        "args, in a file of options": options("additional-config:\n  midstream: {}\n"),
        "args, in a file of options as JSON": options("additional_config: '{\"midstream\": {}}'\n"),
        "args, a worker class in a file of options": options(f"port: 1\nworker-cls: {WORKER}\n"),
        "args, a worker class": engine_args(worker_class=WORKER),
        "args, a worker class on the command line": command_line("--worker-cls", WORKER),
        "core": engine_core(ENABLED),
        "worker": worker(ENABLED),
        "twice": twice,
    }
    idle = {
        "args, plain": engine_args(),
        "args, of others": engine_args(OTHERS),
        "args, false": engine_args({"midstream": False}),
        "args, none": engine_args({"midstream": None}),
        "args, 0 in the environment": engine_args(environment="0"),
        "args, empty in the environment": engine_args(environment=""),
        "args, of others on the command line": command_line(
            "--model", "midstream", OPTION, '{"other": 1}'
        ),
        "args, of others by its parts": command_line(f"{OPTION}.other.midstream", "1"),
        "args, of others in a file of options": options(
            "additional-config:\n  other: 1\n# as for\nmodel: midstream\n"
        ),
        "args, a missing file of options": command_line("--config", "/missing/midstream.yaml"),
        "args, another worker class": engine_args(worker_class="somebody.CaptureWorker"),
        "core, plain": engine_core({}),
        "core, of others": engine_core(OTHERS),
        "worker, plain": worker({}),
        "worker, of others": worker(OTHERS),
    }
    found["idle"] = {name: in_fork(run, modules) for name, run in idle.items()}
    first, *_ = enabled
    found["enabled"] = {first: in_fork(enabled[first], modules)}
    importlib.import_module("midstream.runtime.install")
    for name in found["enabled"][first]["ours"]:
        importlib.import_module(name)
    found["imported_only"] = changed(before, snapshot(modules))
    found["enabled"] |= {
        name: in_fork(run, modules) for name, run in enabled.items() if name != first
    }
    found["plain, then enabled"] = in_fork(plain_then_enabled, modules)
    sys.stdout.write(f"\nRESULT {json.dumps(found)}\n")


if __name__ == "__main__":
    main()
