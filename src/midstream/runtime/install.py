"""Installation of midstream's hooks in vLLM, by the first engine that enables midstream."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import threading
from collections.abc import Callable
from typing import Any

from midstream.call_frames import with_room_for_calls
from midstream.compat.act_environment import is_capture_worker
from midstream.config.config import KEY, from_additional_config, is_complete, is_enabled
from midstream.config.controllers import load, read_controllers
from midstream.config.server_folder import make_folder
from midstream.errors import SpecError, UnsupportedError
from midstream.runtime import INSTALLERS
from midstream.runtime.core import (
    controllers,
    ended_requests,
    failed_requests,
    plan_versions,
    prefix_cache,
    probe_stops,
    scored_blocks,
    vector_updates,
    weight_epochs,
)
from midstream.runtime.core.parent_watch import end_with_parent
from midstream.runtime.frontend import tracing
from midstream.runtime.frontend.request.call_plan import has_plan, plan_of
from midstream.runtime.protocol.request_payload import payload_of
from midstream.runtime.protocol.rpc import RPC
from midstream.runtime.vllm import seams
from midstream.runtime.vllm.additional_config import (
    Settings,
    api_process,
    check_sinks,
    check_steering,
    settings_of,
    steers,
)
from midstream.runtime.vllm.attributes import FRONT_END
from midstream.runtime.vllm.engine_rules import check_layers, check_offline, check_settings

# Modules that look up vLLM's function for the extra keys of a block.
_KEY_MODULES = ("vllm.v1.core.kv_cache_utils", "vllm.v1.core.block_pool")
_LOGGER = logging.getLogger(__name__)
_LOCK = threading.Lock()
_active = False


def activate() -> None:
    """Install the hooks in this process, once.

    Raises:
        SeamError: this vLLM differs from what midstream expects. No hook is installed.
    """
    global _active
    with _LOCK:
        if _active:
            return
        seams.check("process")
        # The loops that run all steps of an engine, of a worker, and of an offline call.
        loop = with_room_for_calls(_unchanged)
        _wrap("vllm.v1.engine.core", "EngineCoreProc", "run_busy_loop", loop)
        _wrap("vllm.v1.engine.core", "DPEngineCoreProc", "run_busy_loop", loop)
        _wrap("vllm.v1.executor.multiproc_executor", "WorkerProc", "worker_busy_loop", loop)
        _wrap("vllm.entrypoints.llm", "LLM", "_run_engine", loop)
        _wrap("vllm.engine.arg_utils", "EngineArgs", "create_engine_config", _complete_config)
        _wrap("vllm.v1.worker.worker_base", "WorkerWrapperBase", "init_device", _init_device)
        _wrap("vllm.v1.engine.input_processor", "InputProcessor", "process_inputs", _process)
        _wrap("vllm.v1.engine.llm_engine", "LLMEngine", "__init__", _engine_init)
        step = with_room_for_calls(_engine_step)  # for callers without such a loop
        _wrap("vllm.v1.engine.llm_engine", "LLMEngine", "step", step)
        _wrap("vllm.v1.engine.llm_engine", "LLMEngine", "abort_request", _engine_abort)
        _wrap("vllm.v1.engine.core", "EngineCore", "_initialize_kv_caches", _core_init)
        _wrap("vllm.v1.engine.core", "EngineCore", "preprocess_add_request", _core_receive)
        _wrap("vllm.v1.engine.core", "EngineCore", "add_request", _core_add)
        _wrap("vllm.v1.engine.core", "EngineCore", "reset_prefix_cache", prefix_cache.reset)
        _wrap("vllm.v1.engine.core", "EngineCore", "collective_rpc", _core_rpc)
        _wrap("vllm.v1.engine.core", "EngineCore", "add_lora", weight_epochs.add_lora)
        _wrap("vllm.v1.engine.core", "EngineCore", "wake_up", weight_epochs.after)
        _wrap("vllm.v1.engine.core", "EngineCore", "remove_lora", weight_epochs.remove_lora)
        _wrap(
            "vllm.v1.core.kv_cache_manager",
            "KVCacheManager",
            "get_computed_blocks",
            prefix_cache.computed_blocks,
        )
        # The last one runs first: what is left of requests that failed is not evaluated.
        for part in (scored_blocks, ended_requests, probe_stops, failed_requests):
            hook = part.update_from_output
            _wrap("vllm.v1.core.sched.scheduler", "Scheduler", "update_from_output", hook)
        for install in INSTALLERS:
            install()
        _wrap(
            "vllm.v1.engine.output_processor", "OutputProcessor", "do_tracing", tracing.do_tracing
        )
        traced = functools.partial(functools.partial, tracing.instrument_manual)
        _wrap_function("vllm.v1.engine.output_processor", "instrument_manual", traced)
        for module in _KEY_MODULES:
            _wrap_function(module, "generate_block_hash_extra_keys", prefix_cache.with_extra_keys)
        _active = True


def front_end(engine: Any) -> Any:
    """Return the front end of an engine or of its input processor; None if it has none."""
    return FRONT_END.get(engine)


def set_front_end(engine: Any, front: Any) -> None:
    """Attach a front end to an engine: from now on it validates every request."""
    FRONT_END.set(engine, front)
    FRONT_END.set(engine.input_processor, front)


def _wrap(module: str, cls: str, name: str, hook: Callable[..., Any]) -> None:
    owner = getattr(importlib.import_module(module), cls)
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(original, self, *args, **kwargs)

    # vLLM looks for it in each call of a front end, which takes long behind a wrapper.
    wrapped.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def _wrap_function(module: str, name: str, wrap: Callable[..., Any]) -> None:
    owner = importlib.import_module(module)
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(wrap(original)))


def _unchanged(original: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> Any:
    return original(owner, *args, **kwargs)


def _complete_config(original: Callable[..., Any], args: Any, *rest: Any, **kwargs: Any) -> Any:
    """Complete midstream's settings, hashed with compiled graphs, and check the engine's."""
    settings = settings_of(args)
    is_marked = is_capture_worker(args.worker_cls)
    kept = args.additional_config, args.worker_cls, args.enforce_eager
    try:
        if is_marked:
            args.worker_cls = "auto"  # the platform's worker class
        if settings is not None:
            plain = Settings(settings.to_dict())
            check_sinks(plain.sinks)
            check_steering(plain)
            for name, declared in read_controllers(plain.controllers).items():
                load(name, declared)
            args.additional_config = {**(args.additional_config or {}), KEY: plain}
            if settings.hooks == "local" and not args.enforce_eager:
                _LOGGER.warning('midstream: the engine runs eagerly, as hooks is "local"')
                args.enforce_eager = True
        config = original(args, *rest, **kwargs)
    finally:
        # The caller's arguments are unchanged, so a second config of them is equal.
        args.additional_config, args.worker_cls, args.enforce_eager = kept
    if settings is not None:
        # Workers check too, but only an error raised here reaches the caller unwrapped.
        check_settings(config)
        check_layers(config, settings)
        plain.replicas = config.parallel_config.data_parallel_size_local
        count, number = api_process(config.parallel_config)
        if number < 0:
            make_folder()  # of the API servers that this process starts
        elif count > 1:
            end_with_parent()
    return config


def _init_device(original: Callable[..., Any], wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    config = from_additional_config(wrapper.vllm_config.additional_config)
    if config is not None and not is_complete(wrapper.vllm_config.additional_config):
        raise UnsupportedError(
            "the process that created this engine's settings did not load midstream, so it cannot "
            "process requests; set MIDSTREAM=1 there, or import midstream before the first engine "
            "and call midstream.activate()"
        )
    out = original(wrapper, *args, **kwargs)
    if config is not None:
        from midstream.runtime.worker.assembly import attach

        attach(wrapper.worker, wrapper.vllm_config, config)
    return out


def _engine_init(
    original: Callable[..., Any], engine: Any, vllm_config: Any, *args: Any, **kwargs: Any
) -> None:
    enabled = is_enabled(vllm_config.additional_config)
    if enabled:
        check_offline(vllm_config.parallel_config.data_parallel_size)
    original(engine, vllm_config, *args, **kwargs)
    if enabled:
        from midstream.runtime.frontend.engine_death import end_waits_with
        from midstream.runtime.frontend.sync_frontend import FrontEnd

        end_waits_with(engine)
        front = FrontEnd(engine)
        client = engine.engine_core
        deliver = client.add_request
        client.add_request = lambda request: front.send(request, deliver)
        set_front_end(engine, front)


def _engine_step(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    front = front_end(engine)
    if front is None:
        return original(engine, *args, **kwargs)
    with front.use.call():
        return front.after_step(original(engine, *args, **kwargs))


def _engine_abort(
    original: Callable[..., Any], engine: Any, request_ids: Any, *args: Any, **kwargs: Any
) -> Any:
    asked = list(request_ids)
    front = front_end(engine)
    if front is None:
        return original(engine, asked, *args, **kwargs)
    with front.use.call():
        out = original(engine, asked, *args, **kwargs)
        front.after_abort(asked, engine.output_processor.external_req_ids)
    return out


def _core_init(original: Callable[..., Any], engine: Any, vllm_config: Any) -> Any:
    """Prepare the engine core, and end its process with its parent. The core's constructor loads
    midstream, so it cannot be wrapped itself.
    """
    if is_enabled(vllm_config.additional_config):
        vector_updates.prepare(engine)
        controllers.prepare(engine)
        weight_epochs.hear_names(engine)
        end_with_parent()
    return original(engine, vllm_config)


def _core_receive(original: Callable[..., Any], engine: Any, request: Any, *rest: Any) -> Any:
    """Reject requests that bypassed validation; take the workers' vectors out of others."""
    if not vector_updates.is_prepared(engine):
        return original(engine, request, *rest)
    weight_epochs.prepare(engine)
    payload = payload_of(request.sampling_params)
    if payload is not None:
        vector_updates.take_update(engine, request.sampling_params, payload)
    received = original(engine, request, *rest)
    weight_epochs.renew_key(engine.scheduler.kv_cache_manager, received[0])
    return received


