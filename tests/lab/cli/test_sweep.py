"""`midstream sweep`: what it asks an engine or a server, and what it writes."""

import asyncio
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import typer
from starlette.testclient import TestClient
from support.command import CliRunner
from support.sae_oracle import RandomSae
from support.serving_fake import WIDTH, FakeEngine, make
from support.sweep_fake import expected

import midstream
from midstream import Client
from midstream.cli.app import app
from midstream.lab.cli.sweep import read_metric_option
from midstream.lab.sweep import LogitDiff, LogProb, Sweep, SweepRequest
from midstream.lab.sweep.source import NumberSource, PromptSource, ZeroSource

DIFF = ["--metric", "logit-diff:x:z", "--sites", "resid_post"]


class StubLLM:
    """An engine that begins at once, whose tokens are characters."""

    made = []
    asked = []

    def __init__(self, **settings):
        self.made.append(settings)
        self.registered = {}
        self.saes = SimpleNamespace(register=self.registered.__setitem__)

    def sweep(self, prompt, use_tqdm, **given):
        self.asked.append({"prompt": prompt, **given})
        assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
        engine = FakeEngine()
        engine.vectors.saes = self.registered.__getitem__
        prepared = engine.prepare_sweep(prompt, SweepRequest(**given), {})
        with use_tqdm(total=2, desc="Processed prompts") as bar:
            bar.update(2)
            os.write(1, b"a line of vLLM's\n")
            return asyncio.run(engine.run_sweep(prepared, {}, at_once=4, most_bytes=None))


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(midstream, "LLM", StubLLM, raising=False)
    monkeypatch.setattr(StubLLM, "made", [])
    monkeypatch.setattr(StubLLM, "asked", [])
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments):
        return CliRunner().invoke(app, ["sweep", *arguments])

    return call


def test_it_writes_the_sweep_as_json_and_as_one_page(run, tmp_path, capfd):
    out, page = tmp_path / "sweep.json", tmp_path / "sweep.html"
    done = run("abcd", "--source", "efgh", *DIFF, "--model", "m", "--out", str(out), "--html",
               str(page), "--best", "2")  # fmt: skip
    assert done.exit_code == 0, done.output
    [settings], [asked] = StubLLM.made, StubLLM.asked
    eager = {} if torch.cuda.is_available() else {"enforce_eager": True}
    taps = {"midstream": {"sites": ["resid_post"]}}
    assert settings == {"model": "m", "dtype": "auto", **taps, **eager}
    assert asked["prompt"] == "abcd"
    assert asked["source"] == PromptSource("efgh")
    found = Sweep.load(out)
    assert np.array_equal(found.values, expected())
    assert found.metric == LogitDiff("x", "z")
    text = page.read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert "default-src 'none'" in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "LogitDiff" in text
    # The cells with the largest effect, and the sums of the receipts.
    assert "17 runs: ok; 16 of 16 edits" in done.stdout
    lines = [line for line in done.stdout.splitlines() if "│" in line]
    best = [line.split("│")[1:-1] for line in lines]
    assert [[part.strip() for part in line] for line in best] == [
        [str(cell[name]) if name != "token" else json.dumps(cell[name]) for name in
         ("site", "layer", "position", "token")] + [f"{cell['value']:.4f}"]
        for cell in found.best(2)
    ]  # fmt: skip
    real = capfd.readouterr()
    assert "vLLM's" not in real.out + real.err
    assert "2/2" in real.err  # the progress


def test_options_are_arguments_of_the_sweep(run):
    done = run("abcd", "--source", "zero", "--metric", '{"logprob": 120}', "--model", "m",
               "--layers", "1,2", "--positions", "0,-1", "--sites", "resid_post", "--alpha", "0.5",
               "--repeats", "0", "--dtype", "float32", "--engine-args", '{"max_model_len": 64}',
               "--json")  # fmt: skip
    assert done.exit_code == 0, done.output
    found = Sweep.from_json(json.loads(done.stdout))
    assert found.coords == {"site": ["resid_post"], "layer": [1, 2], "position": [0, 3]}
    assert found.metric == LogProb(120)
    [settings], [asked] = StubLLM.made, StubLLM.asked
    assert (settings["dtype"], settings["max_model_len"]) == ("float32", 64)
    assert asked["source"] == ZeroSource()
    assert (asked["alpha"], asked["repeats"]) == (0.5, 0)


def test_a_chat_and_kl_get_messages_and_their_taps(run):
    run("abcd", "--source", "efgh", "--metric", "kl", "--model", "m", "--chat")
    [settings], [asked] = StubLLM.made, StubLLM.asked
    assert settings["midstream"] == {"sites": ["resid_post", "final_norm"]}
    assert asked["prompt"] == [{"role": "user", "content": "abcd"}]
    assert asked["source"] == PromptSource([{"role": "user", "content": "efgh"}])


