"""Seams of attention weights, which are computed again from the KV cache, as data; see `seams`."""

from __future__ import annotations

from midstream.runtime.vllm.seam_types import Fields, Seam

_WHY = "attention weights are computed again from the KV cache"
_V1, _V2 = "vllm.v1.worker.block_table", "vllm.v1.worker.gpu.block_table"

ATTENTION_FIELDS: tuple[Fields, ...] = (
    Fields(
        "vllm.model_executor.layers.attention",
        "Attention",
        (
            "attn_backend",
            "attn_type",
            "dtype",
            "head_size",
            "head_size_v",
            "impl",
            "kv_cache",
            "kv_cache_dtype",
            "layer_name",
            "num_heads",
            "num_kv_heads",
            "sliding_window",
        ),
        _WHY,
    ),
    Fields("vllm.v1.kv_cache_interface", "KVCacheConfig", ("kv_cache_groups",), _WHY),
    Fields("vllm.v1.kv_cache_interface", "KVCacheGroupSpec", ("layer_names",), _WHY),
)
ATTENTION_V1_SEAMS: tuple[Seam, ...] = (
    Seam(_V1, "MultiGroupBlockTable.__getitem__", ("idx",), _WHY, called=True),
    Seam(_V1, "BlockTable.get_device_tensor", ("num_reqs",), _WHY, called=True),
)
ATTENTION_V1_FIELDS: tuple[Fields, ...] = (
    Fields("vllm.v1.worker.gpu_input_batch", "InputBatch", ("block_table",), _WHY),
    Fields(_V1, "BlockTable", ("block_size",), _WHY),
)
ATTENTION_V2_FIELDS: tuple[Fields, ...] = (
    Fields("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", ("block_tables",), _WHY),
    Fields(_V2, "BlockTables", ("block_sizes", "input_block_tables"), _WHY),
)
