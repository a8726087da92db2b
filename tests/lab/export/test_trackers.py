"""The page's table of outputs, in trackio and W&B, both without a network."""

import json
import sqlite3
from types import SimpleNamespace

import pandas
import pytest
import torch
from support.pages import blocks

from midstream.results.probe_scores import Probes
from midstream.results.readouts import OutputReadOuts
from midstream.results.receipt import Action, Edited, Receipt


class Output(OutputReadOuts, SimpleNamespace):
    """vLLM's output or completion, with what was asked for."""


def outputs():
    """Two outputs; a probe acted on the second, and has scores there alone."""
    for n, scores in enumerate((torch.zeros(0), torch.tensor([0.5, 2.0]))):
        acted = (Action("mood", "flag", 4, 2.0),) if len(scores) else ()
        receipt = Receipt(f"r{n}", 3, 2, (), Edited(5, 5, 5), actions=acted)
        probes = Probes({"mood": scores}, {"mood": torch.arange(len(scores))}, [])
        completion = Output(
            index=0, text=f" yes {n}", finish_reason="stop", token_ids=[7, 8], receipt=receipt,
            probes=probes,
        )  # fmt: skip
        yield Output(request_id=f"r{n}", prompt="?", prompt_token_ids=[1], outputs=[completion])


def snippet():
    [text] = [text for _, _, text in blocks("docs/export.md", ["python"]) if "to_dict" in text]
    return text


@pytest.fixture
def offline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("TRACKIO_DIR", "WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("WANDB_MODE", "offline")
    return tmp_path


def test_trackio_keeps_the_table(offline):
    trackio = pytest.importorskip("trackio", reason="needs trackio")
    trackio.init(project="answers", auto_log_cpu=False)
    names = {"pandas": pandas, "trackio": trackio, "outputs": [*outputs()]}
    exec(snippet(), names)
    trackio.finish()
    with sqlite3.connect(offline / "answers.db") as kept:
        [(logged,)] = kept.execute("select metrics from metrics").fetchall()
    for text in (" yes 0", " yes 1", "mood:flag", "probe.mood.max", "edited.applied"):
        assert text in bytes(logged).decode(), text


@pytest.mark.engine  # W&B has a process of its own
def test_wandb_keeps_the_table(offline):
    wandb = pytest.importorskip("wandb", reason="needs wandb")
    run = wandb.init(project="answers", dir=str(offline), settings=wandb.Settings(silent=True))
    exec(snippet(), {"pandas": pandas, "trackio": wandb, "outputs": [*outputs()]})
    run.finish()
    [path] = offline.glob("wandb/offline-run-*/files/media/table/answers*.table.json")
    table = json.loads(path.read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [row["text"] for row in rows] == [" yes 0", " yes 1"]
    assert [str(row["probe.mood.max"]) for row in rows] == ["nan", "2.0"]  # by pandas
    assert [row["actions"] for row in rows] == [[], ["mood:flag"]]
