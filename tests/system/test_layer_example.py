"""A decoder layer of a package of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from support import tiny
from support.example_packages import install
from support.own_process import ROOT, python

pytestmark = pytest.mark.engine

PROGRAM = """
import sys, torch
from pathlib import Path
from support.engines import engine, greedy, tokens
from midstream import Capture, Steer

SITES = ["resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"]

def rows(llm, **more):
    out = llm.generate([tokens(range(3, 12))], greedy(3, detokenize=False), use_tqdm=False,
        capture=Capture(layers="all", sites=SITES), **more)[0]
    return dict(out.activations.items())

def hooked(llm):
    "Halves of the stream by layer of a plain request, from hooks on the modules that vLLM runs."
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    found, handles = {}, []
    for number, layer in enumerate(runner.get_model().model.layers):
        def after(module, args, out, number=number):
            found.setdefault(("mlp_out", number), []).append(out[0].clone())
            found.setdefault(("resid_post", number), []).append(out[0] + out[1])
        handles.append(layer.register_forward_hook(after))
    llm.generate([tokens(range(3, 12))], greedy(3, detokenize=False), use_tqdm=False)
    for handle in handles:
        handle.remove()
    return {tap: torch.cat(steps) for tap, steps in found.items()}

if __name__ == "__main__":
    model, out, several = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "several"
    with engine(model, midstream={"sites": SITES}) as llm:
        edit = Steer(torch.ones(64), layer=1)
        torch.save({
            "rows": rows(llm),
            "steered": rows(llm, edits=edit),
            "hooked": {} if several else hooked(llm),
        }, out / "found.pt")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install("midstream-layer-example", tmp_path_factory.mktemp("example"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.make("llama", tmp_path_factory.mktemp("tiny"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "architectures": ["HalvedForCausalLM"]})
    )
    return folder


@pytest.mark.parametrize("processes", ["one", "several"])
def test_a_registered_layer_is_captured_and_edited_as_hooks_on_its_module_say(
    installed: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH") or str(ROOT / "src")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", str(int(processes == "several")))
    python(program, model, tmp_path, processes, timeout=580)
    found = torch.load(tmp_path / "found.pt")
    rows = found["rows"]
    for layer in range(3):
        middle = rows["resid_pre", layer] + rows["attn_out", layer]
        torch.testing.assert_close(middle, rows["resid_mid", layer])
        torch.testing.assert_close(middle + rows["mlp_out", layer], rows["resid_post", layer])
    for tap, expected in found["hooked"].items():
        torch.testing.assert_close(rows[tap], expected[: len(rows[tap])])
    assert len(found["hooked"]) == (0 if processes == "several" else 6)
    steered = found["steered"]["resid_post", 1][:9] - rows["resid_post", 1][:9]
    torch.testing.assert_close(steered, torch.ones(9, 64))
