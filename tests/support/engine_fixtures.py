"""Fixtures of the tests that start engines, in this process or in others."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support import engines

if TYPE_CHECKING:
    from support.oracle import Oracle
    from support.pool import Pool


@pytest.fixture(scope="module", autouse=True)
def no_engine_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a module leaves of its engines goes now, or stays frozen until several have left some:
    vLLM's own clean-up of one takes down the process groups of the engines of that time.
    """
    yield
    had_engines = request.node.get_closest_marker("engine") or any(
        part in ("engine", "system", "nightly", "gpu") for part in request.path.parts
    )
    if had_engines:
        engines.collect_all()
    elif gc.get_count()[1] == 0:
        return  # so few new objects are not worth a search
    else:
        gc.collect(1)
    engines.freeze_again()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for tiny random models."""
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="session")
def tiny_llama(tiny_models: Path) -> Path:
    """A tiny random Llama."""
    from support import tiny

    return tiny.make("llama", tiny_models)


@pytest.fixture(scope="session")
def talking_llama(tiny_models: Path) -> Path:
    """A tiny random Llama with a tokenizer of bytes."""
    from support import talking

    return talking.make(tiny_models)


@pytest.fixture(scope="session")
def talking_oracle(talking_llama: Path) -> Oracle:
    """transformers with hooks, on the same."""
    from support.oracle import Oracle

    return Oracle(talking_llama, "model.layers", "post_attention_layernorm")


@pytest.fixture(scope="session")
def pool(tiny_llama: Path) -> Iterator[Pool]:
    """Engines on the tiny Llama that tests share."""
    from support.pool import Pool

    found = Pool(tiny_llama)
    yield found
    found.close()


@pytest.fixture
def llm(pool: Pool) -> Iterator[Any]:
    """The standard engine: the three sites of the residual stream, steps of 64 tokens."""
    yield from pool.use("standard")


@pytest.fixture
def wide(pool: Pool) -> Iterator[Any]:
    """An engine with all sites, whose steps hold whole batches."""
    yield from pool.use("wide")


@pytest.fixture
def uncached(pool: Pool) -> Iterator[Any]:
    """The same without a prefix cache."""
    yield from pool.use("uncached")


@pytest.fixture(scope="module")
def actors_find_the_tests() -> Iterator[None]:
    """Processes of Ray's actors import what pytest has made importable in this one."""
    from support.zygote import python_path

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", python_path())
        yield
