"""The releases of vLLM whose sources are checked.

These are the installed one and the oldest and newest of docs/versions.json; the nightly tests check
all of docs/versions.json. MIDSTREAM_TEST_RELEASES="0.34.0 …" names others instead. A release that
is not in the cache is fetched by name (scripts/vllm_releases.py), and a fetch that fails is a
failure. MIDSTREAM_OFFLINE=1 skips a release that is not in the cache; the installed one always is.
"""

import functools
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

import vllm_releases  # noqa: E402

from support.nightly import NIGHTLY  # noqa: E402


def names() -> list[str]:
    """Versions in full, oldest first."""
    given = os.environ.get("MIDSTREAM_TEST_RELEASES")
    recorded = json.loads((ROOT / "docs" / "versions.json").read_text(encoding="utf-8"))
    found = _in_order(given.split() if given else recorded["releases"])
    if not given and not NIGHTLY:
        found = [found[0], found[-1]]
    installed = installed_release()
    return _in_order({*found, installed[0]} if installed is not None else found)


def _in_order(versions: Iterable[str]) -> list[str]:
    return sorted(versions, key=lambda name: [int(part) for part in re.findall(r"\d+", name)])


@functools.cache
def installed_release() -> tuple[str, Path] | None:
    """(version, `vllm` folder) of the installed vLLM."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    version = re.search(r"= '(\d+\.\d+\.\d+)", (folder / "_version.py").read_text("utf-8"))
    assert version, "vLLM's _version.py is not as expected"
    return version[1], folder


def folder_of(name: str) -> Path:
    """The `vllm` folder of a release; skips the test where it cannot be had offline."""
    installed = installed_release()
    if installed is not None and installed[0] == name:
        return installed[1]
    found = vllm_releases.cached(name)
    if found is None and os.environ.get("MIDSTREAM_OFFLINE", "") not in ("", "0"):
        pytest.skip(
            f"MIDSTREAM_OFFLINE is set, and the sources of vLLM {name} are not in the cache"
        )
    return found or vllm_releases.fetch(name)
