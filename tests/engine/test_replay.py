"""Recorded requests give the same bits again in another order and mix, or the place that differs;
and what is captured changes no bit of what a model answers.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from engine.asking import ask_all
from support import tiny
from support.command import CliRunner
from support.engines import HAS_GPU, engine, greedy
from support.pool import Pool
from support.same_sums import same_sums
from vllm import SamplingParams

import midstream
from midstream import Capture, Norms, Probe, Steer
from midstream.cli.app import app
from midstream.errors import SpecError
from midstream.lab.jobs import Job
from midstream.lab.jobs.engine import VllmEngine
from midstream.lab.jobs.prompt_tokens import PromptTokens
from midstream.lab.jobs.records import Record
from midstream.lab.jobs.store_writer import StoreWriter
from midstream.lab.replay import Recorder, read_records, replay
from midstream.results.activations import Activations

DRAW = np.random.default_rng(5)
ROWS = DRAW.standard_normal((4, tiny.HIDDEN)).astype(np.float32)
PROMPTS = [DRAW.integers(3, tiny.VOCAB, size).tolist() for size in (3, 40, 90, 17)]
PROMPTS.append([*PROMPTS[2][:64], 5, 9])  # in part in the prefix cache
DRAWN = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=12, ignore_eos=True)
# vLLM's CPU build cannot draw for a prompt in chunks: these have steps that hold whole batches.
DRAWN_KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "drawn": (DRAWN, {}),
    "several": (SamplingParams(temperature=1, n=2, seed=3, max_tokens=5), {"capture": [1]}),
    "drawn steered": (DRAWN, {"edits": Steer(3 * ROWS[0], 1), "capture": [2]}),
}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (greedy(8), {}),
    "captured": (greedy(8), {"capture": Capture([0, 2], sites=["resid_pre", "resid_post"])}),
    "encoded": (greedy(6), {"capture": Capture([1], codec="full8", positions="generated")}),
    "steered": (greedy(8), {"edits": Steer(3 * ROWS[0], 1), "capture": [2]}),
    "scored": (
        greedy(8),
        {"probes": Probe(ROWS[1], layer=1, name="p"), "edits": Steer(ROWS[2], 0, phase="prompt")},
    ),
}
pytestmark = pytest.mark.skipif(HAS_GPU, reason="needs sums that do not depend on the step")


@pytest.fixture(scope="module")
def recorded(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Requests of every kind, recorded one kind after the other."""
    file = tmp_path_factory.mktemp("recorded") / "requests.jsonl"
    with contextmanager(pool.use)("standard") as llm, same_sums():
        recorder = Recorder(llm, file)
        for params, asked in KINDS.values():
            recorder.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, **asked)
    return file.read_text()


@pytest.fixture
def path(recorded: str, tmp_path: Path) -> Path:
    """A file of the recorded requests."""
    file = tmp_path / "requests.jsonl"
    file.write_text(recorded)
    return file


def test_recorded_requests_of_all_kinds_give_the_same_bits_in_other_orders_and_mixes(llm, path):
    records = read_records(path)
    recorded = [list(record.prompt) for record in records]
    assert recorded == PROMPTS * len(KINDS)
    for mix, seed in ((1, 3), (7, 0), (64, 1)):
        with same_sums(), mock.patch.object(llm, "generate", wraps=llm.generate) as generate:
            report = replay(llm, records, mix=mix, seed=seed)
        assert report.differences == (), (mix, [*map(str, report.differences)])
        sent = [
            prompt["prompt_token_ids"] for call in generate.mock_calls for prompt in call.args[0]
        ]
        assert sorted(sent) == sorted(recorded)
        assert sent != recorded
        assert max(len(call.args[0]) for call in generate.mock_calls) <= mix
    assert min(report.tokens, report.scores, report.rows) > 40


def test_drawn_tokens_and_several_completions_are_the_same_in_other_mixes(wide, tmp_path):
    recorder = Recorder(wide, tmp_path / "drawn.jsonl")
    with same_sums():
        for params, asked in DRAWN_KINDS.values():
            recorder.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, **asked)
        records = read_records(tmp_path / "drawn.jsonl")
        for mix, seed in ((1, 3), (5, 0)):
            assert replay(wide, records, mix=mix, seed=seed).differences == ()
    assert {len(record.results) for record in records} == {1, 2}


