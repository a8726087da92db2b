"""Tests that need a CUDA device; skipped without one. `scripts/gpu_check.sh` runs them, once for
each of vLLM's model runners.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    here = Path(__file__).parent
    absent = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(absent)


@pytest.fixture(scope="session")
def gpu_llm(smollm2: Path) -> Iterator[Any]:
    """SmolLM2 with torch.compile and CUDA graphs, every site tapped, steps of 256 tokens; in
    float32 unless `MIDSTREAM_GPU_DTYPE` says bfloat16.
    """
    from support.engines import ALL_SITES, GPU_MEMORY, engine

    from midstream.sinks import registry as finding

    entry = EntryPoint("rows", "support.sinking:AsTheyCome", finding.GROUP)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finding, "entry_points", lambda group: [entry])
        with engine(
            smollm2,
            dtype=os.environ.get("MIDSTREAM_GPU_DTYPE", "float32"),
            enforce_eager=False,
            max_model_len=1024,
            max_num_batched_tokens=256,
            **GPU_MEMORY,
            midstream={"sites": ALL_SITES, "sinks": "rows"},
        ) as found:
            yield found
