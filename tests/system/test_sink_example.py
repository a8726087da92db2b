"""The sink in a package of its own: built, installed, found by its name, and used by an engine."""

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
from midstream import Capture, ConfigError

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


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install("midstream-sink-example", tmp_path_factory.mktemp("example"))


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("llama", tmp_path_factory.mktemp("tiny"))


def test_an_installed_sink_is_found_by_its_name_and_gets_the_rows(
    installed: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH") or str(ROOT / "src")])
    monkeypatch.setenv("PYTHONPATH", path)
    python(program, tiny_model, tmp_path, timeout=580)
    found = torch.load(tmp_path / "found.pt")
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
