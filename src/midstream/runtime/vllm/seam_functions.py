"""Functions of vLLM outside the model runners that midstream wraps or calls; see `seams`."""

from __future__ import annotations

from midstream.runtime.vllm.seam_types import Seam

# Arguments of `LLM.chat` that the chat template gets.
TEMPLATE_ARGUMENTS = (
    "chat_template",
    "chat_template_content_format",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
)

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
        "the worker exists, and its model is not loaded yet",
    ),
    Seam(
        "vllm.v1.engine.input_processor",
        "InputProcessor.process_inputs",
        ("request_id", "prompt", "params"),
        "plans are validated and resolved",
    ),
    Seam(
        "vllm.v1.engine.llm_engine",
        "LLMEngine.__init__",
        ("vllm_config",),
        "a front end is attached to each enabled engine",
    ),
    Seam("vllm.v1.engine.llm_engine", "LLMEngine.step", (), "results are set on outputs"),
    Seam(
        "vllm.v1.engine.llm_engine",
        "LLMEngine.collective_rpc",
        ("method", "timeout", "args"),
        "results are fetched from the workers",
    ),
    Seam(
        "vllm.v1.engine.core_client",
        "SyncMPClient._send_input",
        ("request_type", "request"),
        "results are fetched while the engine runs",
    ),
    Seam(
        "vllm.v1.engine.core_client",
        "SyncMPClient.call_utility",
        ("method",),
        "results are fetched while the engine runs, by calls made like this one's",
    ),
    Seam(
        "vllm.v1.engine.llm_engine",
        "LLMEngine.abort_request",
        ("request_ids",),
        "aborted requests are released",
    ),
    Seam(
        "vllm.v1.engine.core",
        "EngineCore._initialize_kv_caches",
        ("vllm_config",),
        "an engine ends with the process that started it",
    ),
    Seam(
        "vllm.v1.engine.core",
        "EngineCore.preprocess_add_request",
        ("request",),
        "requests that bypassed request validation are rejected",
    ),
    Seam(
        "vllm.v1.engine.core",
        "EngineCore.add_request",
        ("request",),
        "vectors are sent to the workers ahead of the request",
    ),
    Seam(
        "vllm.v1.engine.core",
        "EngineCore.reset_prefix_cache",
        (),
        "rows that were kept before a reset are not reused",
    ),
    Seam(
        "vllm.v1.engine.core",
        "EngineCore.collective_rpc",
        ("method", "timeout", "args", "kwargs"),
        "results are fetched from the workers, and plans of running requests are changed",
    ),
    Seam(
        "vllm.v1.engine.core",
        "EngineCoreProc.run_busy_loop",
        (),
        "room for the frames of all steps is made once",
    ),
    Seam(
        "vllm.v1.engine.core",
        "DPEngineCoreProc.run_busy_loop",
        (),
        "room for the frames of all steps is made once",
    ),
    Seam(
        "vllm.v1.executor.multiproc_executor",
        "WorkerProc.worker_busy_loop",
        (),
        "room for the frames of all steps is made once",
    ),
    Seam(
        "vllm.entrypoints.llm",
        "LLM._run_engine",
        (),
        "room for the frames of all steps is made once",
    ),
    Seam(
        "vllm.v1.request",
        "Request.update_block_hashes",
        (),
        "blocks of a request get other keys from the position at which its plan was changed",
    ),
    Seam(
        "vllm.v1.executor.multiproc_executor",
        "MultiprocExecutor.collective_rpc",
        ("method", "timeout", "args", "kwargs", "non_block"),
        "vectors are sent to the workers without a wait",
    ),
    Seam(
        "vllm.v1.executor.uniproc_executor",
        "UniProcExecutor.collective_rpc",
        ("method", "timeout", "args", "kwargs", "non_block"),
        "vectors are sent to the workers without a wait",
    ),
    Seam(
        "vllm.v1.core.kv_cache_utils",
        "generate_block_hash_extra_keys",
        ("request", "start_token_idx", "end_token_idx", "start_mm_idx"),
        "blocks with edited tokens get extra keys",
    ),
    Seam(
        "vllm.v1.core.block_pool",
        "generate_block_hash_extra_keys",
        ("request", "start_token_idx", "end_token_idx", "start_mm_idx"),
        "blocks with edited tokens get extra keys, in events too",
    ),
    Seam(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager.get_computed_blocks",
        ("request",),
        "a hit stays below the first position whose row is requested",
    ),
    Seam(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager.get_blocks",
        ("request_id",),
        "requests that share KV with a failed request are found",
    ),
    Seam(
        "vllm.v1.core.block_pool",
        "BlockPool.evict_blocks",
        ("block_ids",),
        "the prefix cache is cleared after a failure",
    ),
    Seam(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.update_from_output",
        ("scheduler_output", "model_runner_output"),
        "requests that failed on a worker are ended",
    ),
    Seam(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.finish_requests",
        ("request_ids", "finished_status"),
        "requests that failed on a worker are ended",
    ),
    Seam(
        "vllm.v1.core.kv_cache_coordinator",
        "KVCacheCoordinator.find_longest_cache_hit",
        ("block_hashes", "max_cache_hit_length"),
        "a hit stays below the first position whose row is requested",
    ),
    Seam(
        "vllm.v1.engine.llm_engine",
        "LLMEngine.has_unfinished_requests",
        (),
        "requests that ended without an output are released",
    ),
    Seam(
        "vllm.v1.engine.llm_engine",
        "LLMEngine.get_tokenizer",
        (),
        "positions are found by the prompt's text",
    ),
    Seam(
        "vllm.v1.engine.core_client",
        "InprocClient.add_request",
        ("request",),
        "requests wait for capacity",
    ),
    Seam(
        "vllm.v1.engine.core_client",
        "SyncMPClient.add_request",
        ("request",),
        "requests wait for capacity",
    ),
    Seam(
        "vllm.v1.engine.output_processor",
        "OutputProcessor.do_tracing",
        ("engine_core_output", "req_state", "iteration_stats"),
        "spans wait for receipts",
    ),
    Seam(
        "vllm.v1.engine.output_processor",
        "instrument_manual",
        ("span_name", "start_time", "end_time", "attributes"),
        "spans get the figures of receipts",
    ),
    Seam("vllm.v1.worker.worker_base", "WorkerBase.load_model", (), "the loaded model is tapped"),
    Seam(
        "vllm.v1.outputs",
        "AsyncModelRunnerOutput.get_output",
        (),
        "failures are attached to the output that this returns",
    ),
    Seam("vllm.plugins", "load_general_plugins", (), "midstream is loaded in each process"),
    Seam(
        "vllm.plugins",
        "load_endpoint_plugins",
        ("supported_tasks",),
        "the server gets midstream's endpoints",
    ),
    Seam(
        "vllm.v1.engine.async_llm",
        "AsyncLLM.from_vllm_config",
        ("vllm_config",),
        "the server's engine is a midstream.AsyncLLM",
    ),
    Seam("vllm.engine.arg_utils", "EngineArgs.__post_init__", (), "midstream is loaded from here"),
    Seam(
        "vllm.v1.engine.core",
        "EngineCore.__init__",
        ("vllm_config",),
        "midstream is loaded from here",
    ),
    Seam(
        "vllm.v1.worker.worker_base",
        "WorkerWrapperBase.init_worker",
        ("all_kwargs",),
        "midstream is loaded from here",
    ),
)

