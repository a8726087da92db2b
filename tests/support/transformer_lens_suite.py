"""A pytest plugin that runs TransformerLens's own tests of its vLLM driver on midstream's.

    python -m pytest -p support.transformer_lens_suite FOLDER/tests/…

FOLDER is an unpacked source distribution of TransformerLens, whose tests stay as they are. Their
`boot_vllm` is `remote_bridge(LLM(…))`, and their model, which is fetched, a random one of the same
shape in which their names and token ids exist. Without GPUs they run on the CPU.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from support.engines import engine
from support.ranks import PIPELINE, ranks

# Tests of attributes of their driver that no other has.
THEIR_OWN = {
    "test_layout_check_ran_clean": "reads `_tp_size` and `_layout_verified` of their driver"
}
SITES = ["embed", "resid_post", "attn_out", "mlp_out", "final_norm"]
_engines = ExitStack()


def pytest_configure(config: pytest.Config) -> None:
    from transformer_lens.model_bridge.sources.vllm import source

    source.boot_vllm = boot


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "multigpu" in item.path.name:  # without two GPUs they would be skipped
            for node in item.listchain():
                node.own_markers = [mark for mark in node.own_markers if mark.name != "skipif"]
        if item.name in THEIR_OWN:
            item.add_marker(pytest.mark.skip(reason=THEIR_OWN[item.name]))


def pytest_sessionfinish() -> None:
    _engines.close()


def boot(model: str, dtype: Any = None, **arguments: Any) -> Any:
    """Return the bridge on an engine with the prefix cache on, in place of `boot_vllm`'s."""
    from midstream.lab.harness.transformer_lens import remote_bridge

    del model
    arguments.pop("enable_position_interventions", None)  # midstream needs no other engine for them
    arguments.pop("gpu_memory_utilization", None)
    arguments |= {"dtype": str(dtype).removeprefix("torch."), "enable_prefix_caching": True}
    arguments |= {"midstream": {"sites": SITES}, "max_num_seqs": 4, "num_gpu_blocks_override": 64}
    if "pipeline_parallel_size" in arguments:
        arguments |= PIPELINE
    start = ranks if any(name.endswith("parallel_size") for name in arguments) else engine
    return remote_bridge(_engines.enter_context(start(_model(), **arguments)))


def _model() -> Path:
    from transformers import AutoModelForCausalLM, Qwen2Config

    folder = Path(tempfile.gettempdir()) / "midstream-transformer-lens" / "qwen2"
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=30_000, hidden_size=128, intermediate_size=192, num_hidden_layers=24,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder
