"""`AsyncLLM` at the interpreter's end."""

import subprocess
import sys
from pathlib import Path

import pytest

import midstream

PROGRAM = """
import builtins
from midstream import AsyncLLM

builtins.kept = llm = AsyncLLM.__new__(AsyncLLM)  # freed after the modules
llm.shutdown()
"""


@pytest.mark.engine
@pytest.mark.nightly  # a fresh interpreter takes long to import vLLM
def test_an_engine_that_is_freed_at_the_interpreters_end_prints_no_error():
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"PYTHONPATH": str(Path(midstream.__file__).parent.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Exception ignored" not in ended.stderr
    assert "Traceback" not in ended.stderr
