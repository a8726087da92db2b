"""vLLM's connector of hidden states without CUDA's streams, which it copies by."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as example


class HostConnector(example.ExampleHiddenStatesConnector):
    """Writes a request's file when the step after its last one begins."""

    def _submit_async_write(self, pending: Any) -> None:
        blocks = torch.tensor(pending.block_ids)[:, None] * self._block_size
        slots = (blocks + torch.arange(self._block_size)).flatten()
        rows = example.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        tensors = {"hidden_states": rows.clone(), "token_ids": pending.token_ids}
        save_file(tensors, pending.filename)
        if (lock := self._lock_fds.pop(pending.req_id, None)) is not None:
            os.close(lock)
        self._req_copy_events[pending.req_id] = SimpleNamespace(query=lambda: True)


def settings(folder: str, layers: list[int], connector: str = "HostConnector") -> dict[str, Any]:
    """Arguments of an engine that extracts hidden states of vLLM's layer numbers."""
    hf_config = {"eagle_aux_hidden_state_layer_ids": layers}
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": hf_config},
        },
        "kv_transfer_config": {
            "kv_connector": connector,
            "kv_role": "kv_producer",
            "kv_connector_module_path": __name__,
            "kv_connector_extra_config": {"shared_storage_path": folder},
        },
    }


def hidden_states(llm: Any, output: Any) -> torch.Tensor:
    """Return vLLM's hidden states of an output, [tokens, layers, width]."""
    path: str = output.kv_transfer_params["hidden_states_path"]
    llm.llm_engine.step()  # hands what is to be written to the worker
    llm.llm_engine.step()
    tensors: dict[str, torch.Tensor] = load_file(path)
    assert tensors["token_ids"].tolist() == list(output.prompt_token_ids)
    return tensors["hidden_states"]
