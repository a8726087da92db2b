"""Tests of coroutines run on asyncio, as the server does."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
