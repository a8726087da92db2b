"""The report stands alone, is well-formed, escapes everything, and says what the result says."""

import ast
import base64
import dataclasses
import functools
import json
import re

import pytest
from lab.report.fakes import make_result
from unit.viz.pages import Page

from midstream.lab.report import page as report
from midstream.lab.report.appendix import (
    file_name,
    python_code,
    receipts_section,
    take_section,
)
from midstream.lab.report.result import TokenMap
from midstream.lab.report.sections import color_limit
from midstream.viz import theme
from midstream.viz.answer_cards import strength

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=y>\"'&amp;]]>\x00\x1b\ud800\u202e"


@functools.cache
def page_of(hostile):
    """The page of a result, which tests only read: its charts take a second to draw."""
    return Page(report.render(make_result(hostile)))


@pytest.mark.parametrize("hostile", ["", HOSTILE])
def test_is_well_formed_and_loads_nothing(hostile):
    page = page_of(hostile)
    page.check_harmless()
    assert page.one("script").attributes == {"type": "application/json", "id": report.DATA_ID}
    assert not re.search(r"url\(|@import|https?:", page.one("style").text)


def test_the_browser_is_told_to_load_nothing():
    page = page_of("")
    (policy,) = [m.attributes["content"] for m in page.all("meta") if "http-equiv" in m.attributes]
    style = theme.source_of(page.one("style").text)
    assert policy == (
        f"default-src 'none'; style-src {style}; img-src data:; base-uri 'none'; form-action 'none'"
    )


def test_hostile_text_comes_out_as_text_in_the_page_and_in_its_code():
    text = page_of(HOSTILE).one("main").text
    shown = re.sub("[\x00\x1b\ud800\u202e]", "\ufffd", HOSTILE)
    for words in ("a sad answer ", "a plain answer ", "A question ", "won ", "lost "):
        assert words + shown in text
    code = python_code(make_result(HOSTILE + "\n\\"))
    strings = [n.value for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Constant)]
    assert f"A question {HOSTILE}\n\\?" in strings
    assert f"models/a-model{HOSTILE}\n\\" in strings


def test_every_section_is_in_the_table_of_contents_and_every_text_and_fact_in_the_page():
    page = page_of("")
    links = [link.attributes["href"] for link in page.one("nav").children]
    assert links == [f"#{section.attributes['id']}" for section in page.all("section")]
    assert [link.text for link in page.one("nav").children] == [h.text for h in page.all("h2")]
    result = make_result()
    text = page.one("main").text
    for question in result.questions:
        assert question.prompt in text
        for answer in question.answers:
            assert answer.text in text
            assert strength(answer.scale) in text
    for fact in ("a-model", "vLLM", "1.2.3", "CPU", "2030-01-01 00:00 UTC", "capture 1.2 s"):
        assert fact in text
    for words in ("AUC 0.900", "accuracy 82.0%", "d′ 2.80", "layer 4 does best", "Layer 3 is the"):
        assert words in text
    assert "reads −0.50, −1.25 nats" in text
    assert "not read" in text


def test_the_direction_can_be_downloaded_and_a_page_without_a_control_vector_says_why():
    page = page_of("")
    files = {
        link.attributes["download"]: base64.b64decode(link.attributes["href"].partition(",")[2])
        for link in page.all("a", cls="download")
    }
    assert files == {"glad.safetensors": b"vectors", "glad.gguf": b"control vector"}
    code, command = (each.text for each in page.all("code"))
    assert 'Directions.load("glad.safetensors")[3]' in code
    assert command == "midstream report --model 'x'"
    section = Page(f"<div>{take_section(dataclasses.replace(make_result(), gguf=None))}</div>")
    assert len(section.all("a", cls="download")) == 1
    words = "the package gguf, which writes control vectors of llama.cpp, was not installed"
    assert words in section.elements[0].text


