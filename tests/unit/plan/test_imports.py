import subprocess
import sys
from pathlib import Path

import pytest

import midstream

PROGRAM = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "vllm"):
            raise ImportError(f"{name} is not to be imported")

sys.meta_path.insert(0, Blocker())
import midstream.plan as plans
plan = plans.Plan.parse({"edits": [{"op": "steer", "vector": [1, 2], "layer": 0}]})
from midstream.plan.resolve.resolve import resolve
resolved = resolve(plan, plans.ModelShape(1, 2, [("resid_post", 0)]), plans.Prompt(3), None)
from midstream.plan.resolve import wire
assert wire.from_bytes(wire.to_bytes(resolved)) == resolved
"""


@pytest.mark.engine  # starts processes
def test_it_works_without_torch_and_vllm():
    source = Path(midstream.__file__).parent.parent
    env = {"PYTHONPATH": str(source)}
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, env=env)
