"""Files of pairs and questions: what is wrong in them is named by file and line."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.errors import SpecError
from midstream.lab.report.pairs import Pair, read_pairs, read_questions, read_two_files

GOOD = json.dumps({"positive": "up", "negative": "down"})


def write(folder, name, data):
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def test_pairs_and_questions_are_read_in_order_and_empty_lines_are_skipped(tmp_path):
    text = f'\ufeff{GOOD}\r\n\n{{"negative": "x\\ny", "positive": "é"}}\n'
    assert read_pairs(write(tmp_path, "a.jsonl", text)) == [Pair("up", "down"), Pair("é", "x\ny")]
    up, down = write(tmp_path, "up.txt", "a\nb\u2028c\n"), write(tmp_path, "down.txt", "d\r\ne")
    assert read_two_files(up, down) == [Pair("a", "d"), Pair("b\u2028c", "e")]
    path = write(tmp_path, "q.txt", " How? \n\nWhy?")
    assert read_questions(path) == ["How?", "Why?"]
    with pytest.raises(SpecError, match="q.txt: expected one question a line, got none"):
        read_questions(write(tmp_path, "q.txt", "\n \n"))


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_is_its_elements_and_no_text(tmp_path, mark, indent):
    pairs = [{"positive": "up", "negative": "down"}, {"positive": "é", "negative": "e"}]
    text = mark + json.dumps(pairs, indent=indent)
    assert read_pairs(write(tmp_path, "a.json", text)) == [Pair("up", "down"), Pair("é", "e")]
    text = mark + json.dumps(["How?", "Why?"], indent=indent)
    assert read_questions(write(tmp_path, "q.json", text)) == ["How?", "Why?"]
    with pytest.raises(SpecError, match="q.txt:1: expected text, a prompt on each line, and this"):
        read_questions(write(tmp_path, "q.txt", text))
    with pytest.raises(SpecError, match="q.jsonl:2: expected a text, got `int`"):
        read_questions(write(tmp_path, "q.jsonl", '"How?"\n3\n'))
    with pytest.raises(SpecError, match="a.json:2: the JSON array: .* the end of the file"):
        read_pairs(write(tmp_path, "a.json", mark + json.dumps(pairs[:1])[:-1]))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "a.jsonl:3: expected JSON: "),
        ('{"positive": "x"}', "a.jsonl:3: missing field `negative`"),
        ('{"positive": "x", "negative": 1}', "a.jsonl:3: `negative`: expected `str`, got `int`"),
        ('{"positive": " ", "negative": "y"}', "a.jsonl:3: `positive` is empty"),
        ('{"positive": "x", "negative": "x"}', "a.jsonl:3: .* are equal"),
        ('{"positive": "x", "positive": "y"}', "a.jsonl:3: duplicate JSON field 'positive'"),
        (b'{"positive": "\xff", "negative": "y"}', "a.jsonl:3: expected UTF-8: invalid start byte"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, message):
    data = line.encode() if isinstance(line, str) else line
    path = write(tmp_path, "a.jsonl", f"{GOOD}\n\n".encode() + data)
    with pytest.raises(SpecError, match=message):
        read_pairs(path)


def test_files_that_cannot_be_read_and_too_few_pairs_are_named(tmp_path):
    with pytest.raises(SpecError, match="a.jsonl: expected 2 or more pairs, got 1"):
        read_pairs(write(tmp_path, "a.jsonl", GOOD))
    with pytest.raises(SpecError, match="none.jsonl: cannot be read: No such file"):
        read_pairs(tmp_path / "none.jsonl")
    with pytest.raises(SpecError, match="cannot be read: Is a directory"):
        read_questions(tmp_path)


@pytest.mark.parametrize(
    ("down", "message"),
    [
        ("d\ne\nf\n", "down.txt: expected 2 lines, as .*up.txt has, got 3: line n of both"),
        ("d\n\n", "up.txt:2 and .*down.txt:2: `negative` is empty"),
        ("d\nb\n", "up.txt:2 and .*down.txt:2: .* are equal"),
    ],
)
def test_two_files_that_do_not_fit_are_refused(tmp_path, down, message):
    with pytest.raises(SpecError, match=message):
        read_two_files(write(tmp_path, "up.txt", "a\nb\n"), write(tmp_path, "down.txt", down))


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)


@given(st.lists(st.tuples(_TEXT, _TEXT).filter(lambda p: p[0] != p[1]), min_size=2, max_size=5))
@settings(max_examples=50, deadline=None)
def test_any_texts_are_read_back(tmp_path_factory, pairs):
    folder = tmp_path_factory.mktemp("pairs")
    lines = [json.dumps({"positive": p, "negative": n}, ensure_ascii=False) for p, n in pairs]
    assert read_pairs(write(folder, "a.jsonl", "\n".join(lines))) == [Pair(*p) for p in pairs]
