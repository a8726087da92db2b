"""An EAGLE-3 head that speculators trains on captured rows drafts in vLLM; scripts/trainers.sh
installs speculators.
"""

import importlib
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.model
def test_tokens_that_a_trained_head_drafts_are_accepted(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("speculators.train.config")
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    found = importlib.import_module("train_draft").main(["--model", str(smollm2)])
    assert found["losses"][-1] < 0.8 * found["losses"][0]
    assert found["length"] > 1.1