OFFLINE_SEAMS: tuple[Seam, ...] = (
    Seam("vllm.entrypoints.llm", "LLM.__init__", ("model",), "the base class of midstream.LLM"),
    Seam(
        "vllm.entrypoints.llm",
        "LLM.generate",
        ("prompts", "sampling_params"),
        "each prompt gets its plan",
    ),
    Seam(
        "vllm.entrypoints.llm",
        "LLM.chat",
        ("messages", "sampling_params"),
        "each conversation gets its plan",
        named=TEMPLATE_ARGUMENTS,
    ),
    Seam("vllm.entrypoints.llm", "LLM.enqueue", (), "rejected with default captures"),
    Seam("vllm.entrypoints.llm", "LLM.enqueue_chat", (), "rejected with default captures"),
    Seam("vllm.entrypoints.llm", "LLM.beam_search", (), "rejected with edits of some positions"),
    Seam(
        "vllm.entrypoints.llm",
        "LLM.get_default_sampling_params",
        (),
        "plans are attached to sampling parameters",
    ),
    Seam("vllm.renderers.inputs.preprocess", "prompt_to_seq", (), "prompts are counted"),
    Seam(
        "vllm.renderers.inputs.preprocess", "conversation_to_seq", (), "conversations are counted"
    ),
    Seam(
        "vllm.renderers.base",
        "BaseRenderer.render_messages",
        ("messages", "params"),
        "the messages of a chat are found in its prompt",
    ),
)

ASYNC_SEAMS: tuple[Seam, ...] = (
    Seam(
        "vllm.v1.engine.async_llm",
        "AsyncLLM.__init__",
        ("vllm_config", "executor_class", "log_stats"),
        "the base class of midstream.AsyncLLM",
        named=("usage_context", "log_requests", "start_engine_loop", "stat_loggers"),
    ),
    Seam(
        "vllm.v1.engine.async_llm",
        "AsyncLLM.from_engine_args",
        ("engine_args", "start_engine_loop", "usage_context", "stat_loggers"),
        "the base class of midstream.AsyncLLM",
    ),
    Seam(
        "vllm.v1.engine.async_llm",
        "AsyncLLM.get_tokenizer",
        (),
        "positions are found by the prompt's text",
    ),
    Seam(
        "vllm.v1.executor.abstract",
        "Executor.get_class",
        ("vllm_config",),
        "the base class of midstream.AsyncLLM",
    ),
    Seam(
        "vllm.v1.engine.async_llm",
        "AsyncLLM.generate",
        ("prompt", "sampling_params", "request_id"),
        "results are set on outputs",
    ),
    Seam(
        "vllm.v1.engine.async_llm",
        "AsyncLLM.abort",
        ("request_id", "internal"),
        "requests that could not be sent are ended",
    ),
    Seam(
        "vllm.v1.engine.async_llm",
        "AsyncLLM.shutdown",
        ("timeout",),
        "running requests are stopped",
    ),
    Seam(
        "vllm.v1.engine.core_client",
        "AsyncMPClient._call_utility_async",
        ("method",),
        "results are fetched from the workers of one engine",
        named=("engine",),
    ),
    Seam(
        "vllm.v1.engine.core_client",
        "DPLBAsyncMPClient.get_core_engine_for_request",
        ("request",),
        "requests go to the replica that has capacity",
    ),
    Seam(
        "vllm.v1.engine.core_client",
        "AsyncMPClient.add_request_async",
        ("request",),
        "requests wait for capacity",
    ),
    Seam(
        "vllm.v1.engine.core_client",
        "AsyncMPClient.abort_requests_async",
        ("request_ids",),
        "aborted requests are released",
    ),
)
