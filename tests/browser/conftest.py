"""A Chromium of this machine, and a server with Studio to look at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.chromium import chromium
from support.studio_server import StudioServer, studio


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as made:
        yield made


@pytest.fixture(scope="module")
def server() -> Iterator[StudioServer]:
    with studio() as made:
        yield made


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest) -> None:
    if "server" in request.fixturenames:
        made = request.getfixturevalue("server")
        made.bodies.clear()
        made.release.clear()
        for one in made.site.engine.vectors.list():
            made.site.engine.vectors.remove(one.name)


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page, on which nothing may fail, and which asks nobody but its server."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    made = context.new_page()
    made.set_default_timeout(10_000)
    problems: list[str] = []
    hosts: set[str] = set()
    made.on("pageerror", lambda error: problems.append(str(error)))
    made.on("console", lambda said: problems.append(said.text) if is_problem(said) else None)
    made.on("request", lambda asked: hosts.add(asked.url.split("/")[2]))
    yield made
    hacked = made.evaluate("window.hacked") if not made.url.startswith("about:") else None
    context.close()
    assert hacked is None
    assert problems == []
    assert all(host.startswith("127.0.0.1:") for host in hosts)


def is_problem(said: Any) -> bool:
    """Return whether a line of the console is no mere note of a refused or cut request."""
    return said.type == "error" and "Failed to load resource" not in said.text
