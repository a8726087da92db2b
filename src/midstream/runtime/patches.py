"""Puts midstream into this process's vLLM. Nothing is touched until an engine is enabled.

Once in, every hook is idle for engines whose `additional_config` does not name midstream.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable
from typing import Any

from midstream import config as settings
from midstream.act_environment import WORKER_CLASS, from_act_environment
from midstream.config import KEY
from midstream.errors import ConfigError, SpecError, UnsupportedError
from midstream.runtime import core, seams, served, spans
from midstream.runtime.carried import carried
from midstream.runtime.chat import ChatPlan
from midstream.runtime.order import Order
from midstream.runtime.orphans import end_with_parent
from midstream.runtime.own_sinks import Settings, check_sinks
from midstream.runtime.settings import check_offline, check_settings
from midstream.spec import Plan

# Where vLLM's function for the extra keys of a block is looked up.
_KEY_MODULES = ("vllm.v1.core.kv_cache_utils", "vllm.v1.core.block_pool")
_LOCK = threading.Lock()
_ATTRIBUTE = "midstream_front_end"
_active = False


def activate() -> None:
    """Installs the hooks in this process, once.

    Raises:
        SeamError: this vLLM is not one that midstream fits; nothing is installed then.
    """
    global _active
    with _LOCK:
        if _active:
            return
        seams.check_process()
        _wrap("vllm.engine.arg_utils", "EngineArgs", "create_engine_config", _complete_config)
        _wrap("vllm.v1.worker.worker_base", "WorkerWrapperBase", "init_device", _init_device)
        _wrap("vllm.v1.engine.input_processor", "InputProcessor", "process_inputs", _process)
        _wrap("vllm.v1.engine.llm_engine", "LLMEngine", "__init__", _engine_init)
        _wrap("vllm.v1.engine.llm_engine", "LLMEngine", "step", _engine_step)
        _wrap("vllm.v1.engine.llm_engine", "LLMEngine", "abort_request", _engine_abort)
        _wrap("vllm.v1.engine.core", "EngineCore", "_initialize_kv_caches", _core_init)
        _wrap("vllm.v1.engine.core", "EngineCore", "preprocess_add_request", _core_add)
        _wrap(
            "vllm.v1.core.kv_cache_manager",
            "KVCacheManager",
            "get_computed_blocks",
            core.computed_blocks,
        )
        _wrap(
            "vllm.v1.core.sched.scheduler",
            "Scheduler",
            "update_from_output",
            core.update_from_output,
        )
        served.install()
        _wrap("vllm.v1.engine.output_processor", "OutputProcessor", "do_tracing", spans.do_tracing)
        _wrap_function(
            "vllm.v1.engine.output_processor", "instrument_manual", spans.instrument_manual
        )
        for module in _KEY_MODULES:
            _wrap_function(module, "generate_block_hash_extra_keys", core.extra_keys)
        _active = True


def is_active() -> bool:
    """Whether the hooks are installed in this process."""
    return _active


def front_end(engine: Any) -> Any:
    """The front end of an engine or of its input processor; None where there is none."""
    return getattr(engine, _ATTRIBUTE, None)


def open_door(engine: Any, front: Any) -> None:
    """Makes this front end that of an engine: it is asked about every request from now on."""
    setattr(engine, _ATTRIBUTE, front)
    setattr(engine.input_processor, _ATTRIBUTE, front)


def plan_of(params: Any) -> Plan | ChatPlan | Order | None:
    """The plan in a request's `extra_args["midstream"]`; None when it asks for nothing.

    Raises:
        SpecError: it is malformed.
    """
    extra_args = getattr(params, "extra_args", None)
    value = extra_args.get(KEY) if extra_args else None
    if value is None or isinstance(value, (ChatPlan, Order)):
        return value
    try:
        return Plan.parse(value)
    except SpecError as error:
        raise error.under(f"extra_args[{KEY!r}]") from None


def _wrap(module: str, cls: str, name: str, hook: Callable[..., Any]) -> None:
    owner = getattr(importlib.import_module(module), cls)
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(original, self, *args, **kwargs)

    setattr(owner, name, wrapped)


def _wrap_function(module: str, name: str, hook: Callable[..., Any]) -> None:
    owner = importlib.import_module(module)
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    setattr(owner, name, wrapped)


def _complete_config(original: Callable[..., Any], args: Any, *rest: Any, **kwargs: Any) -> Any:
    """Fills in defaults and the version, so that all of it is in the hash of compiled graphs, and
    refuses engine settings that cannot be served.
    """
    found = settings_of(args)
    is_marked = args.worker_cls == WORKER_CLASS
    kept = args.additional_config, args.worker_cls
    try:
        if is_marked:
            args.worker_cls = "auto"  # the platform's own
        if found is not None:
            plain = Settings(found.to_dict())
            check_sinks(plain.sinks)
            args.additional_config = {**(args.additional_config or {}), KEY: plain}
        config = original(args, *rest, **kwargs)
    finally:
        # Another config made of the same arguments is to be the same.
        args.additional_config, args.worker_cls = kept
    if found is not None:
        # Workers check as well; here the error reaches whoever starts the engine as it is.
        check_settings(config)
        plain.replicas = config.parallel_config.data_parallel_size_local
    return config


def settings_of(args: Any) -> settings.Config | None:
    """midstream's settings for an engine of these arguments; None: it is not enabled."""
    given = args.additional_config
    found = settings.from_additional_config(given)
    is_named = isinstance(given, dict) and KEY in given
    if found is None and not is_named:
        found = settings.from_environment()
    if args.worker_cls != WORKER_CLASS:
        return found
    acts = from_act_environment()
    if acts is not None and (found is not None or is_named):
        raise ConfigError(
            f"{KEY}: there are settings besides the variables VLLM_ACT_*, for which worker_cls "
            f'names {WORKER_CLASS}; leave them out, or it, or set VLLM_ACT_CAPTURE="0"'
        )
    return found or acts