@pytest.mark.parametrize(
    ("scales", "wanted"),
    [((-2.0, 0.0, 1.5), 1.5), ((-2.0, -0.5, 0.0), -2.0), ((0.0, 1.23456789), 1.23456789)],
)
def test_the_code_steers_with_a_strength_of_the_page(scales, wanted):
    result = make_result()
    answers = [dataclasses.replace(result.questions[0].answers[0], scale=one) for one in scales]
    questions = [dataclasses.replace(one, answers=answers) for one in result.questions]
    code = python_code(dataclasses.replace(result, questions=questions))
    (steer,) = [one for one in ast.walk(ast.parse(code)) if _is_call_of(one, "steer")]
    assert ast.literal_eval(steer.args[0]) == wanted


def _is_call_of(node, name):
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") == name


@pytest.mark.parametrize(
    ("name", "file"),
    [("très gai/../x", "tr-s-gai-x"), ("日本", "directions"), ("a" * 99, "a" * 40)],
)
def test_the_name_of_the_file_has_plain_characters(name, file):
    result = dataclasses.replace(make_result(), classes=(name, "sad"))
    assert file_name(result) == f"{file}.safetensors"


def test_charts_have_the_scores_by_layer_the_effects_by_strength_and_maps_that_rise():
    page = page_of("")
    charts = {each.attributes["aria-label"]: each for each in page.all("svg", cls="chart")}
    assert list(charts) == [
        "Distance of the classes, on held-out texts",
        "AUC and accuracy, on held-out texts",
        "a map ",
        "Reading",
        "Log-probability of the answers",
        "Repetition",
    ]
    numbers = [each.text.splitlines() for each in page.all("pre", cls="numbers")]
    assert numbers[0][2].split() == ["0", "0.000", "−0.100", "0.100"]
    assert numbers[1][6].split() == ["4", "0.900", "0.880", "0.920", "0.820", "0.790", "0.850"]
    assert [line.split() for line in numbers[3]] == [
        ["Reading"],
        ["strength", "mean", "from", "to"],
        ["−2", *["−0.50"] * 3],
        ["0", *["–"] * 3],
        ["1.5", *["0.25"] * 3],
    ]
    assert "nats per token" in charts["Log-probability of the answers"].text
    cells = [line.split() for line in numbers[2]]
    assert [line[0] for line in cells[2:]] == ["4", "3", "2", "1", "0"]  # layer 0 is at the bottom
    assert cells[2][1:] == ["+0.40", "+0.35", "+0.30"]
    assert "cosine with the" in charts["a map "].text


def test_the_receipts_are_counted_by_kind_and_one_that_is_not_ok_is_not_hidden():
    page = page_of("")
    assert (
        "1 requests captured or steered: 9 vectors captured, 9 edits made." in page.one("main").text
    )
    assert "All did what was requested." in page.one("main").text
    rows = [[cell.text for cell in row.children] for row in page.all("tr")]
    assert rows[-2:] == [
        ["requests", "ok", "vectors", "edits"],
        ["request", "1 of 1", "9 of 9", "9 of 9"],
    ]
    result = make_result("!")
    result.receipts[0].content["status"] = "error"
    section = Page(f"<div>{receipts_section(result)}</div>")
    assert "1 of them differ from the request" in section.elements[0].text
    last = [cell.text for cell in section.all("tr")[-1].children]
    assert last == ["request one !", "error", "9 of 9", "9 of 9", "a remark !"]


def test_the_data_block_is_the_result():
    result = make_result(HOSTILE)
    data = page_of(HOSTILE).one("script", id=report.DATA_ID).text
    assert json.loads(data) == json.loads(json.dumps(result.to_dict()))
    assert "vectors" not in result.to_dict()


def test_the_limit_of_the_colours_leaves_out_outliers():
    cells = [[0.01 * n for n in range(100)]]
    one = TokenMap("", [], cells, cells)
    assert color_limit([one]) == pytest.approx(0.97)
    assert color_limit([]) == 1.0
    assert color_limit([TokenMap("", [], [[0.0]], [[0.0]])]) == 1.0
