"""Where midstream takes hold of vLLM, and the check that each place is as it was built on.

Every seam is data: where it is, and the parameters that midstream counts on. What a release adds
after them does no harm; what it removes or renames is refused by name before anything is patched.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

from midstream.errors import SeamError


@dataclass(frozen=True, slots=True)
class Seam:
    """One function of vLLM that midstream wraps or calls.

    Attributes:
        module, name: where it is (`Class.method`).
        parameters: the leading parameters, by name, after `self`.
        why: what midstream does there.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    why: str


PROCESS_SEAMS: tuple[Seam, ...] = (
    Seam(
        "vllm.engine.arg_utils",
        "EngineArgs.create_engine_config",
        (),
        "settings are completed before the engine's config is made and hashed",
    ),
    Seam(
        "vllm.v1.worker.worker_base",
        "WorkerWrapperBase.init_device",
        (),
        "the worker exists, its model is not loaded yet",
    ),
    Seam(
        "vllm.v1.engine.input_processor",
        "InputProcessor.process_inputs",
        ("request_id", "prompt", "params"),
        "the front door: plans are checked and resolved",
    ),
    Seam(
        "vllm.v1.engine.llm_engine",
        "LLMEngine.__init__",
        ("vllm_config",),
        "each engine that is enabled gets its front door",
    ),
    Seam("vllm.v1.engine.llm_engine", "LLMEngine.step", (), "results join the outputs"),
    Seam(
        "vllm.v1.engine.llm_engine",
        "LLMEngine.collective_rpc",
        ("method", "timeout", "args"),
        "results are fetched from the workers",
    ),
    Seam(
        "vllm.v1.engine.llm_engine",
        "LLMEngine.abort_request",
        ("request_ids",),
        "what was aborted is let go",
    ),
    Seam(
        "vllm.v1.engine.core",
        "EngineCore.preprocess_add_request",
        ("request",),
        "what went past the front door is refused",
    ),
    Seam(
        "vllm.v1.engine.llm_engine",
        "LLMEngine.has_unfinished_requests",
        (),
        "what nobody waits for any more is let go",
    ),
)

ASYNC_SEAMS: tuple[Seam, ...] = (
    Seam(
        "vllm.v1.engine.async_llm",
        "AsyncLLM.__init__",
        ("vllm_config", "executor_class", "log_stats"),
        "an async engine of midstream's own",
    ),
    Seam(
        "vllm.v1.engine.async_llm",
        "AsyncLLM.generate",
        ("prompt", "sampling_params", "request_id"),
        "results join the outputs",
    ),
    Seam(
        "vllm.v1.engine.async_llm",
        "AsyncLLM.abort",
        ("request_id", "internal"),
        "what could not be sent is ended",
    ),
    Seam("vllm.v1.engine.async_llm", "AsyncLLM.shutdown", ("timeout",), "what runs is stopped"),
    Seam(
        "vllm.v1.engine.core_client",
        "AsyncMPClient.collective_rpc_async",
        ("method", "timeout", "args", "kwargs"),
        "results are fetched from the workers",
    ),
    Seam(
        "vllm.v1.engine.core_client",
        "AsyncMPClient.add_request_async",
        ("request",),
        "requests wait for room",
    ),
    Seam(
        "vllm.v1.engine.core_client",
        "AsyncMPClient.abort_requests_async",
        ("request_ids",),
        "what was aborted is let go",
    ),
)

V1_SEAMS: tuple[Seam, ...] = (
    Seam("", "_update_states", ("scheduler_output",), "requests come and go"),
    Seam(
        "",
        "_model_forward",
        ("input_ids", "positions", "intermediate_tensors", "inputs_embeds"),
        "real forwards",
    ),
)
V1_ATTRIBUTES = (
    "input_batch.req_ids",
    "input_batch.num_reqs",
    "input_batch.num_computed_tokens_cpu",
    "query_start_loc.np",
)

V2_SEAMS: tuple[Seam, ...] = (
    Seam("", "execute_model", ("scheduler_output", "intermediate_tensors"), "steps"),
    Seam("", "model_state.preprocess_state", ("input_batch",), "real batches, before the forward"),
)
V2_BATCH_FIELDS = (
    "req_ids",
    "num_reqs",
    "num_scheduled_tokens",
    "num_computed_tokens_np",
    "num_tokens",
)


def check_process() -> None:
    """Checks the seams that every process uses.

    Raises:
        SeamError: names each difference.
    """
    _check(PROCESS_SEAMS)


def check_async() -> None:
    """Checks the seams of async engines.

    Raises:
        SeamError: names each difference.
    """
    _check(ASYNC_SEAMS)


def _check(seams: tuple[Seam, ...]) -> None:
    problems = []
    for seam in seams:
        try:
            found: Any = importlib.import_module(seam.module)
        except ImportError as error:
            problems.append(f"{seam.module}: {error}")
            continue
        problems += _problems(found, seam, f"{seam.module}.{seam.name}")
    _raise(problems)


def is_v2_runner(runner: Any) -> bool:
    """Whether a model runner is vLLM's V2."""
    return hasattr(runner, "model_state") and not hasattr(runner, "_model_forward")


def check_runner(runner: Any, is_v2: bool) -> None:
    """Checks the seams of a model runner whose model is loaded.

    Raises:
        SeamError: names each difference.
    """
    kind = f"{type(runner).__module__}.{type(runner).__qualname__}"
    problems = []
    for seam in V2_SEAMS if is_v2 else V1_SEAMS:
        problems += _problems(runner, seam, f"{kind}.{seam.name}")
    if is_v2:
        batch = importlib.import_module("vllm.v1.worker.gpu.input_batch").InputBatch
        known = set(getattr(batch, "__annotations__", ()))
        problems += [
            f"{kind}: InputBatch has no {field}" for field in V2_BATCH_FIELDS if field not in known
        ]
    else:
        problems += [
            f"{kind} has no {path}" for path in V1_ATTRIBUTES if _reach(runner, path) is None
        ]
    _raise(problems)


def _problems(root: Any, seam: Seam, name: str) -> list[str]:
    function = _reach(root, seam.name)
    if not callable(function):
        return [f"{name} is missing ({seam.why})"]
    found = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name != "self"
    ]
    wanted = list(seam.parameters)
    if found[: len(wanted)] != wanted:
        return [f"{name} takes ({', '.join(found)}), expected ({', '.join(wanted)}, …)"]
    return []


def _reach(root: Any, path: str) -> Any:
    for name in path.split("."):
        root = getattr(root, name, None)
    return root


def _raise(problems: list[str]) -> None:
    if problems:
        import vllm

        raise SeamError(
            f"vLLM {vllm.__version__} is not one that this midstream fits "
            f"(run on 0.26 and 0.32, read up to 0.33):\n  " + "\n  ".join(problems)
        )
