"""`jobs.ray.capture_dataset`: a step of a pipeline, with engines that compute nothing."""

import functools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
from lab.jobs.fakes import HIDDEN, LAYERS, FakeEngine, job, tokens_of, vector, write_lines
from support.on_ray import start_ray
from support.pages import blocks

import midstream.lab.jobs.ray
from midstream import Capture
from midstream.errors import SpecError
from midstream.lab.jobs.engine import Reply
from midstream.lab.jobs.ray import Placement, RayCaptureRun, capture_dataset
from midstream.lab.jobs.ray.engine_thread import EngineThread
from midstream.lab.jobs.records import Failed, Record
from midstream.lab.jobs.request_ids import Identity

CAPTURE = Capture(LAYERS, positions="last_prompt")


@pytest.fixture(scope="module")
def cluster(actors_find_the_tests: None) -> Iterator[None]:
    # Ray's processes have the environment that this one has now.
    start_ray()
    yield
    ray.shutdown()


def test_columns_are_added_to_those_of_the_input(cluster, tmp_path):
    texts = [f"prompt {number}" for number in range(40)]
    texts[7], texts[9] = "much too long", "it breaks"
    ds = ray.data.from_items([{"text": text, "n": n} for n, text in enumerate(texts)])
    asked = {"engine_args": {"max_num_seqs": 4}, "batch_size": 8, "start": FakeEngine}
    found = capture_dataset(ds, "some/model", CAPTURE, **asked)
    rows = {row["n"]: row for row in found.take_all()}
    assert sorted(rows) == list(range(40))
    identity = Identity(job(tmp_path, capture=CAPTURE, engine_args={"max_num_seqs": 4}))
    for number, text in enumerate(texts):
        row = rows[number]
        assert row["text"] == text
        assert row["id"] == f"{identity.digest(Record(1, text)):016x}"
        if number in (7, 9):
            reason = {7: "the prompt is too long", 9: "edits were not applied"}[number]
            assert row["error"] == reason
            assert row["resid_post.0"].shape == (0, HIDDEN)
            assert row["positions"].shape == row["prompt_token_ids"].shape == (0,)
            continue
        assert row["error"] == ""
        tokens = tokens_of(text)
        place = len(tokens) - 1
        assert row["prompt_token_ids"].tolist() == tokens
        assert row["generated_token_ids"].tolist() == [5]
        assert row["positions"].tolist() == [place]
        assert row["token_ids"].tolist() == [tokens[place]]
        for layer in LAYERS:
            expected = vector(tokens[place], place, layer).numpy()[None]
            assert row[f"resid_post.{layer}"].dtype == np.float32
            np.testing.assert_array_equal(row[f"resid_post.{layer}"], expected)


def test_what_the_page_shows_runs(cluster, tmp_path, monkeypatch, capsys):
    lines = [{"text": f"prompt {number}"} for number in range(3)]
    write_lines(tmp_path, lines)
    monkeypatch.chdir(tmp_path)
    capture = functools.partial(capture_dataset, start=FakeEngine)
    monkeypatch.setattr(midstream.lab.jobs.ray, "capture_dataset", capture)
    work = RayCaptureRun.work
    monkeypatch.setattr(RayCaptureRun, "work", lambda self: work(self, FakeEngine))
    texts = (text for _, _, text in blocks("docs/dataset-capture.md", ["py"]))
    spreading, pipeline = (text for text in texts if "midstream.lab.jobs.ray" in text)
    values: dict[str, Any] = {}
    exec(spreading.replace("Capture(20)", "Capture([0, 2])"), values)
    assert values["summary"].counts.stored == 3
    pipeline = pipeline.replace("[10, 20]", "[0, 2]").replace("resid_post.20", "resid_post.2")
    # The cluster's processes are in the folder where it was started.
    exec(pipeline.replace("prompts.jsonl", str(tmp_path / "prompts.jsonl")), {})
    shown = sorted(line for line in capsys.readouterr().out.splitlines() if "prompt" in line)
    assert shown == [f"prompt {number} (1, {HIDDEN}) " for number in range(3)]


def test_what_is_wrong_with_the_input_is_said_by_name(cluster):
    ds = ray.data.from_items([{"prompt": "a"}])
    with pytest.raises(SpecError, match="batch_size: expected at least 1"):
        capture_dataset(ds, "some/model", CAPTURE, batch_size=0)
    with pytest.raises(SpecError, match=r"ray\.engines: expected at most 2"):
        capture_dataset(ds, "some/model", CAPTURE, spread=Placement(engines=3))
    with pytest.raises(Exception, match="the dataset has no column 'text'; it has prompt"):
        capture_dataset(ds, "some/model", CAPTURE, start=FakeEngine).take_all()


class Breaking(FakeEngine):
    """Breaks when it is let."""

    go = threading.Event()

    def step(self):
        if self.go.is_set():
            raise RuntimeError("the engine is dead")
        return super().step()


def test_calls_share_the_engine_and_each_gets_its_own_in_order(tmp_path):
    engines = []

    def start(asked):
        engines.append(FakeEngine(asked, window=5))
        return engines[0]

    collector = EngineThread(job(tmp_path), start)
    calls = [
        [f"call {n} prompt {i}" if i != 3 else Failed(0, "no prompt") for i in range(6)]
        for n in range(9)
    ]
    told = [collector.submit(prompts) for prompts in calls]
    for prompts, each in zip(calls, told, strict=True):
        for prompt, reply in zip(prompts, each.result(timeout=20), strict=True):
            if isinstance(prompt, Failed):
                assert reply == prompt
            else:
                assert isinstance(reply, Reply)
                assert list(reply.prompt_token_ids) == tokens_of(prompt)
    assert engines[0].most == 5
    assert collector.submit([]).result(timeout=20) == []


def test_all_calls_are_told_of_an_engine_that_breaks(tmp_path):
    Breaking.go.clear()
    collector = EngineThread(job(tmp_path), Breaking)
    assert len(collector.submit(["a", "b"]).result(timeout=20)) == 2
    Breaking.go.set()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the engine is dead"):
            collector.submit(["c"]).result(timeout=20)