def _core_add(original: Callable[..., Any], engine: Any, request: Any, *rest: Any) -> Any:
    """Send the workers what they need before the request is scheduled."""
    if vector_updates.is_prepared(engine):
        vector_updates.send_updates(engine)
        plan_versions.prepare(engine)
        weight_epochs.see_request(engine, request)
    return original(engine, request, *rest)


def _core_rpc(
    original: Callable[..., Any],
    engine: Any,
    method: object,
    timeout: float | None = None,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Answer what is for the engine core itself; the workers answer the rest, and may have other
    weights after a call that is not midstream's.
    """
    answers = plan_versions.answer_rpc(engine, method, args)
    if answers is not None:
        return answers
    if method == RPC:
        return original(engine, method, timeout, args, kwargs)
    return weight_epochs.after(original, engine, method, timeout, args, kwargs)


def _process(
    original: Callable[..., Any],
    processor: Any,
    request_id: str,
    prompt: Any,
    params: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    front = front_end(processor)
    if front is None:
        if has_plan(params):
            raise _no_front_end(processor)
        if steers(processor.vllm_config.additional_config):
            raise SpecError(
                f"{KEY}.steering",
                "this front end cannot apply the steering of its settings: use midstream.LLM, "
                "vllm.LLM, midstream.AsyncLLM or a server",
            )
        if is_enabled(processor.vllm_config.additional_config):
            plan_of(params)  # another key may ask for something
        return original(processor, request_id, prompt, params, *args, **kwargs)
    if front.use is not None:
        front.use.claim()  # before vLLM knows the request
    plan = plan_of(params)
    if plan is None and not front.concerns(params):
        front.check_id(request_id)
        return original(processor, request_id, prompt, params, *args, **kwargs)
    request = original(processor, request_id, prompt, params, *args, **kwargs)
    front.admit(request, plan)
    return request


def _no_front_end(processor: Any) -> SpecError:
    enabled = is_enabled(processor.vllm_config.additional_config)
    return SpecError(
        f"extra_args[{KEY!r}]",
        "this engine does not have midstream enabled: create it with midstream.LLM, or with "
        f'additional_config={{"{KEY}": {{}}}}'
        if not enabled
        else "this front end cannot return results: use midstream.LLM, vllm.LLM or "
        "midstream.AsyncLLM",
    )
