"""A dataset capture against an engine that computes nothing: what is stored, and what is not."""

import dataclasses
import fcntl
import json
import multiprocessing
import os
import threading
from pathlib import Path

import pytest
import torch
from lab.jobs.checking import check_rows, lines_in
from lab.jobs.fakes import LAYERS, WIDE_ORIGIN, FakeEngine, job, prompts, vector, write_lines

from midstream import open_store
from midstream.errors import SpecError, StoreError
from midstream.lab.jobs import CaptureRun, capture_dataset
from midstream.plan import Capture


class Seen:
    """What a job tells."""

    def __init__(self):
        self.reasons = {}
        self.done = []

    def moved(self, counts):
        self.done.append(counts.done)

    def failed(self, failed):
        self.reasons[failed.line] = failed.reason


def test_every_line_is_stored_once_with_its_own_rows(tmp_path):
    write_lines(tmp_path, prompts(100))
    seen = Seen()
    summary = capture_dataset(job(tmp_path), FakeEngine, seen)
    assert (summary.status, summary.interrupted, summary.errors) == (0, False, None)
    counts = summary.counts
    assert (counts.total, counts.captured, counts.stored, counts.failed) == (100, 100, 100, 0)
    assert (counts.rows, counts.nbytes) == (200, 200 * 32)
    assert seen.done == sorted(seen.done)
    assert seen.done[-1] == 100
    check_rows(tmp_path / "acts", {n + 1: each["text"] for n, each in enumerate(prompts(100))})
    assert not (tmp_path / "acts" / "errors.jsonl").exists()


def stopping(stop, at=0, **options):
    """Starts an engine that sets an event when it has had so many lines."""

    def start(job):
        engine = FakeEngine(job, **options)
        engine.stops, engine.stops_at = stop, at
        return engine

    return start


class WideEngine(FakeEngine):
    origin = WIDE_ORIGIN


@pytest.mark.parametrize(("codec", "nbytes"), [("raw", 4 * 8 + 4 * 12), ("full8", 16 + 20)])
def test_layers_of_two_widths_are_stored_and_counted(tmp_path, codec, nbytes):
    write_lines(tmp_path, prompts(3))
    capture = Capture(LAYERS, positions="last_prompt", codec=codec)
    summary = capture_dataset(job(tmp_path, capture=capture), WideEngine)
    assert (summary.counts.rows, summary.counts.nbytes) == (6, 3 * nbytes)
    for each in open_store(tmp_path / "acts").requests:
        found = each.activations()
        (place,) = found.positions.tolist()
        (token,) = found.token_ids.tolist()
        for layer, width in zip(LAYERS, (8, 12), strict=True):
            expected = vector(token, place, layer, width)
            error = (found["resid_post", layer][0] - expected).abs().max()
            assert error <= (0.5 * 11 / 8 / 255 + 1e-3 if codec == "full8" else 0)


def test_lines_are_read_as_the_engine_takes_them(tmp_path):
    """A data set need not fit in memory, nor have an end."""
    read = 0

    class Endless:
        can_be_read_again = False

        def count(self):
            return None

        def __iter__(self):
            nonlocal read
            from midstream.lab.jobs.records import Record

            while True:
                read += 1
                yield Record(read, f"prompt {read}")

    write_lines(tmp_path, [{"text": "of the file, which is not read"}])
    stop = threading.Event()
    start = stopping(stop, 50, window=5)

    with CaptureRun(job(tmp_path)) as capturing:
        capturing._source = Endless()
        summary = capturing.work(start, stop=stop)
    assert summary.interrupted
    assert summary.counts.captured <= read <= summary.counts.captured + 6
    assert summary.counts.stored == summary.counts.captured > 30


def test_a_request_is_stored_with_its_line_plan_receipt_tag_and_terms(tmp_path):
    write_lines(tmp_path, prompts(3))
    asked = job(tmp_path, tag="pile", capture=Capture(LAYERS, codec="full8"), engine_args={"a": 1})
    capture_dataset(asked, FakeEngine)
    store = open_store(tmp_path / "acts")
    assert store.codecs == ("full8",)
    one = store.find(lines_in(tmp_path / "acts")[2])
    assert one.tag == "pile"
    metadata = one.metadata
    assert metadata["line"] == 2
    assert metadata["terms"]["engine_args"] == {"a": 1}
    assert metadata["terms"]["layers"] == list(LAYERS)
    own = metadata["midstream"]
    assert own["receipt"]["status"] == "ok"
    assert own["plan"]["capture"][0]["codec"] == "full8"
    assert own["finish_reason"] == "length"
    assert "prompt" not in own
    shard = store.shards[0]
    assert (shard.header.model, shard.header.vllm) == ("some/model", "0.32.0")


