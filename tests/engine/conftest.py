"""Engines for tests: in this process, small, float32, shared by the tests of one module."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

ALL_SITES = ["resid_pre", "resid_mid", "resid_post"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)


@contextmanager
def engine(model: Path, *, plain: bool = False, **args: Any) -> Iterator[Any]:
    """A midstream.LLM (plain: a vllm.LLM) that is gone afterwards."""
    import torch

    settings = {
        "dtype": "float32",
        "max_model_len": 256,
        "enforce_eager": True,
        "skip_tokenizer_init": not (model / "tokenizer.json").exists(),
        "disable_log_stats": True,
        "seed": 0,
        **args,
    }
    if plain:
        from vllm import LLM
    else:
        from midstream import LLM

        settings.setdefault("midstream", {"sites": ALL_SITES})
    llm = LLM(str(model), **settings)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        torch._dynamo.reset()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for tiny random models."""
    return tmp_path_factory.mktemp("tiny")
