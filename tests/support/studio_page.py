"""How tests use Studio's page."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from support.chromium import sync_api
from support.studio_server import StudioServer

if TYPE_CHECKING:
    from playwright.sync_api import Page

V = [1.0, 2.0, 2.0]
VIEWS = [
    "chat",
    *(pytest.param(name, marks=pytest.mark.nightly) for name in ("steer", "library", "layers")),
    "patching",
]


def link(server: StudioServer, view: str = "chat", **state: Any) -> str:
    """The address of a view with its state."""
    parts = [
        f"{name}={quote(value if isinstance(value, str) else json.dumps(value))}"
        for name, value in state.items()
    ]
    return f"{server.url}/midstream/#/{view}" + (f"?{'&'.join(parts)}" if parts else "")


def say(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def answer(page: Page) -> Any:
    return page.locator("article.assistant").last


def answered(page: Page, server: StudioServer, text: str = "abc", **state: Any) -> Any:
    """Ask on the chat page with this state; return the answer once its eleven tokens are there."""
    page.goto(link(server, **state))
    say(page, text)
    sync_api().expect(answer(page).locator(".t")).to_have_count(11)
    return answer(page)


def steered(page: Page, count: int = 5, timeout_ms: float = 5_000) -> Any:
    """Wait for the answers at every strength; return their panes."""
    expect = sync_api().expect
    panes = page.locator("article.pane")
    expect(panes).to_have_count(count)
    expect(page.get_by_role("button", name="Save picture")).to_be_enabled(timeout=timeout_ms)
    return panes


def steer(page: Page, count: int = 5, timeout_ms: float = 5_000) -> Any:
    """Ask for the answers at every strength; return their panes once they are there."""
    page.get_by_role("button", name="Answer", exact=True).click()
    return steered(page, count, timeout_ms)


def with_vector(server: StudioServer, name: str = "mood", layers: tuple[int, ...] = (1, 2)) -> None:
    server.site.engine.vectors.register(name, dict.fromkeys(layers, V))
