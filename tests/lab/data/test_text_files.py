"""Lines, JSON and tables of files: whatever is in them, each item is read once and named."""

import csv
import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.errors import SpecError
from midstream.lab.data import text_files
from midstream.lab.data.text_files import json_values, plain_lines, table_rows

MARK = b"\xef\xbb\xbf"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


def items(data, read=json_values):
    return list(read(io.BytesIO(data), "f"))


@pytest.mark.parametrize("mark", [b"", MARK])
@given(values=st.lists(VALUES, max_size=6), indent=st.none() | st.integers(0, 2))
@settings(deadline=None)
def test_the_elements_of_an_array_are_the_values_of_its_lines(mark, values, indent):
    array = items(mark + json.dumps(values, indent=indent, ensure_ascii=False).encode())
    assert [json.loads(item.text) for item in array] == values
    assert [item.number for item in array] == list(range(1, len(values) + 1))
    if values and not isinstance(values[0], list):
        lines = items(mark + b"".join(json.dumps(value).encode() + b"\r\n" for value in values))
        assert [(n, json.loads(text)) for n, text, _ in lines] == list(enumerate(values, 1))


@given(values=st.lists(st.text(max_size=40) | st.integers(), min_size=1), step=st.integers(1, 7))
@settings(deadline=None)
def test_where_the_parts_that_are_read_end_changes_nothing(values, step):
    """Digits, characters and escapes are cut; a value is longer than a part."""
    data = json.dumps(values, ensure_ascii=False).encode()
    parts = (data[at : at + step] for at in range(0, len(data), step))
    found = [json.loads(item.text) for item in text_files._elements(parts)]
    assert found == values


def test_a_long_array_is_not_held_in_memory(monkeypatch):
    monkeypatch.setattr(text_files, "MOST_CHARS", 1 << 18)
    file = io.BytesIO(b"[" + b",".join([b'"' + b"x" * 1000 + b'"'] * 10_000) + b"]")
    values = json_values(file, "f")
    for _ in range(10):
        assert len(next(values).text) == 1002
    assert file.tell() < 3 << 20
    assert sum(1 for _ in values) == 9_990
    (item,) = items(b'["' + b"x" * (1 << 20) + b'"]')
    assert "an element of more than" in item.problem


@pytest.mark.parametrize(
    ("data", "good", "problem"),
    [
        (b'["a" "b"]', 1, "expected ',', got '\"'"),
        (b'["a",]', 1, "Expecting value"),
        (b'["a"', 1, "expected ',', got the end of the file"),
        (b'["a', 0, "Unterminated string"),
        (b'["a"] 1', 1, "expected nothing behind it"),
        (b'["a", {"b": tru}, "c"]', 1, "Expecting value"),
        (b'["a", ' + b"[" * 100_000, 1, "nested too deeply"),
    ],
)
def test_a_malformed_array_gives_what_is_before_and_says_that_it_ends(data, good, problem):
    *before, last = items(data)
    assert len(before) == good
    assert problem in last.problem
    assert last.number == good + 1
    assert "nothing from here on is read" in last.problem


def test_what_is_not_utf_8_fails_alone():
    first, second, third = items(b'["a", "\xff", "c"]')
    assert (first.problem, second.problem, third.text) == ("", "expected UTF-8", b'"c"')
    data = b"text\na\n\xff\nc\n"
    assert [row.problem for row in table_rows(io.BytesIO(data), "f", ",")][2:] == [
        "expected UTF-8", "",
    ]  # fmt: skip


@pytest.mark.parametrize("read", [plain_lines, json_values, lambda f, n: table_rows(f, n, ",")])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
def test_a_mark_of_another_encoding_is_named(read, encoding):
    mark = b"" if encoding != "utf-16-be" else b"\xfe\xff"
    with pytest.raises(SpecError, match=f"f: it is {encoding[:6].upper()}; expected UTF-8"):
        items(mark + "text\n".encode(encoding), read)


@pytest.mark.parametrize("text", ["[", '["a",', "{", '{"text": 1}', ' [{"a": 1}]', "[[1"])
def test_json_is_no_text_and_brackets_are(text):
    with pytest.raises(SpecError, match="f:2: expected text, .* ends in .jsonl"):
        items(f"\n{text}\nb\n".encode(), plain_lines)
    for line in ("[1] see below", '"Yes," she said', "{curly}", "[sic]"):
        assert [item.text.decode() for item in items(f"{line}\n{text}".encode(), plain_lines)] == [
            line, text,
        ]  # fmt: skip


_CELL = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6)


@pytest.mark.parametrize("mark", [b"", MARK])
@given(rows=st.lists(st.tuples(_CELL, _CELL), max_size=5), quoting=st.sampled_from([0, 1]))
@settings(deadline=None)
def test_rows_are_those_that_were_written(mark, rows, quoting):
    file = io.StringIO(newline="")
    csv.writer(file, quoting=quoting).writerows([("text", "id"), *rows])
    data = mark + file.getvalue().encode()
    header, *found = table_rows(io.BytesIO(data), "f", ",")
    assert header.values == ("text", "id")
    assert [row.values for row in found] == rows
    numbers = [row.number for row in found]
    assert numbers == sorted(set(numbers))


def test_a_row_is_named_by_the_line_on_which_it_begins():
    data = b'text,id\r\n"a\n\nb",1\r\n\r\nc,2\r\nd\r\n"e"f,3\r\ng,4\r\n"open'
    rows = [(row.number, row.problem[:13]) for row in table_rows(io.BytesIO(data), "f", ",")]
    assert rows == [
        (1, ""), (2, ""), (6, ""), (7, "expected 2 va"), (8, "expected valu"), (9, ""),
        (10, "expected valu"),
    ]  # fmt: skip