def test_texts_are_kept_only_where_that_was_asked_for(tmp_path):
    write_lines(tmp_path, prompts(1))
    out = tmp_path / "a" / "b" / "acts"  # made with those above it
    capture_dataset(job(tmp_path, keep_prompts=True, out=str(out)), FakeEngine)
    (one,) = open_store(out).requests
    assert one.metadata["midstream"]["prompt"] == "prompt 0"
    assert one.metadata["midstream"]["text"] == "an answer"


def test_lines_that_fail_are_named_counted_and_leave_the_others_alone(tmp_path):
    lines = [
        {"text": "fine"},
        b"no json",
        {"prompt": "elsewhere"},
        {"text": "much too long"},
        b"",
        {"text": "it breaks"},
        "a string",
        {"text": 7},
        b'{"text": "\xff"}',
        {"text": "\ud800"},
    ]
    write_lines(tmp_path, lines)
    seen = Seen()
    summary = capture_dataset(job(tmp_path), FakeEngine, seen)
    assert summary.status == 1
    assert not summary.interrupted
    assert (summary.counts.total, summary.counts.captured, summary.counts.failed) == (9, 2, 7)
    check_rows(tmp_path / "acts", {1: "fine", 7: "a string"})
    wanted = {
        2: "expected JSON",
        3: "the field 'text' is missing; found `prompt`",
        4: "the prompt is too long",
        6: "edits were not applied",
        8: "text: expected the prompt's text, `str`, got `int`",
        9: "expected JSON: 'utf-8'",
        10: "unpaired surrogate",
    }
    assert set(seen.reasons) == set(wanted)
    assert all(wanted[line] in reason for line, reason in seen.reasons.items())
    written = [json.loads(line) for line in Path(summary.errors).read_text().splitlines()]
    assert {each["line"]: each["reason"] for each in written} == seen.reasons


def test_lines_that_failed_are_tried_again_and_listed_anew(tmp_path):
    write_lines(tmp_path, [{"text": "it breaks"}, {"text": "fine"}])
    first = capture_dataset(job(tmp_path), FakeEngine)
    assert first.counts.failed == 1
    path = tmp_path / "acts" / "errors.jsonl"
    path.write_text('{"line": 2, "reason": "of an older job"}\n')
    again = capture_dataset(job(tmp_path, resume=True), FakeEngine)
    assert (again.counts.skipped, again.counts.failed, again.status) == (1, 1, 1)
    assert [json.loads(line)["line"] for line in path.read_text().splitlines()] == [1]
    write_lines(tmp_path, [{"text": "well"}, {"text": "fine"}])
    last = capture_dataset(job(tmp_path, resume=True), FakeEngine)
    assert (last.status, last.errors) == (0, None)
    assert not path.exists()


def test_the_list_of_failures_may_be_elsewhere_and_is_refused_where_it_cannot_be(tmp_path):
    write_lines(tmp_path, [b"?", {"text": "well"}])
    elsewhere = tmp_path / "failures.jsonl"
    summary = capture_dataset(job(tmp_path, errors=str(elsewhere)), FakeEngine)
    assert summary.errors == str(elsewhere)
    assert elsewhere.read_text().count("\n") == 1
    with pytest.raises(SpecError, match="errors: cannot write"):
        capture_dataset(job(tmp_path, out=str(tmp_path / "b"), errors="/nowhere/e"), FakeEngine)


def test_what_is_no_list_of_failures_is_never_replaced_by_one(tmp_path):
    data = write_lines(tmp_path, [b"?", {"text": "well"}])
    (tmp_path / "link").symlink_to("/dev/null")
    os.mkfifo(tmp_path / "pipe")
    files = {
        "text": b'{"text": "a prompt"}\n',
        "zero": b"\0",
        "line": b'{"line": 1, "text": "a"}\n',
    }
    for name, there in files.items():
        (tmp_path / name).write_bytes(there)
    for name in (data.name, "link", "pipe", *files):
        with pytest.raises(SpecError, match=f"errors: .*{name} .*is not a list of failed lines"):
            capture_dataset(job(tmp_path, errors=str(tmp_path / name)), FakeEngine)
        assert os.path.lexists(tmp_path / name)
    assert {name: (tmp_path / name).read_bytes() for name in files} == files


@pytest.mark.parametrize("length", [0, 1, 8, 9, 12, 18, 20, 28, 31, 32, 40])
def test_a_list_of_failures_that_was_cut_short_by_a_kill_is_replaced(tmp_path, length):
    write_lines(tmp_path, [b"?", {"text": "well"}])
    path = tmp_path / "failures.jsonl"
    path.write_bytes(b'{"line": 123456789, "reason": "expected JSON"}\n'[:length])
    summary = capture_dataset(job(tmp_path, errors=str(path)), FakeEngine)
    assert summary.counts.failed == 1
    assert json.loads(path.read_text())["line"] == 1


