"""Groups of vLLM's KV cache."""

from __future__ import annotations

from typing import Any, NamedTuple


class KvBlocks(NamedTuple):
    """Blocks that hold the KV of all tokens of a request."""

    group: int  # index of the KV cache group
    size: int  # tokens of a block
    num_blocks: int

    @property
    def tokens(self) -> int:
        return self.size * self.num_blocks


def full_attention_blocks(kv_cache_config: Any) -> KvBlocks | None:
    """Return the blocks of the first group that attends to all tokens; None: there is none."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        layers = getattr(spec, "kv_cache_specs", None)  # of layers whose heads differ in size
        specs = [spec] if layers is None else list(layers.values())
        if all(isinstance(layer, FullAttentionSpec) for layer in specs):
            return KvBlocks(index, int(spec.block_size), int(kv_cache_config.num_blocks))
    return None
