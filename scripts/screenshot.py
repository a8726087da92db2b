#!/usr/bin/env python3
"""Render a demo report in headless Chromium, as a PNG.

    scripts/screenshot.py report.html [docs/images/demo-report.png] [--section answers] [--dark]

Needs Chromium or Chrome, and nothing else: on Debian `apt-get install chromium`. The browser gets
a profile of its own, which is thrown away, and no network.
"""

from __future__ import annotations

import argparse
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
    options.image.parent.mkdir(parents=True, exist_ok=True)
    # Taken aside, then moved: a failure leaves no old picture that looks like a new one's.
    with tempfile.TemporaryDirectory() as scratch:
        taken = Path(scratch) / "page.png"
        command = [browser, *FLAGS, f"--user-data-dir={scratch}/profile", f"--screenshot={taken}"]
        command.append(f"--window-size={options.width},{options.height}")
        command.append(f"--force-device-scale-factor={options.scale}")
        command.append(f"--blink-settings=preferredColorScheme={0 if options.dark else 1}")
        page = Path(scratch) / "page.html"
        text = options.report.read_text(encoding="utf-8")
        page.write_text(text + only(options.section), encoding="utf-8")
        command.append(page.as_uri())
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode or not taken.is_file():
            sys.stderr.write(f"{browser} took no picture (status {done.returncode}):\n")
            sys.stderr.write(done.stderr[-2000:])
            return 1
        shutil.move(taken, options.image)
    sys.stdout.write(f"{options.image}\n")
    return 0


def only(section: str | None) -> str:
    """A style that hides all but one section: a headless browser does not scroll."""
    if section is None:
        return ""
    return f"<style>header, section:not(#{section}) {{ display: none }} h2 {{ margin: 0 }}</style>"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Render a demo report as a PNG.")
    parser.add_argument("report", type=Path)
    default = ROOT / "docs" / "images" / "demo-report.png"
    parser.add_argument("image", type=Path, nargs="?", default=default)
    parser.add_argument("--width", type=int, default=1280, help="of the window, in CSS pixels")
    parser.add_argument("--height", type=int, default=1900, help="of the window, in CSS pixels")
    parser.add_argument("--scale", type=float, default=1.0, help="device pixels per CSS pixel")
    parser.add_argument(
        "--section", help="id to scroll to: separability, tokens, answers, receipts"
    )
    parser.add_argument("--dark", action="store_true", help="as a dark-mode browser shows it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