def test_failures_that_cannot_be_listed_end_the_job_and_name_the_file(tmp_path, monkeypatch):
    write_lines(tmp_path, [*prompts(20), b"?"])
    asked = job(tmp_path, errors="/dev/full")
    monkeypatch.setattr("midstream.lab.jobs.failed_lines._is_list", lambda path: True)
    monkeypatch.setattr("midstream.lab.jobs.failed_lines.os.unlink", lambda path: None)
    with pytest.raises(StoreError, match="/dev/full: No space left on device"):
        capture_dataset(asked, FakeEngine)
    # The engine had not ended all of them: these are what came of it.
    assert lines_in(tmp_path / "acts").keys() < set(range(1, 21))


def test_a_job_that_was_stopped_goes_on_where_it_was(tmp_path):
    write_lines(tmp_path, prompts(100))
    stop = threading.Event()
    start = stopping(stop, 40)

    first = capture_dataset(job(tmp_path), start, stop=stop)
    assert first.interrupted
    assert first.status == 1
    assert 20 < first.counts.stored == first.counts.captured < 48
    ids = lines_in(tmp_path / "acts")
    second = capture_dataset(job(tmp_path, resume=True), FakeEngine)
    assert (second.status, second.counts.skipped) == (0, first.counts.stored)
    assert second.counts.skipped + second.counts.captured == 100
    check_rows(tmp_path / "acts", {n + 1: each["text"] for n, each in enumerate(prompts(100))})
    assert ids.items() <= lines_in(tmp_path / "acts").items()
    third = capture_dataset(job(tmp_path, resume=True), FakeEngine)
    assert (third.counts.skipped, third.counts.captured) == (100, 0)


def test_what_had_come_is_stored_when_the_engine_breaks(tmp_path):
    write_lines(tmp_path, [*prompts(30), {"text": "it dies"}, *prompts(10)])
    with CaptureRun(job(tmp_path, flush_seconds=60)) as capturing:
        with pytest.raises(RuntimeError, match="the engine is dead"):
            capturing.work(FakeEngine)
        summary = capturing.summary
    assert summary.interrupted
    assert summary.counts.stored == summary.counts.captured == len(lines_in(tmp_path / "acts")) > 0
    lines = [*prompts(30), {"text": "no more"}, *prompts(10)]
    write_lines(tmp_path, lines)
    capture_dataset(job(tmp_path, resume=True), FakeEngine)
    check_rows(tmp_path / "acts", {n + 1: each["text"] for n, each in enumerate(lines)})


def test_an_error_while_it_stops_is_that_of_an_engine_that_was_stopped_as_well(tmp_path):
    write_lines(tmp_path, [*prompts(10), {"text": "it dies"}])
    stop = threading.Event()
    start = stopping(stop, window=20, seed=3)

    summary = capture_dataset(job(tmp_path), start, stop=stop)
    assert summary.interrupted


def test_rows_that_cannot_be_written_are_an_error_while_it_stops_as_well(tmp_path, monkeypatch):
    write_lines(tmp_path, prompts(10))
    stop = threading.Event()

    def check(keeper):
        if stop.is_set():
            raise StoreError("the disk is full")

    start = stopping(stop, window=20)

    monkeypatch.setattr("midstream.lab.jobs.store_writer.StoreWriter.check", check)
    monkeypatch.setattr("midstream.lab.jobs.store_writer.StoreWriter.close", lambda keeper: None)
    with pytest.raises(StoreError, match="the disk is full"):
        capture_dataset(job(tmp_path), start, stop=stop)


def test_a_directory_that_is_not_empty_is_refused_without_resume(tmp_path):
    write_lines(tmp_path, prompts(3))
    (tmp_path / "acts").mkdir()
    (tmp_path / "acts" / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match="not empty, it contains notes.txt; .*--resume"):
        capture_dataset(job(tmp_path), FakeEngine)


