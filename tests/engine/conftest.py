"""Fixtures of the tests that start engines; every test here is marked `engine`."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import engines, talking, tiny
from support.oracle import Oracle


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="module", autouse=True)
def no_engine_is_left() -> Iterator[None]:
    """What a module leaves of its engines goes now: vLLM's own clean-up of one that is collected
    later would take down the process groups of the engines of that time.
    """
    yield
    gc.collect()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for tiny random models."""
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="session")
def tiny_llama(tiny_models: Path) -> Path:
    """A tiny random Llama."""
    return tiny.make("llama", tiny_models)


@pytest.fixture(scope="session")
def talking_llama(tiny_models: Path) -> Path:
    """A tiny random Llama with a tokenizer of bytes."""
    return talking.make(tiny_models)


@pytest.fixture(scope="session")
def talking_oracle(talking_llama: Path) -> Oracle:
    """transformers with hooks, on the same."""
    return Oracle(talking_llama, "model.layers", "post_attention_layernorm")


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[Any]:
    """An engine on the tiny Llama with every site tapped, for the tests of one module."""
    with engines.engine(tiny_llama, max_num_batched_tokens=64, max_num_seqs=8) as found:
        yield found
