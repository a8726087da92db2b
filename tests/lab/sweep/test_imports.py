"""Sweeps are read, shown and asked for without torch and vLLM."""

import subprocess
import sys
from pathlib import Path

import pytest

import midstream

PROGRAM = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "vllm", "pandas", "xarray", "matplotlib"):
            raise ImportError(f"{name} is not to be imported")

sys.meta_path.insert(0, Blocker())
import numpy
import midstream
from midstream.lab.sweep import SweepRequest
request = SweepRequest("a prompt", midstream.Recovered(midstream.LogitDiff(" a", " b")))
assert SweepRequest.parse(request.to_dict()) == request
coords = {"site": ["z"], "layer": [0], "position": [1]}
values = numpy.ones((1, 1, 1), "f4")
sweep = midstream.lab.sweep.Sweep(values, tuple(coords), coords, request.metric, 0, 1, 0, ("a",))
assert midstream.lab.sweep.Sweep.from_json(sweep.to_json()).best(1)[0]["value"] == 1
assert "1.00" in str(sweep.picture())
"""


@pytest.mark.engine  # starts processes
def test_a_sweep_is_read_and_shown_without_torch_and_vllm():
    source = Path(midstream.__file__).parent.parent
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, env={"PYTHONPATH": str(source)})