def test_what_a_job_leaves_that_never_wrote_does_not_keep_the_next_from_beginning(tmp_path):
    write_lines(tmp_path, prompts(3))

    def fails(job):
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        capture_dataset(job(tmp_path), fails)
    assert capture_dataset(job(tmp_path), FakeEngine).counts.stored == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"capture": Capture(0, positions="last_prompt")}, "layers [0, 2], but this job has [0]"),
        ({"capture": Capture(LAYERS, positions="prompt")}, 'positions ["last_prompt"]'),
        ({"capture": Capture(LAYERS, positions="last_prompt", codec="full8")}, 'codec "raw"'),
        ({"model": "another"}, 'model "some/model"'),
        ({"revision": "v2"}, 'revision ""'),
        ({"dtype": "float16"}, 'dtype "auto"'),
        ({"max_tokens": 2}, "max_tokens 1, but this job has 2"),
        ({"tag": "x"}, 'tag ""'),
        ({"chat": True, "prompt_field": "text"}, "chat false"),
        ({"engine_args": {"quantization": "fp8"}}, "engine_args {}"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_terms_are_refused_by_name(tmp_path, changes, said):
    write_lines(tmp_path, prompts(3))
    capture_dataset(job(tmp_path), FakeEngine)
    with pytest.raises(StoreError, match="it was captured with") as error:
        capture_dataset(job(tmp_path, resume=True, **changes), FakeEngine)
    assert said in str(error.value)


def test_how_fast_rows_come_may_change_between_jobs(tmp_path):
    write_lines(tmp_path, prompts(3))
    capture_dataset(job(tmp_path, engine_args={"max_num_seqs": 4}), FakeEngine)
    changed = job(
        tmp_path, resume=True, limit=2, keep_prompts=True, engine_args={"tensor_parallel_size": 2}
    )
    assert changed.terms == job(tmp_path).terms
    write_lines(tmp_path, prompts(5))
    again = job(tmp_path, resume=True, flush_seconds=9)
    assert capture_dataset(again, FakeEngine).counts.captured == 2


def test_other_data_is_refused_before_an_engine_is_started(tmp_path):
    write_lines(tmp_path, prompts(20))
    capture_dataset(job(tmp_path), FakeEngine)
    changed = prompts(20)
    changed[17] = {"text": "another"}
    write_lines(tmp_path, changed)
    with pytest.raises(StoreError, match="line 18 was captured with another prompt"):
        CaptureRun(job(tmp_path, resume=True))
    write_lines(tmp_path, prompts(12))
    with pytest.raises(StoreError, match="8 stored lines are not in this data"):
        CaptureRun(job(tmp_path, resume=True))


def test_a_store_of_something_else_is_refused(tmp_path):
    from unit.store.making import entry, write

    write(tmp_path / "acts", [entry("req-1")])
    write_lines(tmp_path, prompts(3))
    with pytest.raises(StoreError, match="'req-1' is not a line of a dataset capture"):
        CaptureRun(job(tmp_path, resume=True))


def test_only_one_job_at_a_time_captures_into_a_directory(tmp_path):
    write_lines(tmp_path, prompts(3))
    context = multiprocessing.get_context("fork")
    hear, tell = context.Pipe(duplex=False)
    with CaptureRun(job(tmp_path)):
        # Locks are a process's, so another one must try.
        def attempt():
            try:
                CaptureRun(job(tmp_path, resume=True))
            except StoreError as error:
                tell.send(str(error))

        other = context.Process(target=attempt)
        other.start()
        other.join()
    assert hear.poll(), "it was not refused"
    assert "another job is capturing into it" in hear.recv()


def test_a_process_that_was_forked_off_does_not_keep_the_directory(tmp_path):
    """As an engine's may outlive the process that was killed."""
    write_lines(tmp_path, prompts(3))
    root = tmp_path / "acts"
    root.mkdir()
    context = multiprocessing.get_context("fork")
    hear, tell = context.Pipe(duplex=False)

    def take_and_die():
        with CaptureRun(job(tmp_path)):  # a run that nothing refers to would end here
            child = os.fork()
            if not child:
                threading.Event().wait(30)
                os._exit(0)
            tell.send(child)
            os._exit(0)

    taker = context.Process(target=take_and_die)
    taker.start()
    taker.join()
    assert hear.poll(), "it ended before it forked"
    child = hear.recv()
    try:
        with open(root / ".capture.lock", "r+") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(child, 9)


def test_rows_that_do_not_exist_are_a_line_that_is_done(tmp_path):
    """An answer may end at once: nothing was generated, and there is nothing to try again."""
    write_lines(tmp_path, prompts(1))

    class Short(FakeEngine):
        def _end(self, record):
            reply = super()._end(record)
            found = reply.activations
            rows = {
                tap: dataclasses.replace(found.held.rows(tap), chunks=(), places=())
                for tap in found
            }
            nowhere = dict.fromkeys(rows, torch.zeros(0, dtype=torch.int64))
            activations = type(reply.activations)(rows, nowhere, torch.zeros(0, dtype=torch.int64))
            return dataclasses.replace(reply, activations=activations)

    assert capture_dataset(job(tmp_path), Short).counts.rows == 0
    assert capture_dataset(job(tmp_path, resume=True), Short).counts.skipped == 1
