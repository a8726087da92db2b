"""SmolLM2 on Ray, with engines and jobs killed: the store is that of a single engine."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.own_process import ROOT

from midstream import open_store
from midstream.store import verify

pytestmark = pytest.mark.model

LINES = 48
# One sequence at a time: in the last bit rows depend on what is in the batch beside a prompt.
ENGINE = {
    "enforce_eager": True,
    "max_model_len": 128,
    "max_num_seqs": 1,
    "num_gpu_blocks_override": 64,
}
WORDS = ["the cat", " sat", " on", " a mat", ", and", " then", " nothing", " in Paris"]


def make_texts() -> list[str]:
    chance = random.Random(7)
    return ["".join(chance.choices(WORDS, k=chance.randint(1, 9))) for _ in range(LINES)]


def command(folder: Path, model: Path, *arguments: str) -> subprocess.Popen[str]:
    """The command in a process of its own, into `acts` of a folder."""
    path = [str(ROOT / "tests"), os.environ.get("PYTHONPATH") or str(ROOT / "src")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # As many threads as Ray gives to an actor with one core.
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "midstream", "capture", str(model), *arguments,
         "--data", "../prompts.jsonl", "--out", "acts", "--layers", "3,29",
         "--sites", "resid_post,mlp_out", "--positions", "all", "--max-tokens", "3",
         "--tag", "pile", "--dtype", "float32", "--engine-args", json.dumps(ENGINE),
         "--flush-seconds", "0.1", "--resume", "--keep-prompts", "--json"],
        cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=400)
    assert process.returncode == 1, err
    return json.loads(out)


def wait_for_shards(folder: Path, process: subprocess.Popen[str], more: int) -> None:
    wanted = len(list((folder / "acts").glob("*.safetensors"))) + more
    for _ in range(6000):
        if len(list((folder / "acts").glob("*.safetensors"))) >= wanted:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError("nothing was written")


def actors(process: subprocess.Popen[str]) -> list[psutil.Process]:
    found = []
    for each in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "EngineActor" in " ".join(each.cmdline()):
                found.append(each)
    return found


def stored(folder: Path) -> dict[str, Any]:
    """Each request by its id; each is there once, and all is right."""
    found = verify(folder / "acts")
    assert found.ok, str(found)
    requests = open_store(folder / "acts").requests
    by_id = {each.request: each for each in requests}
    assert len(by_id) == len(requests)
    return by_id


def known(one: Any) -> dict[str, Any]:
    """What is stored with a request, but for the number that it had in its engine."""
    found = dict(one.metadata)
    found["midstream"] = {
        name: value for name, value in found["midstream"].items() if name != "request_id"
    }
    return found


@pytest.mark.timeout(900)
def test_a_killed_engine_and_a_killed_job_leave_the_store_of_a_single_engine(smollm2, tmp_path):
    lines = [*make_texts(), "too long " * 200]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
    one, many = tmp_path / "one", tmp_path / "many"

    first = command(many, smollm2, "--ray", "local")
    wait_for_shards(many, first, 2)
    victims = actors(first)
    assert len(victims) == 2
    victims[0].kill()
    wait_for_shards(many, first, 2)
    left = psutil.Process(first.pid).children(recursive=True)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()

    # At once: what is left of the first may be writing yet.
    again = command(many, smollm2, "--ray", "local")
    while not (victims := actors(again)):
        assert again.poll() is None, again.communicate()
        time.sleep(0.1)
    wait_for_shards(many, again, 1)
    victims[0].kill()
    summary = ended(again)
    assert 0 < summary["skipped"] < LINES
    assert summary["skipped"] + summary["stored"] == LINES
    assert (summary["failed"], summary["total"], summary["interrupted"]) == (1, LINES + 1, False)
    assert psutil.wait_procs(left, timeout=120)[1] == []

    alone = ended(command(one, smollm2))
    assert (alone["stored"], alone["failed"]) == (LINES, 1)
    wanted, found = stored(one), stored(many)
    assert set(found) == set(wanted)
    for request, expected in wanted.items():
        got = found[request]
        assert (got.tag, got.prompt_tokens) == (expected.tag, expected.prompt_tokens)
        assert known(got) == known(expected)
        rows, reference = got.activations(), expected.activations()
        assert set(rows) == set(reference)
        for tap in reference:
            assert torch.equal(rows.positions_of(*tap), reference.positions_of(*tap))
            assert torch.equal(rows.token_ids_of(*tap), reference.token_ids_of(*tap))
            assert torch.equal(rows[tap], reference[tap])
    headers = [
        {shard.header for shard in open_store(folder / "acts").shards} for folder in (one, many)
    ]
    assert headers[0] == headers[1]
    reasons = [(folder / "acts/errors.jsonl").read_text() for folder in (one, many)]
    assert reasons[0] == reasons[1]
