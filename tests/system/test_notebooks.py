"""The notebooks run as they stand, by nbclient, and show what their texts say."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import notebooks
from support.notebook_outputs import CHECKS, texts_of

# What the stored outputs show is checked by day, in tests/repo.
pytestmark = [pytest.mark.model, pytest.mark.nightly]


@pytest.fixture(scope="module")
def hub(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return notebooks.hub_cache(tmp_path_factory.mktemp("hub"), smollm2)


@pytest.fixture(scope="module")
def shared(hub: Path) -> Iterator[Any]:
    with notebooks.kernel(hub) as started:
        notebooks.share_engine(started)
        yield started


def run(name: str, started: Any) -> list[str]:
    """Execute a notebook; return the plain text of its outputs."""
    found = notebooks.read(notebooks.FOLDER / f"{name}.ipynb")
    try:
        notebooks.execute(found, started)
    finally:
        if name not in notebooks.ASYNC:
            notebooks.forget(started)
    return texts_of(found)


@pytest.mark.parametrize("name", sorted(CHECKS.keys() - notebooks.ASYNC))
def test_a_notebook_shows_what_its_text_says(name: str, shared: Any) -> None:
    CHECKS[name](run(name, shared))


@pytest.mark.parametrize("name", sorted(notebooks.ASYNC))
def test_so_does_one_whose_engine_has_a_process_of_its_own(name: str, hub: Path) -> None:
    with notebooks.kernel(hub) as started:
        CHECKS[name](run(name, started))
