"""A fake server and both clients of it."""

import asyncio
from collections.abc import Iterator

import pytest
from support.serving_fake import Site, make
from unit.client.both import KINDS, Both


@pytest.fixture
def site() -> Iterator[Site]:
    made = asyncio.run(make())
    yield made
    made.server.close()


@pytest.fixture(params=KINDS)
def both(request: pytest.FixtureRequest, site: Site) -> Iterator[Both]:
    made = Both(request.param, site)
    yield made
    made.close()
