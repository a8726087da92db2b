"""The sink and the decoder layer in packages of their own: installed, found, used by an engine."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.own_process import ROOT, python

SINK = """
import sys, torch
from pathlib import Path
from support.engines import engine, greedy, tokens
from midstream import Capture
from midstream.errors import ConfigError

if __name__ == "__main__":
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        with engine(model, midstream={"sinks": {"running_mean": {"path": "x", "evry": 2}}}):
            pass
    except ConfigError as error:
        refused = str(error)
    sinks = {"running_mean": {"path": str(out / "means.jsonl")}}
    with engine(model, midstream={"sinks": sinks}) as llm:
        captures = [[Capture([0, 2]), Capture([0, 2], sink="running_mean")]] * 4
        prompts = [tokens(range(3 + n, 9 + 2 * n)) for n in range(4)]
        outputs = llm.generate(prompts, greedy(4, detokenize=False), capture=captures,
            use_tqdm=False)
    import midstream_sink_example
    torch.save({
        "refused": refused,
        "from": midstream_sink_example.__file__,
        "status": [o.receipt.status for o in outputs],
        "rows": [dict(o.activations.items()) for o in outputs],
    }, out / "found.pt")
"""
LAYER = """
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
    """The folder into which pip has installed both packages of `examples/`."""
    folder = tmp_path_factory.mktemp("examples")
    target = folder / "installed"
    names = ("midstream-sink-example", "midstream-layer-example")
    for name in names:  # a build writes beside its source, so that is a copy
        shutil.copytree(ROOT / "examples" / name, folder / name)
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation"]
    command += ["--no-index", "--quiet", "--target", str(target)]
    sources = [str(folder / name) for name in names]
    done = subprocess.run(
        [*command, *sources], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.fixture
def run(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """Runs a program where the packages are installed; gives back what it has found."""
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH") or str(ROOT / "src")])
    monkeypatch.setenv("PYTHONPATH", path)

    def run(text: str, model: Path, *arguments: str) -> dict[str, Any]:
        program = tmp_path / "program.py"
        program.write_text(text)
        python(program, model, tmp_path, *arguments, timeout=580)
        found: dict[str, Any] = torch.load(tmp_path / "found.pt")
        return found

    return run


def test_an_installed_sink_is_found_by_its_name_and_gets_the_rows(
    run: Any, installed: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    found = run(SINK, tiny_llama)
    assert Path(found["from"]).parent == installed
    assert "midstream.sinks.running_mean" in found["refused"]
    assert "takes path, every" in found["refused"]
    assert found["status"] == ["ok"] * 4
    lines = [json.loads(line) for line in (tmp_path / "means.jsonl").read_text().splitlines()]
    assert [(line["site"], line["layer"]) for line in lines] == [
        ("resid_post", 0), ("resid_post", 2),
    ] * 4  # fmt: skip
    for layer in (0, 2):
        every = torch.cat([rows["resid_post", layer] for rows in found["rows"]])
        last = [line for line in lines if line["layer"] == layer][-1]
        assert last["rows"] == len(every)
        mean = torch.tensor(last["mean"], dtype=torch.float64)
        torch.testing.assert_close(mean, every.double().mean(dim=0))


@pytest.mark.parametrize("processes", ["one", "several"])
def test_a_registered_layer_is_captured_and_edited_as_hooks_on_its_module_say(
    run: Any, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: str
) -> None:
    model = shutil.copytree(tiny_llama, tmp_path / "halved")
    config = json.loads((model / "config.json").read_text())
    config["architectures"] = ["HalvedForCausalLM"]
    (model / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", str(int(processes == "several")))
    found = run(LAYER, model, processes)
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
