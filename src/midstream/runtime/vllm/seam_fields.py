"""Attributes of vLLM's objects that midstream reads or sets, as data; functions are in `seams`.

If a release renamed a setting, midstream would no longer reject it; if it moved a field, midstream
would read it as absent. Attributes are therefore seams as well.
"""

from __future__ import annotations

from midstream.runtime.vllm.seam_types import Fields

_SETTINGS = "unsupported settings are rejected"
_BUFFERS = "buffers are sized for the largest step"
_REQUEST = "plans are resolved for a request's prompt and attached to its sampling params"
_RUNNING = "rows of running requests are fetched up to the known tokens"
_ENDED = "the requests of an engine that is shut down end with an error"
_ASLEEP = "weights are read while they are on the device"
_BLOCKS = "requests that share KV with a failed request are found"
_IMAGES = "blocks with tokens of an image have keys of the edits of all its tokens"
_CHANGED = "a changed plan holds from the first position that is not scheduled"

PROCESS_FIELDS: tuple[Fields, ...] = (
    Fields(
        "vllm",
        "",
        ("AsyncEngineArgs", "LLM", "RequestOutput", "SamplingParams"),
        "base classes and return types of midstream's API",
    ),
    Fields(
        "vllm.config",
        "VllmConfig",
        (
            "additional_config",
            "cache_config",
            "compilation_config",
            "kv_transfer_config",
            "max_concurrent_batches",
            "model_config",
            "offload_config",
            "parallel_config",
            "scheduler_config",
            "speculative_config",
        ),
        "midstream's settings, and unsupported settings",
    ),
    Fields(
        "vllm.config",
        "ParallelConfig",
        (
            "_api_process_count",
            "_api_process_rank",
            "data_parallel_size",
            "data_parallel_size_local",
            "distributed_executor_backend",
            "enable_elastic_ep",
            "pipeline_parallel_size",
            "prefill_context_parallel_size",
            "tensor_parallel_size",
            "use_sequence_parallel_moe",
            "use_ubatching",
        ),
        _SETTINGS,
    ),
    Fields("vllm.config", "CacheConfig", ("kv_sharing_fast_prefill",), _SETTINGS),
    Fields("vllm.config", "PassConfig", ("enable_sp",), _SETTINGS, until="0.30"),
    Fields("vllm.config", "OffloadConfig", ("uva",), _SETTINGS),
    Fields("vllm.config", "UVAOffloadConfig", ("cpu_offload_gb",), _SETTINGS),
    Fields("vllm.envs", "", ("VLLM_WEIGHT_OFFLOADING_DISABLE_UVA",), _SETTINGS),
    Fields("vllm.utils.platform_utils", "", ("is_uva_available",), _SETTINGS),
    Fields(
        "vllm.config",
        "CompilationConfig",
        ("max_cudagraph_capture_size", "pass_config"),
        _BUFFERS,
    ),
    Fields(
        "vllm.config",
        "SchedulerConfig",
        ("async_scheduling", "max_num_batched_tokens", "max_num_seqs"),
        _BUFFERS,
    ),
    Fields("vllm.config", "SpeculativeConfig", ("method",), _SETTINGS),
    Fields(
        "vllm.config",
        "SpeculativeConfig",
        ("enable_adaptive_verification",),
        _SETTINGS,
        since="0.28",
    ),
    Fields(
        "vllm.config",
        "ModelConfig",
        ("dtype", "get_hidden_size", "is_encoder_decoder", "max_model_len"),
        _BUFFERS,
    ),
    Fields(
        "vllm.config",
        "ModelConfig",
        ("model", "revision"),
        "sinks record which model their rows are of",
    ),
    Fields("vllm.config", "ModelConfig", ("is_mm_prefix_lm",), _IMAGES),
    Fields("vllm.v1.request", "Request", ("mm_features",), _IMAGES),
    Fields("vllm.multimodal.inputs", "MultiModalFeatureSpec", ("mm_position", "modality"), _IMAGES),
    Fields("vllm.multimodal.inputs", "PlaceholderRange", ("length", "offset"), _IMAGES),
    Fields(
        "vllm.engine.arg_utils",
        "EngineArgs",
        ("additional_config", "worker_cls"),
        "settings are completed",
    ),
    Fields(
        "vllm.v1.worker.worker_base",
        "WorkerWrapperBase",
        ("vllm_config", "worker"),
        "the worker exists, and its model is not loaded yet",
    ),
    Fields(
        "vllm.v1.worker.worker_base",
        "WorkerBase",
        ("model_runner", "rank"),
        "the loaded model is tapped",
    ),
    Fields(
        "vllm.v1.engine.input_processor", "InputProcessor", ("vllm_config",), "plans are validated"
    ),
    Fields(
        "vllm.v1.engine.llm_engine",
        "LLMEngine",
        ("engine_core", "input_processor", "output_processor", "renderer", "vllm_config"),
        "a front end is attached to each enabled engine",
    ),
    Fields(
        "vllm.v1.engine.output_processor",
        "OutputProcessor",
        ("external_req_ids",),
        "aborted requests are found",
    ),
    Fields("vllm.v1.engine.output_processor", "OutputProcessor", ("request_states",), _RUNNING),
    Fields(
        "vllm.v1.engine.output_processor",
        "RequestState",
        ("detokenizer", "prompt", "prompt_token_ids"),
        _RUNNING,
    ),
    Fields(
        "vllm.v1.engine.output_processor",
        "RequestState",
        ("is_prefilling",),
        "sweeps of a server start no run while another request has no token",
    ),
    Fields("vllm.v1.engine.detokenizer", "IncrementalDetokenizer", ("output_token_ids",), _RUNNING),
    Fields(
        "vllm.v1.engine",
        "EngineCoreRequest",
        (
            "cache_salt",
            "data_parallel_rank",
            "lora_request",
            "mm_features",
            "prompt_embeds",
            "prompt_is_token_ids",
            "prompt_token_ids",
            "request_id",
            "resumable",
            "sampling_params",
        ),
        _REQUEST,
    ),
    Fields(
        "vllm.sampling_params",
        "SamplingParams",
        ("extra_args", "logprob_token_ids", "max_tokens", "n", "output_kind"),
        _REQUEST,
    ),
    Fields(
        "vllm.sampling_params",
        "RequestOutputKind",
        ("CUMULATIVE", "DELTA", "FINAL_ONLY"),
        "results are set on complete outputs",
    ),
    Fields(
        "vllm.outputs",
        "RequestOutput",
        ("finished", "num_cached_tokens", "outputs", "prompt_token_ids", "request_id"),
        "results are set on outputs",
    ),
    Fields(
        "vllm.outputs",
        "CompletionOutput",
        ("finish_reason", "index", "logprobs", "stop_reason", "token_ids"),
        "results are set on outputs",
    ),
    Fields(
        "vllm.v1.engine.core",
        "EngineCore",
        ("model_executor", "scheduler", "vllm_config"),
        "requests that bypassed request validation are rejected, and vectors and changed plans "
        "sent to the workers",
    ),
    Fields(
        "vllm.v1.engine",
        "EngineCoreOutput",
        (
            "events",
            "finish_reason",
            "new_prompt_logprobs_tensors",
            "new_token_ids",
            "prefill_stats",
            "request_id",
            "stop_reason",
        ),
        "requests that failed on a worker, or that a probe stops, are ended",
    ),
    Fields(
        "vllm.v1.engine",
        "EngineCoreOutputs",
        ("outputs",),
        "requests that failed on a worker are ended",
    ),
    Fields(
        "vllm.v1.request",
        "Request",
        ("block_hashes", "client_index", "get_finished_reason", "request_id", "sampling_params"),
        "request payloads are read in the engine core",
    ),
    Fields(
        "vllm.v1.request",
        "Request",
        (
            "all_token_ids",
            "is_finished",
            "num_computed_tokens",
            "num_in_flight_tokens",
            "num_output_placeholders",
            "num_preemptions",
            "num_tokens",
            "take_events",
            "take_prefill_stats",
        ),
        f"{_CHANGED}; the tokens of requests that a probe stops are cut",
    ),
    Fields("vllm.v1.request", "Request", ("num_stale_output_tokens",), _CHANGED, since="0.28"),
    Fields(
        "vllm.v1.core.sched.scheduler",
        "Scheduler",
        ("hash_block_size", "scheduler_config"),
        _CHANGED,
    ),
    Fields(
        "vllm.v1.request",
        "RequestStatus",
        ("FINISHED_ERROR", "FINISHED_STOPPED"),
        "requests that failed on a worker, or that a probe stops, are ended",
    ),
    Fields(
        "vllm.v1.outputs",
        "ModelRunnerOutput",
        ("prompt_logprobs_dict", "req_id_to_index", "req_ids", "sampled_token_ids"),
        "failures are attached, and the tokens of requests that a probe stops are cut",
    ),
    Fields("vllm.v1.core.sched.scheduler", "Scheduler", ("kv_cache_manager", "requests"), _BLOCKS),
    Fields(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager",
        ("block_pool", "coordinator", "kv_cache_config"),
        _BLOCKS,
    ),
    Fields("vllm.v1.core.kv_cache_manager", "KVCacheBlocks", ("blocks",), _BLOCKS),
    Fields("vllm.v1.core.block_pool", "BlockPool", ("blocks",), _BLOCKS),
    Fields(
        "vllm.v1.core.kv_cache_utils",
        "KVCacheBlock",
        ("block_hash", "block_id", "is_null"),
        _BLOCKS,
    ),
    Fields("vllm.v1.kv_cache_interface", "KVCacheConfig", ("kv_cache_groups",), _BLOCKS),
    Fields("vllm.v1.kv_cache_interface", "KVCacheGroupSpec", ("kv_cache_spec",), _BLOCKS),
    Fields("vllm.v1.kv_cache_interface", "KVCacheSpec", ("block_size",), _BLOCKS),
    Fields(
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        ("finished_req_ids", "scheduled_new_reqs", "scheduled_spec_decode_tokens"),
        "requests begin and end",
    ),
    Fields(
        "vllm.v1.core.sched.output",
        "NewRequestData",
        ("num_computed_tokens", "prompt_token_ids", "req_id", "sampling_params"),
        "requests begin and end",
    ),
)

