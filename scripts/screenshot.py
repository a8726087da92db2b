#!/usr/bin/env python3
"""Render a report, a saved picture, or a page of the site in headless Chromium as a PNG.

    scripts/screenshot.py report.html [docs/images/demo-report.png] [--section answers] [--dark]
    scripts/screenshot.py report.html --all pictures/   # 1280 and 390 pixels wide, light and dark

Needs Chromium or Chrome, and nothing else: on Debian `apt-get install chromium`. The browser gets
a profile of its own, which is thrown away, and no network.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
TIMEOUT_S = 120
WIDTHS = (1280, 390)


def main() -> int:
    options = parse()
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        sys.stderr.write(
            f"no browser: none of {', '.join(BROWSERS)} is on the PATH."
            " On Debian or Ubuntu: apt-get install chromium\n"
        )
        return 1
    if not options.report.is_file():
        sys.stderr.write(f"no report at {options.report}: midstream demo writes one\n")
        return 1
    if options.all is None:
        return take(browser, options, options.image, options.width, options.dark)
    for width in WIDTHS:
        for is_dark in (False, True):
            name = f"{options.report.stem}-{width}-{'dark' if is_dark else 'light'}.png"
            if status := take(browser, options, options.all / name, width, is_dark):
                return status
    return 0


def take(browser: str, options: argparse.Namespace, image: Path, width: int, is_dark: bool) -> int:
    """Take one picture, and return the exit status."""
    image.parent.mkdir(parents=True, exist_ok=True)
    # Taken aside, then moved: a failure leaves no old picture that looks like a new one's.
    with tempfile.TemporaryDirectory() as scratch:
        taken = Path(scratch) / "page.png"
        command = [browser, *FLAGS, f"--user-data-dir={scratch}/profile", f"--screenshot={taken}"]
        command.append(f"--window-size={width},{options.height}")
        command.append(f"--force-device-scale-factor={options.scale}")
        command.append(f"--blink-settings=preferredColorScheme={0 if is_dark else 1}")
        page = options.report.resolve()
        if options.section is not None:
            page = Path(scratch) / "page.html"
            page.write_text(only(options.report.read_text(encoding="utf-8"), options.section))
        # A window is at least 500 pixels wide; a frame may be narrower.
        frame = Path(scratch) / "frame.html"
        frame.write_text(
            f'<!DOCTYPE html><meta name="color-scheme" content="light dark">'
            f"<style>body {{ margin: 0 }} iframe {{ border: 0; width: {width}px;"
            f' height: {options.height}px }}</style><iframe src="{page.as_uri()}"></iframe>'
        )
        command.append(frame.as_uri())
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode or not taken.is_file():
            sys.stderr.write(f"{browser} took no picture (status {done.returncode}):\n")
            sys.stderr.write(done.stderr[-2000:])
            return 1
        shutil.move(taken, image)
    sys.stdout.write(f"{image}\n")
    return 0


def only(page: str, section: str) -> str:
    """Return a page with one section alone: a headless browser does not scroll."""
    # The page's policy forbids style sheets besides its own.
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    hidden = (
        f"header, section:not(#{section}) {{ display: none }} h2 {{ margin-top: 0 !important }}"
    )
    return page.replace("</head>", f"<style>{hidden}</style></head>", 1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Render a report as a PNG.")
    parser.add_argument("report", type=Path)
    default = ROOT / "docs" / "images" / "demo-report.png"
    parser.add_argument("image", type=Path, nargs="?", default=default)
    parser.add_argument("--width", type=int, default=1280, help="of the window, in CSS pixels")
    parser.add_argument("--height", type=int, default=1900, help="of the window, in CSS pixels")
    parser.add_argument("--scale", type=float, default=1.0, help="device pixels per CSS pixel")
    parser.add_argument(
        "--section", help="show it alone: layers, tokens, effect, answers, take, prompts, receipts"
    )
    parser.add_argument("--all", type=Path, help="folder for pictures of all widths and modes")
    parser.add_argument("--dark", action="store_true", help="as a dark-mode browser shows it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
