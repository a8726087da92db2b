"""Seams in vLLM's two model runners, as data; see `seams`."""

from __future__ import annotations

from midstream.runtime.vllm.seam_attention import (
    ATTENTION_FIELDS,
    ATTENTION_V1_FIELDS,
    ATTENTION_V1_SEAMS,
    ATTENTION_V2_FIELDS,
)
from midstream.runtime.vllm.seam_types import Fields, Seam

_DRAFTER = "a drafter that shares tapped modules is rejected"
_NONFINITE = "values that are not finite are cleared from reused KV"

_DUMMY_RUNS = "dummy runs run both models while the engine starts"
_MEMORY = "memory for the CUDA graphs of both models"
_GRAPHS = "each model has its own CUDA graphs"
_ADAPTERS = "adapters of the head apply to rows that are not sampled from"
_AGREE = "ranks agree on requests whose logits they compute together"


def _start_up(module: str, *named: str) -> tuple[Seam, ...]:
    """Return the seams of a model runner's start-up; `named` are arguments of a dummy run."""

    def seam(name: str, parameters: tuple[str, ...], why: str, *named: str) -> Seam:
        return Seam(
            module, f"GPUModelRunner.{name}", parameters, why, named=named, at=name, called=True
        )

    return (
        seam("_dummy_run", ("num_tokens",), _DUMMY_RUNS, *named),
        seam("capture_model", (), _GRAPHS),
        seam("profile_cudagraph_memory", (), _MEMORY),
    )


_LORA_HEAD = "vllm.lora.layers.logits_processor"
_PUNICA = "vllm.lora.punica_wrapper.punica_base"

# Both runners' model, and what compiles it.
MODEL_SEAMS: tuple[Seam, ...] = (
    Seam(
        "vllm.compilation.wrapper",
        "TorchCompileWithNoGuardsWrapper.__init__",
        (),
        "the tapped model is compiled by itself",
        called=True,
    ),
    Seam(
        "vllm.compilation.backends",
        "set_model_tag",
        ("tag",),
        "the compile cache keeps what both models compile apart",
        called=True,
    ),
    Seam(
        "vllm.config",
        "set_current_vllm_config",
        ("vllm_config",),
        "the tapped model is compiled under the engine's settings",
        called=True,
    ),
    Seam(
        "vllm.v1.worker.gpu_worker",
        "Worker.compile_or_warm_up_model",
        (),
        "the end of start-up, when the taps are checked",
        called=True,
    ),
    Seam(
        "vllm.v1.worker.gpu_worker",
        "Worker.execute_dummy_batch",
        (),
        "a dummy run in which the taps are checked",
        called=True,
    ),
    Seam(
        "vllm.model_executor.models.interfaces_base",
        "VllmModelForTextGeneration.compute_logits",
        ("hidden_states",),
        "logits are returned, and biases added to them",
        called=True,
    ),
    Seam("vllm.distributed.parallel_state", "get_tp_group", (), _AGREE, called=True),
    Seam(
        "vllm.distributed.parallel_state",
        "GroupCoordinator.all_reduce",
        ("input_",),
        "ranks add up their parts of a score that the engine core needs",
        called=True,
    ),
    Seam(
        _LORA_HEAD,
        "LogitsProcessorWithLoRA.set_lora",
        ("index", "lora_a", "lora_b"),
        _ADAPTERS,
    ),
    Seam(_LORA_HEAD, "LogitsProcessorWithLoRA.reset_lora", ("index",), _ADAPTERS, called=True),
    Seam(
        _PUNICA,
        "PunicaWrapperBase.add_lora_logits",
        ("y", "x", "lora_a_stacked", "lora_b_stacked", "scale"),
        _ADAPTERS,
    ),
)

_PARAMETERS = "parameters are gathered over ranks"
MODEL_FIELDS: tuple[Fields, ...] = (
    *ATTENTION_FIELDS,
    Fields(
        "vllm.compilation.wrapper",
        "TorchCompileWithNoGuardsWrapper",
        ("_compiled_callable", "_compiled_bytecode", "_bytecode_hook_handle", "vllm_config"),
        "the tapped model is compiled by itself",
    ),
    Fields(
        "vllm.model_executor.layers.vocab_parallel_embedding",
        "VocabParallelEmbedding",
        ("org_vocab_size", "shard_indices"),
        _PARAMETERS,
    ),
    Fields(
        "vllm.model_executor.layers.vocab_parallel_embedding",
        "ParallelLMHead",
        ("bias",),
        _PARAMETERS,
    ),
    Fields(
        "vllm.model_executor.layers.vocab_parallel_embedding",
        "VocabParallelEmbeddingShardIndices",
        ("org_vocab_start_index", "org_vocab_end_index"),
        _PARAMETERS,
    ),
    Fields("vllm.distributed.parallel_state", "GroupCoordinator", ("cpu_group",), _AGREE),
    Fields("vllm.lora.layers.base", "BaseLayerWithLoRA", ("punica_wrapper",), _ADAPTERS),
    Fields(_PUNICA, "PunicaWrapperBase", ("token_lora_indices",), _ADAPTERS),
    Fields("vllm.model_executor.layers.linear", "LinearBase", ("tp_size",), _PARAMETERS),
    Fields(
        "vllm.model_executor.layers.linear",
        "",
        ("ColumnParallelLinear", "RowParallelLinear"),
        _PARAMETERS,
    ),
)