def test_features_of_an_sae_are_patched_where_it_was_trained(run, tmp_path):
    sae = RandomSae("standard", WIDTH, 8, "blocks.2.hook_resid_post").write(tmp_path / "sae")
    done = run("abcd", "--source", "1.5", "--metric", "logprob:x", "--model", "m", "--sae",
               str(sae), "--features", "5,2", "--json")  # fmt: skip
    assert done.exit_code == 0, done.output
    found = Sweep.from_json(json.loads(done.stdout))
    assert found.coords == {
        "site": ["resid_post"], "layer": [2], "position": [0, 1, 2, 3], "feature": [5, 2]
    }  # fmt: skip
    [settings], [asked] = StubLLM.made, StubLLM.asked
    assert settings["midstream"] == {
        "sites": ["resid_post"],
        "readout_bytes": 4 * 8 * (WIDTH + 2) + 256,
    }
    assert asked["source"] == NumberSource(1.5)


def test_a_server_returns_the_same_sweep(run, monkeypatch, tmp_path):
    site = asyncio.run(make())
    keys = []

    def client(url, api_key):
        keys.append((url, api_key))
        return Client(http=TestClient(site.app, "http://localhost"))

    monkeypatch.setattr(midstream, "Client", client)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    out = tmp_path / "sweep.json"
    done = run("abcd", "--source", "efgh", *DIFF, "--url", "http://localhost", "--out", str(out))
    assert done.exit_code == 0, done.output
    assert keys == [("http://localhost", "secret")]
    assert np.array_equal(Sweep.load(out).values, expected())
    assert StubLLM.made == []
    refused = run("abcd", "--source", "longer", *DIFF, "--url", "http://localhost", "--json")
    assert refused.exit_code == 2
    assert "align" in json.loads(refused.stdout)["error"]
    site.server.close()


@pytest.mark.parametrize(
    ("text", "metric"),
    [
        ("logit-diff: Paris: Tokyo", {"logit_diff": [" Paris", " Tokyo"]}),
        ('logit-diff:" Paris":" Tokyo"', {"logit_diff": [" Paris", " Tokyo"]}),
        ('logprob:"a: b"', {"logprob": "a: b"}),
        ("logprob: Paris", {"logprob": " Paris"}),
        ("kl", "kl"),
        ("recovered:logprob:x", {"recovered": {"logprob": "x"}}),
        ("recovered:kl", {"recovered": "kl"}),
        ('{"logprob": 7}', {"logprob": 7}),
    ],
)
def test_metrics_are_read_in_each_form(text, metric):
    assert read_metric_option(text) == metric


@pytest.mark.parametrize(
    "text",
    [
        *("", "logprob", "logprob:", "logprob:a:b", "logit-diff:a", "kl:x", "diff:a:b", "{", ":a"),
        'logprob:"a',
    ],
)
def test_another_metric_is_refused(text):
    with pytest.raises(typer.BadParameter):
        read_metric_option(text)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--source", "e", *DIFF], "--model"),
        (["--source", "e", *DIFF, "--url", "u", "--dtype", "float32"], "--dtype"),
        (["--source", "e", *DIFF, "--model", "m", "--out", "/no/such/file"], "cannot be written"),
        (["--source", "e", *DIFF, "--model", "m", "--positions", "generated"], "positions"),
        (["--source", "e", *DIFF, "--model", "m", "--heads", "x"], "--heads"),
        (["--source", "e", *DIFF, "--model", "m", "--engine-args", "3"], "--engine-args"),
        (["--source", "e", "--metric", "logit-diff:x:x", "--model", "m"], "metric"),
    ],
)
def test_a_wrong_argument_is_refused_with_status_2_before_an_engine_starts(run, arguments, problem):
    done = run("abcd", *arguments)
    assert done.exit_code == 2
    assert problem in done.output
    assert StubLLM.made == []


def test_an_engine_that_cannot_start_is_refused_in_one_line(run, monkeypatch):
    def failing(**settings):
        raise ValueError("1 validation error for ModelConfig\n  dtype zz is unknown")

    monkeypatch.setattr(midstream, "LLM", failing)
    done = run("abcd", "--source", "efgh", *DIFF, "--model", "m", "--json")
    assert done.exit_code == 2
    said = "ValueError: 1 validation error for ModelConfig dtype zz is unknown"
    assert json.loads(done.stdout)["error"] == said


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nowhere", "http://[", "http://x:port"])
def test_a_server_that_cannot_be_reached_is_named_in_one_line(run, url):
    done = run("abcd", "--source", "efgh", *DIFF, "--url", url, "--json")
    assert done.exit_code == 2
    assert json.loads(done.stdout)["error"].startswith(f"--url {url}: ")
