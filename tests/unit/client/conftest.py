"""Tests of coroutines run on asyncio, as the clients do."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
