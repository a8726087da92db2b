"""A Chromium of this machine, for tests of pages."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def sync_api() -> Any:
    """playwright's module; skips the tests where it is not installed."""
    return pytest.importorskip(
        "playwright.sync_api", reason="the package playwright is missing: scripts/setup.sh dev"
    )


@contextmanager
def chromium() -> Iterator[Any]:
    """Start the Chromium of this machine, or playwright's own; skip the tests if there is none."""
    with sync_api().sync_playwright() as playwright:
        path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
        path = path or playwright.chromium.executable_path
        if not Path(path).is_file():
            pytest.skip(
                f"no browser: none of {', '.join(BROWSERS)} is on the PATH, and playwright has none"
                " of its own: apt-get install chromium, or python -m playwright install chromium"
            )
        # Without a GPU, Chromium would compute what one does in a process of its own.
        args = ["--no-sandbox", "--disable-gpu", "--disable-software-rasterizer"]
        made = playwright.chromium.launch(executable_path=path, args=args)
        yield made
        made.close()