def _init_device(original: Callable[..., Any], wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    found = settings.from_additional_config(wrapper.vllm_config.additional_config)
    if found is not None and not settings.is_complete(wrapper.vllm_config.additional_config):
        raise UnsupportedError(
            "the process that made this engine's settings did not load midstream, so that no "
            "request could reach it; set MIDSTREAM=1 there, or import midstream before the first "
            "engine and call midstream.activate()"
        )
    out = original(wrapper, *args, **kwargs)
    if found is not None:
        from midstream.runtime.worker import attach

        attach(wrapper.worker, wrapper.vllm_config, found)
    return out


def _engine_init(
    original: Callable[..., Any], engine: Any, vllm_config: Any, *args: Any, **kwargs: Any
) -> None:
    is_enabled = settings.is_enabled(vllm_config.additional_config)
    if is_enabled:
        check_offline(vllm_config.parallel_config.data_parallel_size)
    original(engine, vllm_config, *args, **kwargs)
    if is_enabled:
        from midstream.runtime.frontend import FrontEnd
        from midstream.runtime.mortality import end_waits_with

        end_waits_with(engine)
        front = FrontEnd(engine)
        client = engine.engine_core
        deliver = client.add_request
        client.add_request = lambda request: front.send(request, deliver)
        open_door(engine, front)


def _engine_step(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    outputs = original(engine, *args, **kwargs)
    front = front_end(engine)
    return outputs if front is None else front.after_step(outputs)


def _engine_abort(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    out = original(engine, *args, **kwargs)
    front = front_end(engine)
    if front is not None:
        front.after_abort(engine.output_processor.external_req_ids)
    return out


def _core_init(original: Callable[..., Any], engine: Any, vllm_config: Any) -> Any:
    """The engine is being made: whether or not there is ever a request, it ends with its parent.

    Its constructor, which loads midstream in a process of its own, cannot be wrapped from within.
    """
    if settings.is_enabled(vllm_config.additional_config):
        end_with_parent()
    return original(engine, vllm_config)


def _core_add(original: Callable[..., Any], engine: Any, request: Any, *rest: Any) -> Any:
    """Refuses, as that request's own failure, what went past the front door."""
    if settings.is_enabled(engine.vllm_config.additional_config):
        carried(request.sampling_params)
    return original(engine, request, *rest)


def _process(
    original: Callable[..., Any],
    processor: Any,
    request_id: str,
    prompt: Any,
    params: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    plan = plan_of(params)
    front = front_end(processor)
    if plan is None and (front is None or not front.concerns(params)):
        if front is not None:
            front.check_id(request_id)
        return original(processor, request_id, prompt, params, *args, **kwargs)
    if front is None:
        enabled = settings.is_enabled(processor.vllm_config.additional_config)
        raise SpecError(
            f"extra_args[{KEY!r}]",
            "this engine does not have midstream enabled: make it with midstream.LLM, or with "
            f'additional_config={{"{KEY}": {{}}}}'
            if not enabled
            else "this front end cannot return results: use midstream.LLM, vllm.LLM or "
            "midstream.AsyncLLM",
        )
    request = original(processor, request_id, prompt, params, *args, **kwargs)
    front.admit(request, plan)
    return request