def changed(line: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A copy of a line with another entry at each path of names and numbers."""
    copy = json.loads(json.dumps(line))
    for path, value in changes.items():
        *holders, name = (int(part) if part.isdigit() else part for part in path.split("__"))
        holder = copy
        for part in holders:
            holder = holder[part]
        holder[name] = value
    return copy


def test_what_differs_is_named_by_kind_position_and_amount(llm, path):
    records = read_records(path)
    at = {name: index * len(PROMPTS) for index, name in enumerate(KINDS)}
    plain, scored, captured = (records[at[name]] for name in ("plain", "scored", "captured"))
    (result,) = plain.results
    other = (result.tokens[4] + 1) % tiny.VOCAB
    tokens = (*result.tokens[:4], other, *result.tokens[5:])
    logprobs = (result.logprobs[0], result.logprobs[1] - 0.5, *result.logprobs[2:])
    with same_sums():
        report = replay(
            llm,
            [
                replace(plain, results=(replace(result, tokens=tokens),)),
                replace(plain, results=(replace(result, logprobs=logprobs),)),
                replace(scored, plan=replace(scored.plan, edits=())),
                replace(captured, prompt=(*captured.prompt[:2], 4)),
            ],
        )
    by_request = [[d for d in report.differences if d.request == n] for n in range(4)]
    length = len(plain.prompt)
    ((first,), (second,)) = by_request[:2]
    assert (first.what, first.position) == ("tokens", length + 4)
    assert (first.recorded, first.replayed) == (str(other), str(result.tokens[4]))
    assert (second.what, second.position) == ("logprobs", length + 1)
    assert second.amount == pytest.approx(0.5)
    score = next(d for d in by_request[2] if d.what == "scores p")
    assert score.position == 0
    assert score.amount > 0
    assert f"scores p at position 0: {score.recorded} was" in str(score)
    rows = next(d for d in by_request[3] if d.what == "rows resid_post.2")
    assert (rows.position, rows.amount) == (2, None)
    assert "4 differ" in str(report)


def test_what_follows_from_another_token_is_not_reported_again(llm, path):
    record = read_records(path)[list(KINDS).index("captured") * len(PROMPTS)]
    (result,) = record.results
    other = (result.tokens[3] + 1) % tiny.VOCAB
    wrong = replace(result, tokens=(*result.tokens[:3], other, *result.tokens[4:]))
    rows = {
        name: replace(rows, digests=(*rows.digests[: len(record.prompt) + 3], *["0"] * 4))
        for name, rows in wrong.rows.items()
    }
    with same_sums():
        report = replay(llm, [replace(record, results=(replace(wrong, rows=rows),))])
    assert [d.what for d in report.differences] == ["tokens"]


@pytest.mark.parametrize("field", ["vllm", "torch", "model", "dtype", "quantization", "device"])
def test_an_engine_that_differs_is_refused_by_field_and_value(llm, path, field):
    records = read_records(path)
    record = replace(records[0], engine={**records[0].engine, field: "another"})
    with pytest.raises(SpecError, match=rf"engine\.{field}: .*'?another'?, this engine has"):
        replay(llm, [record])
    with same_sums():
        assert replay(llm, [record], anyway=True).differences == ()


def test_a_request_that_cannot_run_again_alike_is_refused_before_it_runs(llm, tmp_path):
    recorder = Recorder(llm, tmp_path / "none.jsonl")
    prompt = [{"prompt_token_ids": [5, 6]}]
    for params, asked, said in (
        (SamplingParams(temperature=1), {}, r"sampling_params\.seed: expected a seed"),
        (SamplingParams(temperature=0, prompt_logprobs=1), {}, "prompt_logprobs: is not recorded"),
        (greedy(2), {"capture": Norms("all")}, r"capture\[0\]: expected a `Capture`"),
        (greedy(2), {"capture": Capture([0], reuse=True)}, r"capture\[0\]\.reuse: expected False"),
    ):
        with pytest.raises(SpecError, match=said):
            recorder.generate(prompt, params, **asked)
    llm.steering.set(base=Steer(ROWS[0], 1))
    with pytest.raises(SpecError, match="steering: server-wide edits are not recorded"):
        recorder.generate(prompt, greedy(2))
    assert not (tmp_path / "none.jsonl").exists()


def test_names_of_vectors_are_recorded_as_the_vectors_that_they_were(llm, tmp_path):
    llm.vectors.register("n", ROWS[0])
    with same_sums():
        Recorder(llm, tmp_path / "r.jsonl").generate(
            [{"prompt_token_ids": PROMPTS[0]}], greedy(4), edits=Steer("n", 1, scale=4.0)
        )
        llm.vectors.remove("n")
        assert replay(llm, read_records(tmp_path / "r.jsonl")).differences == ()


def test_a_damaged_record_is_refused_by_line_and_field(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    scored = lines[list(KINDS).index("scored") * len(PROMPTS)]
    for changes, said in (
        ({"format": "x"}, "line 1.*format: expected midstream-record-1"),
        ({"settings__trust_remote_code": True}, r"settings.*trust_remote_code"),
        ({"settings__midstream__controllers": {"c": "os:system"}}, r"settings.*controllers"),
        ({"request__prompt_token_ids": [-1]}, "request.prompt_token_ids"),
        ({"results__0__logprobs": []}, r"results\[0\].*logprobs: expected a list of 8"),
        ({"results__0__scores__p__f32": "AAAA"}, r"scores\.p.*f32: expected float32"),
        ({"results__0__scores__p__sha256": "0"}, r"scores\.p.*sha256: expected"),
    ):
        path.write_text(json.dumps(changed(scored, **changes)) + "\n")
        with pytest.raises(SpecError, match=said):
            read_records(path)
    path.write_text("")
    with pytest.raises(SpecError, match="it has no requests"):
        read_records(path)


@pytest.fixture(scope="module")
def always(tiny_llama: Path) -> Iterator[Any]:
    """An engine each of whose steps runs the tapped model."""
    settings = {"tapped_model": "always"}
    with engine(
        tiny_llama, midstream=settings, max_num_batched_tokens=64, block_size=32,
        enable_prefix_caching=True,
    ) as found:  # fmt: skip
        yield found


def bits(outputs: list[Any]) -> list[Any]:
    return [
        [(token, step[token].logprob) for token, step in zip(c.token_ids, c.logprobs, strict=True)]
        for output in outputs
        for c in output.outputs
    ]


def test_with_one_model_and_batch_invariance_tokens_and_logprobs_are_the_same_bits_when_watched(
    always,
):
    params = greedy(16, logprobs=0)
    everything = Capture("all", sites=["resid_post"])
    probe = Probe(ROWS[1], layer=2, name="p")
    with same_sums():
        plain = ask_all(always, PROMPTS, params)
        watched = ask_all(always, PROMPTS, params, capture=everything, probes=probe)
        # Others of the batch are edited.
        edits = [None if n % 2 else [Steer(9 * ROWS[0], 1)] for n in range(len(PROMPTS) * 2)]
        mixed = ask_all(
            always, [prompt for prompt in PROMPTS for _ in range(2)], params,
            edits=edits, capture=[None, everything] * len(PROMPTS),
        )  # fmt: skip
    assert bits(watched) == bits(plain)
    assert bits(mixed[1::2]) == bits(plain)
    assert all(edited != own for edited, own in zip(bits(mixed[::2]), bits(plain), strict=True))
    assert torch.equal(mixed[1].activations["resid_post"], watched[0].activations["resid_post"])


def test_a_store_of_a_job_is_replayed_with_the_amount_by_which_rows_differ(llm, tmp_path):
    store = tmp_path / "acts"
    job = Job(
        model="tiny", data="-", out=str(store), record=True, max_tokens=4,
        capture=Capture([0, 2], positions=["last_prompt", "generated"]),
    )  # fmt: skip
    found = VllmEngine(llm, job)
    writer = StoreWriter(job, found.origin)
    with same_sums():
        for line, prompt in enumerate(PROMPTS, 1):
            found.add(Record(line, PromptTokens(tuple(prompt))))
        replies = []
        while len(replies) < len(PROMPTS):
            replies += found.step()
        for reply in replies:
            writer.put(f"{reply.line:09d}-{'0' * 16}", reply)
        writer.close()
        replies.clear()
        records = read_records(store)
        report = replay(llm, records, mix=2)
        assert report.differences == ()
        assert (report.requests, report.rows) == (len(PROMPTS), len(PROMPTS) * 2 * 4)
        # Rows of another request stand for rows that differ.
        (result,) = records[0].results
        rows = {
            name: replace(part, digests=("0", *part.digests[1:]))
            for name, part in result.rows.items()
        }
        other = replace(
            records[0],
            stored=lambda: Activations(
                {tap: part + 0.25 for tap, part in records[0].stored().items()},
                dict.fromkeys(records[0].stored(), records[0].stored().positions),
                [*records[0].prompt, *result.tokens],
            ),
        )
        wrong = replace(other, results=(replace(result, rows=rows),))
        differences = replay(llm, [wrong]).differences
    assert [d.what for d in differences] == ["rows resid_post.0", "rows resid_post.2"]
    assert {d.position for d in differences} == {len(records[0].prompt) - 1}
    assert [d.amount for d in differences] == pytest.approx([0.25, 0.25], rel=1e-4)


def test_the_command_starts_the_recorded_engine_and_its_status_is_whether_bits_differ(
    llm, path, monkeypatch, tmp_path
):
    started = []
    monkeypatch.setattr(
        midstream, "LLM", lambda model, **settings: started.append((model, settings)) or llm
    )
    monkeypatch.setenv("COLUMNS", "200")
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:3]) + "\n")
    report = tmp_path / "report.json"
    with same_sums():
        done = CliRunner().invoke(app, ["replay", str(path), "--mix", "2", "--report", str(report)])
    assert done.exit_code == 0, done.output
    assert "3 requests with 24 tokens, 0 scores and 0 rows: 0 differ" in done.output
    assert json.loads(report.read_text())["differences"] == []
    ((model, settings),) = started
    assert model == llm.llm_engine.vllm_config.model_config.model
    assert (settings["dtype"], settings["enforce_eager"]) == ("float32", True)
    assert settings["midstream"]["sites"] == ["resid_pre", "resid_mid", "resid_post"]
    wrong = changed(json.loads(lines[0]), results__0__logprobs__1=-0.5)
    path.write_text(json.dumps(wrong) + "\n")
    with same_sums():
        done = CliRunner().invoke(app, ["replay", str(path), "--json"])
    assert done.exit_code == 1, done.output
    assert json.loads(done.output)["differences"][0]["what"] == "logprobs"
    path.write_text(json.dumps(changed(wrong, engine__vllm="0.1")) + "\n")
    done = CliRunner().invoke(app, ["replay", str(path)])
    assert done.exit_code == 2
    assert "engine.vllm: the requests were recorded with" in done.output
    assert "--anyway" in done.output
