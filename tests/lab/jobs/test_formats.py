"""The same prompts in every format of data are the same prompts of a job."""

import csv
import io
import json
import os
import sys
import types

import pytest
from lab.jobs.fakes import FakeEngine, job, prompts, write_lines

from midstream import open_store
from midstream.errors import SpecError
from midstream.lab.jobs import capture_dataset
from midstream.lab.jobs import prompts as prompts_module
from midstream.lab.jobs.prompts import open_prompts
from midstream.lab.jobs.records import Failed, Record
from midstream.lab.jobs.sources import open_source

TEXTS = ["one, two", 'the "other"', "é 😀"]
MARK = "\ufeff"


def table(delimiter):
    file = io.StringIO(newline="")
    csv.writer(file, delimiter=delimiter).writerows([("id", "text"), *enumerate(TEXTS)])
    return file.getvalue()


OBJECTS = [{"text": text, "id": 7} for text in TEXTS]
FILES = {
    "a.jsonl": "".join(json.dumps(line) + "\r\n" for line in OBJECTS),
    "a.ndjson": "".join(json.dumps(text) + "\n" for text in TEXTS),
    "compact.json": json.dumps(OBJECTS),
    "lines.json": "[" + ",\n".join(map(json.dumps, OBJECTS)) + "]\n",
    "indented.json": json.dumps(OBJECTS, indent=2, ensure_ascii=False),
    "array.jsonl": json.dumps(TEXTS),
    "a.txt": "\n".join(TEXTS),
    "A.TXT": "\r\n".join([*TEXTS, ""]),
    "a.csv": table(","),
    "a.tsv": table("\t"),
}


def texts_of(source):
    rows = list(source)
    assert all(isinstance(row, Record) for row in rows), rows
    numbers = [row.line for row in rows]
    assert numbers == sorted(set(numbers))
    return [row.prompt for row in rows]


@pytest.mark.parametrize("mark", ["", MARK])
@pytest.mark.parametrize("name", FILES)
def test_every_file_has_its_prompts_with_and_without_a_byte_order_mark(tmp_path, name, mark):
    path = tmp_path / name
    path.write_bytes((mark + FILES[name]).encode())
    source = open_source(job(tmp_path, data=str(path)))
    assert texts_of(source) == TEXTS
    assert list(source) == list(source)
    assert source.count() == len(TEXTS)


@pytest.mark.parametrize("mark", ["", MARK])
@pytest.mark.parametrize(
    ("name", "format"),
    [("indented.json", ""), ("a.jsonl", "jsonl"), ("a.txt", "text"), ("a.csv", "csv")],
)
def test_so_has_the_standard_input(tmp_path, monkeypatch, name, format, mark):
    data = io.BytesIO((mark + FILES[name]).encode())
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=data))
    source, check = open_prompts(job(tmp_path, data="-", format=format))
    assert check is None
    assert texts_of(source) == TEXTS


@pytest.mark.parametrize("mark", ["", MARK])
@pytest.mark.parametrize("name", ["a.jsonl", "compact.json", "a.txt", "a.csv"])
def test_so_has_a_folder_of_files_of_a_data_set(tmp_path, name, mark):
    pytest.importorskip("datasets")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / name).write_bytes((mark + FILES[name]).encode())
    source = open_source(job(tmp_path, data=str(folder)))
    assert texts_of(source) == TEXTS
    with pytest.raises(SpecError, match="prompt_field: .* has no column 'txt'.*it has .*text"):
        open_source(job(tmp_path, data=str(folder), prompt_field="txt"))


