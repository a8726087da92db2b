"""Sites inside attention and the MLP of more models, against transformers; see what it runs."""

from pathlib import Path

import pytest
from support.engines import HAS_GPU
from support.own_process import python


@pytest.mark.nightly
@pytest.mark.skipif(HAS_GPU, reason="the tolerance is that of the CPU")
def test_the_places_hold_what_transformers_has(tmp_path: Path) -> None:
    printed = python("-m", "system.inner_models", tmp_path, timeout=500)
    assert printed.count(" sites\n") == 7
