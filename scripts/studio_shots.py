#!/usr/bin/env python3
"""Pictures of Studio's views, 1280 and 390 pixels wide, light and dark, from a running server.

    scripts/studio_shots.py http://127.0.0.1:8000 pictures/ [--view chat]

Registers two vectors, `cheerful` and `formal`, fitted to a few pairs, and leaves them there. Needs
Chromium or Chrome and the package playwright (the extra `dev`).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from screenshot import BROWSERS

ROOT = Path(__file__).resolve().parent.parent
BUILT = ROOT / "src" / "midstream" / "server" / "studio"
WIDTHS = (1280, 390)
WAIT_MS = 60_000
# A sweep of every cell, on a slow machine.
SWEEP_MS = 600_000

CHEERFUL = (
    ("I feel wonderful today.", "I feel terrible today."),
    ("What a lovely surprise this is!", "What an awful mess this is!"),
    ("The news made me so happy.", "The news made me so sad."),
    ("We laughed all evening.", "We cried all evening."),
    ("It was the best day of my life.", "It was the worst day of my life."),
    ("She smiled and hugged me.", "She frowned and left me."),
)
FORMAL = (
    ("I would be most grateful for your reply.", "gimme an answer already"),
    ("We regret to inform you of the delay.", "yeah it's late, sorry lol"),
    ("Please find the report enclosed.", "here's that thing you wanted"),
    ("It is a pleasure to make your acquaintance.", "hey what's up dude"),
)


def lines(pairs: tuple[tuple[str, str], ...], nth: int) -> str:
    return "\n".join(pair[nth] for pair in pairs)


def main() -> int:
    options = parse()
    from playwright.sync_api import sync_playwright

    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        sys.stderr.write(f"no browser: none of {', '.join(BROWSERS)} is on the PATH\n")
        return 1
    options.folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for name, pairs in (("cheerful", CHEERFUL), ("formal", FORMAL)):
            fit(browser, options.url, name, pairs)
        for view in VIEWS if options.view is None else (options.view,):
            for width in WIDTHS:
                for scheme in ("light", "dark"):
                    page = open_page(browser, width, scheme)
                    VIEWS[view](page, options.url)
                    shot = options.folder / f"studio-{view}-{width}-{scheme}.png"
                    page.evaluate("scrollTo(0, 0)")
                    page.screenshot(path=shot, full_page=width < 1280)
                    sys.stdout.write(f"{shot}\n")
                    page.context.close()
        browser.close()
    return 0


def open_page(browser: Any, width: int, scheme: str) -> Any:
    """A page with the files that are built here, whichever the server has read at its start."""
    context = browser.new_context(
        viewport={"width": width, "height": 860}, color_scheme=scheme, device_scale_factor=1
    )
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    for name in ("studio.js", "studio.css"):
        page.route(f"**/midstream/{name}", partial(built, name))
    return page


def built(name: str, route: Any) -> None:
    route.fulfill(path=BUILT / name)


def go(page: Any, url: str, view: str, **state: Any) -> None:
    parts = [
        f"{name}={quote(value if isinstance(value, str) else json.dumps(value))}"
        for name, value in state.items()
    ]
    page.goto(f"{url}/midstream/#/{view}?{'&'.join(parts)}")
    page.locator("h1").wait_for()


def fit(browser: Any, url: str, name: str, pairs: tuple[tuple[str, str], ...]) -> None:
    page = open_page(browser, 1280, "light")
    library(page, url, name, pairs)
    page.context.close()


def library(
    page: Any, url: str, name: str = "cheerful", pairs: tuple[tuple[str, str], ...] = CHEERFUL
) -> None:
    go(page, url, "library", name=name, positive=lines(pairs, 0), negative=lines(pairs, 1))
    page.get_by_role("button", name="Fit and register").click()
    page.locator("table.auc").wait_for()
    page.evaluate("scrollTo(0, 0)")


def chat(page: Any, url: str) -> None:
    library(page, url)
    page.get_by_role("link", name="Colour a chat").click()
    page.get_by_label("Message").fill("Tell me about a happy day and a sad day.")
    page.keyboard.press("Enter")
    finished(page)
    page.locator(".t").nth(30).click()


def steer(page: Any, url: str) -> None:
    sliders = [["cheerful", 14, 1.4], ["formal", 14, -0.4]]
    go(page, url, "steer", prompt="How was your day?", v=sliders)
    page.get_by_role("button", name="Answer", exact=True).click()
    finished(page)
    page.evaluate("scrollTo(0, 0)")


def layers(page: Any, url: str) -> None:
    go(page, url, "layers", prompt="The capital of France is")
    page.locator(".grid td.known").first.wait_for()
    page.locator(".grid td[data-at='3,4']").click()
    page.evaluate("scrollTo(0, 0)")


def patching(page: Any, url: str) -> None:
    state = {"answer": " Paris", "other": " Tokyo"}
    go(page, url, "patching", prompt="The capital of Japan is", source="The capital of France is",
       **state)  # fmt: skip
    page.get_by_role("button", name="Patch every cell").click()
    page.get_by_text("noise floor").or_(page.get_by_role("alert")).wait_for(timeout=SWEEP_MS)
    page.locator(".grid td[data-at='15,3']").click()
    page.evaluate("scrollTo(0, 0)")


def finished(page: Any) -> None:
    page.locator("[aria-busy=true]").first.wait_for()
    while page.locator("main [aria-busy=true]").count():
        page.wait_for_timeout(100)
    page.wait_for_timeout(200)


VIEWS = {
    "chat": chat,
    "steer": steer,
    "library": library,
    "layers": layers,
    "patching": patching,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Take pictures of Studio.")
    parser.add_argument("url", help="of the server, without a path")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--view", choices=VIEWS, help="one view alone")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
