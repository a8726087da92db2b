"""Llama with decoder layers that halve what the MLP returns."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class HalvedDecoderLayer(LlamaDecoderLayer):
    """A layer with a forward of its own, so midstream cannot know what it takes and returns."""

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return 0.5 * self.mlp(hidden_states), residual


class HalvedForCausalLM(LlamaForCausalLM):
    """The model; a configuration names it under `architectures`."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=HalvedDecoderLayer)