_V1 = "vllm.v1.worker.gpu_model_runner"
V1_SEAMS: tuple[Seam, ...] = (
    *ATTENTION_V1_SEAMS,
    Seam(
        _V1,
        "GPUModelRunner._update_states",
        ("scheduler_output",),
        "requests begin and end",
        at="_update_states",
        called=True,
    ),
    Seam(
        _V1,
        "GPUModelRunner._model_forward",
        ("input_ids", "positions", "intermediate_tensors", "inputs_embeds"),
        "forward passes of requests",
        at="_model_forward",
    ),
    Seam(
        _V1,
        "GPUModelRunner.execute_model",
        ("scheduler_output",),
        "failures are attached",
        at="execute_model",
    ),
    Seam(
        _V1,
        "GPUModelRunner.sample_tokens",
        ("grammar_output",),
        "failures are attached",
        at="sample_tokens",
    ),
    Seam(
        _V1,
        "GPUModelRunner.get_model",
        (),
        "the loaded model is tapped",
        at="get_model",
        called=True,
    ),
    *_start_up(_V1, "is_profile"),
    Seam(
        "vllm.compilation.cuda_graph",
        "CUDAGraphWrapper.__init__",
        ("runnable", "vllm_config", "runtime_mode"),
        _GRAPHS,
        called=True,
    ),
    Seam(
        "vllm.compilation.breakable_cudagraph",
        "BreakableCUDAGraphWrapper.__init__",
        ("runnable", "vllm_config"),
        _GRAPHS,
        called=True,
    ),
)

_V2 = "vllm.v1.worker.gpu.model_runner"
V2_SEAMS: tuple[Seam, ...] = (
    Seam(
        _V2,
        "GPUModelRunner.execute_model",
        ("scheduler_output", "intermediate_tensors"),
        "steps",
        named=("dummy_run",),
        at="execute_model",
    ),
    Seam(
        _V2,
        "GPUModelRunner.sample_tokens",
        ("grammar_output",),
        "failures are attached",
        at="sample_tokens",
    ),
    Seam(
        _V2,
        "GPUModelRunner.get_model",
        (),
        "the loaded model is tapped",
        at="get_model",
        called=True,
    ),
    *_start_up(_V2, "is_profile", "skip_attn"),
    Seam(
        "vllm.v1.worker.gpu.cudagraph_utils",
        "ModelCudaGraphManager.capture",
        ("model",),
        _GRAPHS,
    ),
    Seam(
        "vllm.v1.worker.gpu.model_states.interface",
        "ModelState.preprocess_state",
        ("input_batch",),
        "batches of requests, before the forward pass",
        at="model_state.preprocess_state",
    ),
)

V1_FIELDS: tuple[Fields, ...] = (
    *ATTENTION_V1_FIELDS,
    Fields(
        _V1,
        "GPUModelRunner",
        (
            "device",
            "input_batch",
            "input_ids",
            "max_num_tokens",
            "model",
            "positions",
            "query_start_loc",
        ),
        "forward passes of requests",
        at="",
    ),
    Fields(_V1, "GPUModelRunner", ("compilation_config",), _GRAPHS, at=""),
    Fields("vllm.compilation.cuda_graph", "CUDAGraphWrapper", ("runtime_mode",), _GRAPHS),
    Fields(_V1, "GPUModelRunner", ("kv_cache_config", "kv_caches", "requests"), _NONFINITE),
    Fields("vllm.v1.worker.gpu_input_batch", "CachedRequestState", ("block_ids",), _NONFINITE),
    Fields("vllm.v1.kv_cache_interface", "KVCacheConfig", ("num_blocks",), _NONFINITE),
    Fields(
        "vllm.v1.worker.gpu_input_batch",
        "InputBatch",
        ("num_computed_tokens_cpu", "num_reqs", "req_ids"),
        "the requests of a step are read",
        at="input_batch",
    ),
    Fields(
        "vllm.v1.utils",
        "CpuGpuBuffer",
        ("np",),
        "the first row of each request",
        at="query_start_loc",
    ),
    Fields("vllm.v1.utils", "CpuGpuBuffer", ("gpu",), "the rows' tokens", at="input_ids"),
    Fields(_V1, "GPUModelRunner", ("drafter",), _DRAFTER),
    Fields("vllm.v1.spec_decode.llm_base_proposer", "SpecDecodeBaseProposer", ("model",), _DRAFTER),
    Fields(
        _V1,
        "AsyncGPUModelRunnerOutput",
        ("_model_runner_output",),
        "failures are attached",
    ),
)

V2_FIELDS: tuple[Fields, ...] = (
    *ATTENTION_V2_FIELDS,
    Fields(
        _V2,
        "GPUModelRunner",
        ("device", "max_num_tokens", "model", "model_state"),
        "forward passes of requests",
        at="",
    ),
    Fields(_V2, "GPUModelRunner", ("cudagraph_manager", "lora_config"), _GRAPHS),
    Fields(
        "vllm.v1.worker.gpu.cudagraph_utils",
        "CudaGraphManager",
        ("breakable_cg_runner", "graphs"),
        _GRAPHS,
    ),
    Fields(
        "vllm.v1.worker.gpu.cudagraph_utils",
        "CudaGraphManager",
        ("_capture_mem_samples",),
        _MEMORY,
        since="0.30",
    ),
    Fields(
        "vllm.v1.worker.gpu.input_batch",
        "InputBatch",
        (
            "input_ids",
            "num_computed_tokens_np",
            "num_reqs",
            "num_scheduled_tokens",
            "num_tokens",
            "positions",
            "req_ids",
        ),
        "the requests of a step are read",
    ),
    Fields(_V2, "GPUModelRunner", ("speculator",), _DRAFTER),
    Fields(
        "vllm.v1.worker.gpu.spec_decode.speculator",
        "DraftModelSpeculator",
        ("model",),
        _DRAFTER,
    ),
    Fields(
        "vllm.v1.worker.gpu.async_utils",
        "AsyncOutput",
        ("model_runner_output",),
        "failures are attached",
    ),
)
