"""`midstream capture`: its options, its words and its exit status, with an engine that is none."""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from lab.jobs.checking import check_rows
from lab.jobs.fakes import FakeEngine, prompts, write_lines
from support.command import CliRunner

from midstream import open_store
from midstream.cli.app import app
from midstream.lab.cli import capture
from midstream.lab.jobs import engine

_CONTEXT = multiprocessing.get_context("fork")


class Slow(FakeEngine):
    """Takes its time, so that there is an instant to be stopped at."""

    def step(self):
        time.sleep(0.02)
        return super().step()


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Calls the command on `prompts.jsonl` of a folder, into `acts` of it."""
    started = []

    def start(job):
        started.append(job)
        return FakeEngine(job)

    monkeypatch.setattr(engine, "start_vllm", start)
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        given = ["--data", "prompts.jsonl", "--out", "acts", "--verbose", *arguments]
        result = CliRunner().invoke(app, ["capture", "some/model", "--layers", "0,2", *given])
        return result, started

    return call


def test_a_data_set_is_captured_and_summed_up(run, tmp_path):
    write_lines(tmp_path, prompts(20))
    result, (job,) = run()
    assert result.exit_code == 0, result.output
    assert "acts: 20 of 20 lines are stored; 40 rows" in result.stdout
    assert "starting vLLM with some/model" in result.stderr
    check_rows("acts", {n + 1: each["text"] for n, each in enumerate(prompts(20))})
    assert job.capture.layers.indices == (0, 2)
    assert (job.codec, job.max_tokens, job.column) == ("raw", 1, "text")
    assert job.capture.positions.include == ("last_prompt",)


def test_options_reach_the_job(run, tmp_path):
    write_lines(tmp_path, [{"talk": [{"role": "user", "content": "hi"}]}] * 3)
    _, (job,) = run(
        "--sites", "resid_post, mlp_out", "--positions", "prompt,generated,-1", "--layers", "all",
        "--max-tokens", "4", "--codec", "topk8:k=4", "--tag", "t", "--prompt-field", "talk",
        "--chat", "--limit", "2", "--keep-prompts", "--revision", "v1", "--dtype", "float32",
        "--engine-args", '{"max_num_seqs": 8}', "--flush-seconds", "5",
    )  # fmt: skip
    assert job.capture.sites.names == ("resid_post", "mlp_out")
    assert job.capture.positions.include == ("prompt", "generated", -1)
    assert job.capture.layers.indices == "all"
    assert (job.max_tokens, job.codec, job.tag, job.column) == (4, "topk8:k=4", "t", "talk")
    assert (job.chat, job.limit, job.keep_prompts) == (True, 2, True)
    assert (job.revision, job.dtype, job.flush_seconds) == ("v1", "float32", 5.0)
    assert job.engine_args == {"max_num_seqs": 8}
    assert len(open_store("acts")) == 2


def test_positions_may_be_json_and_progress_without_a_terminal_is_lines(run, tmp_path, monkeypatch):
    monkeypatch.setattr("midstream.lab.jobs.progress._BETWEEN_LINES", 0.0)
    write_lines(tmp_path, prompts(60))
    positions = '[{"window": [-4, null]}, "generated"]'
    result, (job,) = run("--positions", positions, "--max-tokens", "2")
    assert len(job.capture.positions.include) == 2
    lines = [line for line in result.stderr.splitlines() if "rows/s" in line]
    assert len(lines) > 3
    assert "/60 lines" in lines[0]
    assert "ETA" in lines[-2]


def test_json_is_one_summary_and_nothing_else(run, tmp_path):
    write_lines(tmp_path, [*prompts(3), b"?"])
    result, _ = run("--json")
    assert result.exit_code == 1
    summary = json.loads(result.stdout)
    assert summary.pop("seconds") >= 0
    assert summary == {
        "out": "acts", "status": 1, "total": 4, "skipped": 0, "captured": 3, "stored": 3,
        "failed": 1, "rows": 6, "nbytes": 192, "errors": "acts/errors.jsonl",
        "interrupted": False, "error": None,
    }  # fmt: skip


def test_lines_that_fail_are_shown_counted_and_in_the_exit_status(run, tmp_path):
    write_lines(tmp_path, [*prompts(3), b"?", {"text": "too long " * 200}, *[b"!"] * 40])
    result, _ = run()
    assert result.exit_code == 1
    assert "line 4: expected JSON" in result.stderr
    assert "line 5: the prompt is too long" in result.stderr
    assert "of 45 lines 41 will fail, the first one is line 4" in result.stderr
    assert result.stderr.count("expected JSON") == 1 + 19
    assert "20 lines failed; others are in acts/errors.jsonl" in result.stderr
    assert "42 failed: see acts/errors.jsonl" in result.stdout
    assert len(Path("acts/errors.jsonl").read_text().splitlines()) == 42


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--layers", "x"], "layers: expected"),
        (["--sites", "resid"], "unknown site 'resid'"),
        (["--positions", "lst"], "positions"),
        (["--codec", "zip"], "codec"),
        (["--data", "nothing.jsonl"], "data: there is no file 'nothing.jsonl'"),
        (["--tag", "a b"], "tag: expected"),
        (["--errors", "/nowhere/e.jsonl"], "errors: cannot write"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_is_wrong_is_refused_by_name_before_an_engine_starts(run, tmp_path, arguments, said):
    write_lines(tmp_path, prompts(3))
    result, started = run("--json", *arguments)
    assert (result.exit_code, started) == (2, [])
    assert said in result.stderr
    assert said in json.loads(result.stdout)["error"]


@pytest.mark.parametrize(
    "arguments",
    [["--engine-args", "{"], ["--engine-args", "[]"], ["--limit", "0"], ["--positions", "[1, "]],
)
def test_malformed_options_are_refused(run, tmp_path, arguments):
    write_lines(tmp_path, prompts(3))
    result, started = run(*arguments)
    assert (result.exit_code, started) == (2, [])


def test_an_engine_that_cannot_start_is_a_refusal_and_one_that_breaks_is_not(
    run, tmp_path, monkeypatch
):
    write_lines(tmp_path, [*prompts(30), {"text": "it dies"}])
    broken, _ = run("--json")
    assert broken.exit_code == 1
    summary = json.loads(broken.stdout)
    assert summary["error"] == "RuntimeError: the engine is dead"
    assert summary["stored"] == summary["captured"] == len(open_store("acts")) > 0

    def fails(job):
        raise ValueError("no such model")

    monkeypatch.setattr(engine, "start_vllm", fails)
    refused, _ = run("--json", "--resume")
    assert refused.exit_code == 2
    assert json.loads(refused.stdout)["error"] == "ValueError: no such model"
    assert "Traceback" not in broken.stderr + refused.stderr


class Deaf(Slow):
    """Its start waits for long, and loses the first interrupts."""

    def __init__(self, job):
        Path("starting").touch()
        for _ in range(3):
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(60)
        super().__init__(job)


def command(folder, *arguments, start=Slow):
    """The command in a process of its own; what it prints is in `out` and `err`."""

    def work():
        os.chdir(folder)
        for descriptor, name in ((1, "out"), (2, "err")):
            file = open(name, "wb")  # noqa: SIM115
            os.dup2(file.fileno(), descriptor)
        sys.stdout, sys.stderr = (os.fdopen(number, "w") for number in (1, 2))
        engine.start_vllm = start
        capture._REPEAT_SECONDS = 0.1
        app(["capture", "some/model", "--layers", "0,2", "--data", "prompts.jsonl", "--out",
             "acts", "--flush-seconds", "0.01", *arguments])  # fmt: skip

    process = _CONTEXT.Process(target=work)
    process.start()
    return process


def wait_for(folder, pattern):
    for _ in range(600):
        if list(folder.glob(pattern)):
            return
        time.sleep(0.05)
    raise AssertionError(f"{pattern} was not written")


@pytest.mark.engine  # starts processes
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_in_good_order_and_resume_goes_on(tmp_path, number, status):
    write_lines(tmp_path, prompts(400))
    process = command(tmp_path, "--json")
    wait_for(tmp_path, "acts/*.safetensors")
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == status, (tmp_path / "err").read_text()
    summary = json.loads((tmp_path / "out").read_text())
    assert summary["interrupted"]
    assert 0 < summary["stored"] == summary["captured"] == len(open_store(tmp_path / "acts")) < 400
    write_lines(tmp_path, prompts(400)[: summary["stored"] + 40])
    resumed = command(tmp_path, "--resume")
    resumed.join(60)
    assert resumed.exitcode == 0, (tmp_path / "err").read_text()
    texts = {n + 1: each["text"] for n, each in enumerate(prompts(summary["stored"] + 40))}
    check_rows(tmp_path / "acts", texts)


@pytest.mark.engine  # starts processes
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_heard_although_the_start_of_the_engine_loses_interrupts(
    tmp_path, number, status
):
    write_lines(tmp_path, prompts(400))
    process = command(tmp_path, "--json", start=Deaf)
    wait_for(tmp_path, "starting")
    os.kill(process.pid, number)
    process.join(20)
    assert process.exitcode == status, (tmp_path / "err").read_text()
    assert json.loads((tmp_path / "out").read_text())["stored"] == 0
    assert "Traceback" not in (tmp_path / "err").read_text()


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (["m", "--ray"], ["m", "--ray", "auto"]),
        (["--ray", "m"], ["--ray", "auto", "m"]),
        (["--ray", "--json", "m"], ["--ray", "auto", "--json", "m"]),
        (["--ray", "10.0.0.1:6379", "m"], ["--ray", "10.0.0.1:6379", "m"]),
        (["--ray", "head.cluster:6379"], ["--ray", "head.cluster:6379"]),
        (["--ray", "[::1]:6379"], ["--ray", "[::1]:6379"]),
        (["--ray", "local", "m"], ["--ray", "local", "m"]),
        (["--ray=local", "m"], ["--ray=local", "m"]),
        (["--ray", ".models/M"], ["--ray", "auto", ".models/M"]),
        (["--ray", "org/model"], ["--ray", "auto", "org/model"]),
        (["--out", "a", "--", "--ray"], ["--out", "a", "--", "--ray"]),
        ([], []),
    ],
)
def test_ray_may_go_without_an_address(given, read):
    assert capture.with_address(given) == read


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (["--ray"], {"address": "auto", "engines": None, "cpus": 1, "gpus": None}),
        (["--ray", "h:1", "--ray-engines", "3", "--ray-cpus", "4", "--ray-gpus", "0.5"],
         {"address": "h:1", "engines": 3, "cpus": 4, "gpus": 0.5}),
    ],
)  # fmt: skip
def test_options_of_ray_reach_the_job_that_is_spread(run, tmp_path, monkeypatch, arguments, fields):
    import midstream.lab.jobs.ray
    from midstream.lab.jobs import CaptureRun

    spreads = []

    class Spreading(CaptureRun):
        def __init__(self, job, spread):
            super().__init__(job)
            spreads.append(spread)

    monkeypatch.setattr(midstream.lab.jobs.ray, "RayCaptureRun", Spreading)
    write_lines(tmp_path, prompts(3))
    result, _ = run(*arguments)
    assert result.exit_code == 0, result.output
    (spread,) = spreads
    assert {name: getattr(spread, name) for name in fields} == fields


def test_options_of_ray_alone_are_refused(run, tmp_path):
    write_lines(tmp_path, prompts(3))
    result, started = run("--ray-engines", "2")
    assert (result.exit_code, started) == (2, [])
    assert "require --ray" in result.stderr
