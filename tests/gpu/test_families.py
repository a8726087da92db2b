"""Twelve families by their published shapes with random weights, against hooks and compiled, by one
of vLLM's model runners; see `support.families`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from support import own_process
from support.families import FAMILIES, line

SECONDS = 1200  # of all: six minutes are expected
pytestmark = pytest.mark.timeout(SECONDS + 60)


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    """What the engines of each family showed, by family."""
    _, out, error = own_process.run("-m", "support.families", timeout=SECONDS)
    texts = [text for text in out.splitlines() if text.startswith("{")]
    assert texts, f"{out[-2000:]}\n{error[-6000:]}"
    found: dict[str, Any] = json.loads(texts[-1])
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_captures_edits_and_probes_are_those_of_hooks_and_the_compiled_model_s(
    reports: dict[str, Any], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = reports[name]
    with capsys.disabled():
        sys.stdout.write(f"\n{line(name, found)}\n")
    for engine in ("hooks", "graphs"):
        assert found[engine]["outcome"] == "ok", found[engine]["reason"]
    assert not found["hooks"]["compiled"]
    assert found["graphs"]["compiled"]
