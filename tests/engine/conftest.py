"""What files of tests share: references, transformers with hooks on the model of the pool; and two
engines that must agree."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from support.cached_pair import Pair
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


@pytest.fixture
def pair(wide: Any, uncached: Any) -> Pair:
    """The pool's engine with a prefix cache, and one without."""
    from support.cached_pair import Pair

    return Pair(wide, uncached)


@pytest.fixture
def prompt() -> list[int]:
    """A prompt that no other test has seen."""
    from support.cached_pair import SIZE, fresh

    return fresh(SIZE)
