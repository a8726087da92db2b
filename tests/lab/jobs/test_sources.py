"""Where prompts come from."""

import io
import json
import sys
import types

import pytest
from lab.jobs.fakes import FakeEngine, job, prompts, write_lines

from midstream import open_store
from midstream.errors import SpecError, StoreError, UnsupportedError
from midstream.lab.jobs import capture_dataset
from midstream.lab.jobs.prompts import open_prompts
from midstream.lab.jobs.records import Failed, Record
from midstream.lab.jobs.sources import open_source

TALK = [{"role": "user", "content": "hello"}]


@pytest.fixture
def table(tmp_path):
    """A Parquet file of 2500 rows in several row groups."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "prompts.parquet"
    columns = {
        "text": [f"prompt {n}" if n != 7 else None for n in range(2500)],
        "talk": [TALK] * 2500,
        "id": list(range(2500)),
    }
    parquet.write_table(pa.table(columns), path, row_group_size=400)
    return path


def test_lines_have_the_numbers_that_an_editor_shows_and_any_ends(tmp_path):
    write_lines(tmp_path, [{"text": "a"}, b"", b"  \r", {"text": "b"}, b"?"])
    source = open_source(job(tmp_path))
    assert source.count() == 3
    found = list(source)
    assert found[:2] == [Record(1, "a"), Record(4, "b")]
    assert isinstance(found[2], Failed)
    assert found[2].line == 5
    assert list(source) == found
    assert source.can_be_read_again
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'"a"\r\n"b"')
    assert list(open_source(job(tmp_path))) == [Record(1, "a"), Record(2, "b")]
    write_lines(tmp_path, [{"text": "a"}, b"", b"?", {"text": "b"}])
    source = open_source(job(tmp_path, limit=2))
    assert source.count() == 2
    assert [each.line for each in source] == [1, 3]


@pytest.mark.parametrize("first", [b'{"text": "a"}', b""])
def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path, first):
    path = tmp_path / "prompts.jsonl"
    found = []
    for mark in (b"", b"\xef\xbb\xbf"):
        path.write_bytes(mark + first + b'\r\n{"text": "b"}\n')
        source = open_source(job(tmp_path))
        found.append((source.count(), list(source)))
    assert found[0] == found[1]
    assert found[0][1][-1] == Record(2, "b")


def test_no_more_is_counted_and_checked_than_is_read(tmp_path, monkeypatch):
    path = write_lines(tmp_path, prompts(10))
    read = []

    class Noting(io.FileIO):
        def readline(self, size=-1, /):
            read.append(super().readline(size))
            return read[-1]

        def __next__(self):
            return self.readline()

    monkeypatch.setattr("midstream.lab.jobs.sources._open", lambda _: Noting(path))
    source, check = open_prompts(job(tmp_path, limit=3))
    assert (check.lines, check.failed, check.is_whole) == (3, 0, True)
    assert len(read) == 3
    assert source.count() == 3
    assert len(read) == 6


def test_a_parquet_file_is_read_in_batches(table, tmp_path):
    source = open_source(job(tmp_path, data=str(table)))
    assert source.count() == 2500
    found = list(source)
    assert len(found) == 2500
    assert found[1300] == Record(1301, "prompt 1300")
    assert isinstance(found[7], Failed)
    talks = open_source(job(tmp_path, data=str(table), prompt_field="talk", chat=True))
    assert next(iter(talks)) == Record(1, TALK)


def test_a_column_that_is_not_there_and_a_file_that_is_no_parquet_are_refused(table, tmp_path):
    with pytest.raises(SpecError, match="no column 'txt'.*did you mean `text`.*it has text, talk"):
        open_source(job(tmp_path, data=str(table), prompt_field="txt"))
    path = tmp_path / "a.parquet"
    path.write_text("no")
    with pytest.raises(SpecError, match="data: .*a.parquet"):
        open_source(job(tmp_path, data=str(path)))


@pytest.mark.parametrize("name", ["nothing.jsonl", "./here", "/a/b", "a/b/c", "x.parquet"])
def test_a_file_that_is_not_there_is_no_data_sets_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SpecError, match="data: there is no file"):
        open_source(job(tmp_path, data=name))


@pytest.mark.parametrize("name", ["a.arrow", "a.jsonl.gz", "A.ZST"])
def test_a_file_of_another_kind_is_refused_before_each_of_its_lines_fails(tmp_path, name):
    (tmp_path / name).write_bytes(b"text\nhello\n")
    with pytest.raises(SpecError, match="expected JSON lines, a JSON array, text, CSV, TSV or Par"):
        open_source(job(tmp_path, data=str(tmp_path / name)))


@pytest.mark.parametrize("part", [{"subset": "en"}, {"split": "test"}])
def test_a_file_has_neither_subsets_nor_splits(tmp_path, part):
    write_lines(tmp_path, [])
    (name,) = part
    for more in ({}, {"data": "-"}):
        with pytest.raises(SpecError, match="only Hugging Face datasets") as error:
            open_source(job(tmp_path, **part, **more))
        assert error.value.path == name


@pytest.mark.parametrize("library", ["pyarrow", "datasets"])
def test_a_library_that_is_missing_is_named_with_how_to_install_it(tmp_path, monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    (tmp_path / "a.parquet").write_text("")
    name = str(tmp_path / "a.parquet") if library == "pyarrow" else "some/data"
    with pytest.raises(UnsupportedError, match="pip install") as error:
        open_source(job(tmp_path, data=name))
    assert library in str(error.value)


def test_a_data_set_of_hugging_faces_is_read_from_a_folder(table, tmp_path):
    pytest.importorskip("datasets")
    folder = tmp_path / "set"
    folder.mkdir()
    table.rename(folder / "train.parquet")
    source = open_source(job(tmp_path, data=str(folder), limit=9))
    found = list(source)
    assert found == list(source)
    assert [each.line for each in found] == list(range(1, 10))
    assert found[0] == Record(1, "prompt 0")
    assert isinstance(found[7], Failed)
    with pytest.raises(SpecError, match="no column 'txt'"):
        open_source(job(tmp_path, data=str(folder), prompt_field="txt"))
    with pytest.raises(SpecError, match="test"):
        open_source(job(tmp_path, data=str(folder), split="test"))


def test_a_data_set_is_asked_for_by_name_subset_and_split(tmp_path, monkeypatch):
    """And streamed: nobody downloads all of it to read a few lines."""
    asked = []

    class Rows:
        column_names = ("text",)
        info = types.SimpleNamespace(splits={"dev": types.SimpleNamespace(num_examples=2)})

        def __iter__(self):
            return iter([{"text": "a"}, {"text": "b"}])

    def load(name, subset, **options):
        asked.append((name, subset, options))
        return Rows()

    module = types.ModuleType("datasets")
    module.load_dataset = load
    module.exceptions = types.ModuleType("datasets.exceptions")
    module.exceptions.DatasetsError = OSError
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setitem(sys.modules, "datasets.exceptions", module.exceptions)
    source = open_source(job(tmp_path, data="some/data", subset="en", split="dev"))
    assert asked == [("some/data", "en", {"split": "dev", "streaming": True})]
    assert source.count() == 2
    assert list(source) == [Record(1, "a"), Record(2, "b")]


def give(monkeypatch, lines):
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(text)))


def test_the_standard_input_is_read_once_and_resumed_by_its_lines(tmp_path, monkeypatch):
    give(monkeypatch, prompts(5))
    summary = capture_dataset(job(tmp_path, data="-"), FakeEngine)
    assert (summary.counts.total, summary.counts.stored) == (None, 5)
    give(monkeypatch, prompts(8))
    summary = capture_dataset(job(tmp_path, data="-", resume=True), FakeEngine)
    assert (summary.counts.skipped, summary.counts.stored) == (5, 3)
    assert len(open_store(tmp_path / "acts")) == 8


def test_other_data_on_the_standard_input_ends_the_job_where_it_differs(tmp_path, monkeypatch):
    give(monkeypatch, prompts(5))
    capture_dataset(job(tmp_path, data="-"), FakeEngine)
    give(monkeypatch, ["another", *prompts(9)])
    with pytest.raises(StoreError, match="line 1 was captured with another prompt"):
        capture_dataset(job(tmp_path, data="-", resume=True), FakeEngine)
    assert len(open_store(tmp_path / "acts")) == 5
