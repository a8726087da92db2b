"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, made when absent (a download of 90 MB)."""
    from midstream.models.smollm2 import NAME, make_smollm2

    return make_smollm2(Path(os.environ.get("MIDSTREAM_MODELS", ROOT / ".models")) / NAME)