def test_so_has_a_data_set_that_was_saved(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(OBJECTS)
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows.select([0]), "dev": rows}).save_to_disk(tmp_path / "two")
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    source = open_source(job(tmp_path, data=one))
    assert (texts_of(source), source.count()) == (TEXTS, 3)
    assert texts_of(open_source(job(tmp_path, data=two))) == TEXTS[:1]
    assert texts_of(open_source(job(tmp_path, data=two, split="dev"))) == TEXTS
    for data, fields, path in (
        (two, {"split": "test"}, "split"),
        (one, {"split": "dev"}, "split"),
        (one, {"subset": "en"}, "subset"),
        (one, {"prompt_field": "txt"}, "prompt_field"),
        (one, {"format": "csv"}, "format"),
    ):
        with pytest.raises(SpecError) as error:
            open_source(job(tmp_path, data=data, **fields))
        assert error.value.path == path


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_a_column_that_is_missing_or_there_twice_is_named_before_an_engine_starts(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(FILES[name].encode())
    with pytest.raises(SpecError, match="no column 'body'; it has id, text"):
        open_prompts(job(tmp_path, data=str(path), prompt_field="body"))
    path.write_bytes(b"text\ttext\na\tb\n" if name == "a.tsv" else b"text,text\na,b\n")
    with pytest.raises(SpecError, match="has 2 columns 'text'"):
        open_prompts(job(tmp_path, data=str(path)))


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.jsonl", b"", "a.jsonl: it has no lines"),
        ("a.json", b"[]", "it has no lines"),
        ("a.txt", b"\n \n", "it has no lines"),
        ("a.csv", b"text\n", "it has no lines"),
        ("a.jsonl", b"plain\ntext\n", "no prompt in the first 2 lines; line 1: expected JSON"),
        ("a.txt", b"\xff\n\xfe\n", "line 1: expected UTF-8: invalid start byte"),
        ("a.csv", b"text,id\na\n", "line 2: expected 2 values, as the header, got 1"),
        ("a.json", b'[{"t": 1}]', "line 1: the field 'text' is missing; found `t`"),
    ],
)
def test_data_without_a_prompt_are_refused_before_an_engine_starts(tmp_path, name, data, words):
    (tmp_path / name).write_bytes(data)

    def start(job):
        raise AssertionError("it was started")

    with pytest.raises(SpecError, match="data: ") as error:
        capture_dataset(job(tmp_path, data=str(tmp_path / name)), start)
    assert words in str(error.value)
    assert not (tmp_path / "acts").exists()


def test_what_the_check_reads_is_bounded_by_lines_size_and_time(tmp_path, monkeypatch):
    write_lines(tmp_path, [*prompts(30), b"?", *prompts(30)])
    _, check = open_prompts(job(tmp_path))
    assert (check.lines, check.failed, check.is_whole) == (61, 1, True)
    assert str(check).startswith("of 61 lines 1 will fail, the first one is line 31: expected JSON")
    monkeypatch.setattr(prompts_module, "SMALL_BYTES", 100)
    monkeypatch.setattr(prompts_module, "CHECKED_LINES", 40)
    _, check = open_prompts(job(tmp_path))
    assert (check.lines, check.failed, check.is_whole) == (40, 1, False)
    monkeypatch.setattr(prompts_module, "CHECK_SECONDS", 0.0)
    _, check = open_prompts(job(tmp_path))
    assert (check.lines, check.failed, check.is_whole) == (1, 0, False)


@pytest.mark.parametrize("name", ["indented.json", "a.csv", "a.txt"])
def test_a_job_on_it_is_resumed_by_its_lines(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(FILES[name].encode())
    fields = {"data": str(path), "resume": True}
    assert capture_dataset(job(tmp_path, **fields, limit=2), FakeEngine).counts.stored == 2
    counts = capture_dataset(job(tmp_path, **fields), FakeEngine).counts
    assert (counts.total, counts.skipped, counts.stored) == (3, 2, 1)
    assert len(open_store(tmp_path / "acts")) == 3


def test_a_named_pipe_is_read_once_and_not_for_a_check(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    writer = os.open(tmp_path / "pipe.txt", os.O_RDWR)
    os.write(writer, b"a\nb\n")
    source, check = open_prompts(job(tmp_path, data=str(tmp_path / "pipe.txt"), limit=2))
    assert check is None
    assert source.count() is None
    assert [row.prompt for row in source] == ["a", "b"]
    os.close(writer)


def test_a_line_of_text_that_is_no_prompt_fails_alone(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good\n\xff\n\nlast")
    first, second, third = open_source(job(tmp_path, data=str(tmp_path / "a.txt")))
    assert (first, third) == (Record(1, "good"), Record(4, "last"))
    assert second == Failed(2, "expected UTF-8: invalid start byte")


def test_what_is_json_is_text_if_that_is_what_it_is_called(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text('{"text": "a"}\nb\n')
    with pytest.raises(SpecError, match="a.txt:1: expected text, .* and this is JSON"):
        open_prompts(job(tmp_path, data=str(path)))
    source, _ = open_prompts(job(tmp_path, data=str(path), format="text"))
    assert texts_of(source) == ['{"text": "a"}', "b"]
    source, check = open_prompts(job(tmp_path, data=str(path), format="jsonl"))
    assert (next(iter(source)), check.failed) == (Record(1, "a"), 1)
