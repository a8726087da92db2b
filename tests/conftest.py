"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from support import releases

ROOT = Path(__file__).resolve().parent.parent
# How long an example takes says nothing here: a first one imports what it needs.
settings.register_profile("midstream", deadline=None)
settings.load_profile("midstream")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Two engines at a time: the threads of one must not wait for those of the other. PyTorch reads
    # this when it is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


# Those that take minutes, the longest first: begun last, they would keep one process busy while the
# other has nothing left to do. Before them, one that makes models in transformers: where vLLM has
# run one by transformers' code, as it does Phi, that class is vLLM's for good in the process.
LONG = (
    "doctor/test_reference.py", "engine/test_ranks.py", "engine/test_ray.py",
    "engine/test_parity.py", "engine/test_serving.py", "engine/test_stale_graph.py",
    "engine/test_processes.py", "engine/test_arena.py", "engine/test_serving_ends.py",
    "engine/test_replicas.py", "ray/test_spreading.py", "ray/test_alone.py",
    "engine/test_speculative.py", "engine/test_capture_command.py", "examples/test_examples.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent

    def when(item: pytest.Item) -> int:
        name = item.path.relative_to(here).as_posix() if here in item.path.parents else ""
        if name in LONG:
            return LONG.index(name)
        return len(LONG) + (not name.startswith(("engine/", "examples/", "demo/")))

    items.sort(key=when)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, made when absent (a download of 90 MB)."""
    from midstream.demo.model.smollm2 import NAME, make_smollm2

    return make_smollm2(Path(os.environ.get("MIDSTREAM_MODELS", ROOT / ".models")) / NAME)


@pytest.fixture(scope="module", params=releases.names())
def release(request: pytest.FixtureRequest) -> Iterator[Path]:
    """The `vllm` folder of each release whose sources are checked, one after the other."""
    from support import sources

    folder = releases.folder_of(request.param)
    with sources.sources_in(folder):
        yield folder
