"""References that files of tests share: transformers with hooks, on the model of the pool."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.oracle import Oracle
    from support.oracle_edits import EditOracle


@pytest.fixture(scope="session")
def reference(tiny_llama: Path) -> Oracle:
    """The residual stream, with vectors added to it."""
    from support.oracle import Oracle

    return Oracle(tiny_llama, "model.layers", "post_attention_layernorm")


@pytest.fixture(scope="session")
def oracle(tiny_llama: Path) -> EditOracle:
    """Every site, with any edits, by their formulas in float64."""
    from support.oracle_edits import PLACES, EditOracle

    return EditOracle(tiny_llama, PLACES["llama"])