OFFLINE_FIELDS: tuple[Fields, ...] = (
    Fields(
        "vllm.entrypoints.llm",
        "LLM",
        ("chat_template", "llm_engine", "request_counter"),
        "the base class of midstream.LLM",
    ),
    Fields("vllm.v1.engine.llm_engine", "LLMEngine", ("is_sleeping",), _ASLEEP),
    Fields(
        "vllm.exceptions",
        "",
        ("VLLMUnprocessableEntityError", "VLLMValidationError"),
        "a rejected prompt is distinguished from a dead engine",
    ),
    Fields(
        "vllm.v1.engine.core_client",
        "SyncMPClient",
        ("outputs_queue", "resources", "shutdown", "utility_results"),
        "waiting callers learn that the engine was killed; a call is not waited for",
    ),
    Fields("vllm.v1.engine", "EngineCoreRequestType", ("UTILITY",), "a call is not waited for"),
    Fields(
        "vllm.v1.engine.core_client",
        "BackgroundResources",
        ("engine_dead",),
        "waiting callers learn that the engine was killed",
    ),
    Fields("vllm.utils.counter", "Counter", ("counter",), "a failed call restores the counter"),
    Fields(
        "vllm.renderers.params",
        "ChatParams",
        ("chat_template", "chat_template_content_format", "chat_template_kwargs"),
        "the messages of a chat are found in its prompt",
    ),
)

ASYNC_FIELDS: tuple[Fields, ...] = (
    Fields(
        "vllm.v1.engine.async_llm",
        "AsyncLLM",
        ("engine_core", "input_processor", "output_processor", "renderer", "vllm_config"),
        "the base class of midstream.AsyncLLM",
    ),
    Fields("vllm.v1.engine.async_llm", "AsyncLLM", ("is_sleeping",), _ASLEEP),
    Fields("vllm.v1.engine.async_llm", "AsyncLLM", ("output_handler",), _ENDED),
    Fields("vllm.v1.engine.output_processor", "OutputProcessor", ("propagate_error",), _ENDED),
    Fields(
        "vllm.v1.engine.core_client",
        "AsyncMPClient",
        ("core_engines", "resources"),
        "results are fetched from the workers of one engine, while it lives",
    ),
    Fields(
        "vllm.v1.engine.core_client",
        "BackgroundResources",
        ("engine_dead",),
        "waiting callers learn that an engine has ended",
    ),
    Fields(
        "vllm.v1.engine.core_client",
        "BackgroundResources",
        ("output_queue_task",),
        "a call from another event loop is refused",
    ),
    Fields(
        "vllm.v1.engine.core_client",
        "DPAsyncMPClient",
        ("lb_engines",),
        "requests go to the least busy replica",
    ),
    Fields(
        "vllm.v1.engine.output_processor",
        "RequestState",
        ("request_id", "request_index"),
        "spans get the figures of receipts",
    ),
    Fields("vllm.v1.engine.exceptions", "", ("EngineDeadError",), "a dead engine is distinguished"),
    Fields(
        "vllm.engine.protocol",
        "StreamingInput",
        ("sampling_params",),
        "a session's plan is attached to its inputs",
    ),
    Fields("vllm.usage.usage_lib", "UsageContext", ("ENGINE_CONTEXT",), "engines are created"),
    Fields(
        "vllm.engine.arg_utils",
        "AsyncEngineArgs",
        ("additional_config", "disable_log_stats", "enable_log_requests"),
        "engines are created",
    ),
)

_CARRIED = ("vllm_xargs",), "an engine call carries the id of its HTTP request"
SERVER_FIELDS: tuple[Fields, ...] = (
    Fields(
        "vllm.entrypoints.generate.base.serving",
        "GenerateBaseServing",
        ("engine_client", "system_fingerprint"),
        "responses name the active server-wide steering",
    ),
    Fields("vllm.entrypoints.openai.completion.protocol", "CompletionRequest", *_CARRIED),
    Fields("vllm.entrypoints.openai.chat_completion.protocol", "ChatCompletionRequest", *_CARRIED),
    Fields("vllm.entrypoints.openai.responses.protocol", "ResponsesRequest", *_CARRIED),
)
