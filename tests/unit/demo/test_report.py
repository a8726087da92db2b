"""The report stands alone, is well-formed, escapes everything, and says what the result says."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
from unit.demo.fakes import make_result

from midstream.demo import charts, report, template
from midstream.demo.result import format_scale

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=y>\"'&amp;]]>\x00\x1b\ud800"
VOID = {"meta", "br"}


class Checker(HTMLParser):
    """Well-formedness, and what is in the page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.seen: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []
        self.data = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, names)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> is out of order"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.data += data
        else:
            self.text.append(data)


def parse(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    return checker


@pytest.mark.parametrize("hostile", ["", HOSTILE])
def test_is_well_formed_and_loads_nothing(hostile: str) -> None:
    page = report.render(make_result(hostile))
    page.encode("utf-8")
    checker = parse(page)
    loading = {"src", "href", "srcset", "action", "data", "poster", "xlink:href", "background"}
    assert [a for a in checker.attributes if a[1] in loading or a[1].startswith("on")] == []
    assert {"link", "img", "iframe", "object", "embed", "use", "image"}.isdisjoint(checker.seen)
    assert checker.seen.count("script") == 1
    assert ("script", "type", "application/json") in checker.attributes
    style = template.style_sheet()
    assert not re.search(r"url\(|@import|https?:|//", style)
    assert "https:" not in page
    assert "http:" not in page


def test_the_browser_is_told_to_load_nothing() -> None:
    policy = [a[2] for a in parse(report.render(make_result())).attributes if a[1] == "content"]
    assert "default-src 'none'; style-src 'unsafe-inline'" in policy


def test_hostile_text_comes_out_as_text() -> None:
    checker = parse(report.render(make_result(HOSTILE)))
    text = "".join(checker.text)
    shown = HOSTILE.replace("\x00", "\ufffd").replace("\x1b", "\ufffd").replace("\ud800", "\ufffd")
    for words in ("a sad answer ", "a plain answer ", "A question ", "a map ", "request one "):
        assert words + shown in text
    assert "alert(1)" not in "".join(v for _, n, v in checker.attributes if n != "title")


def test_every_text_and_fact_is_in_the_page() -> None:
    result = make_result()
    text = "".join(parse(report.render(result)).text)
    for question in result.questions:
        assert question.prompt in text
        for answer in question.answers:
            assert answer.text in text
            assert format_scale(answer.scale) in text
    for fact in ("a-model", "vLLM", "1.2.3", "CPU", "2030-01-01 00:00 UTC", "capture 1.2 s"):
        assert fact in text
    for words in ("AUC 0.900", "accuracy 82.0%", "d′ 2.80", "layer 4 does best", "Layer 3 is the"):
        assert words in text
    assert "reads −0.50" in text
    assert "not read" in text


def test_the_receipts_are_counted_and_listed() -> None:
    text = "".join(parse(report.render(make_result())).text)
    assert "1 requests captured or steered: 9 vectors captured, 9 edits made. All did" in text
    assert "All did what was requested." in text
    assert "request oneok7 + 39 of 99 of 9" in text.replace("request one ", "request one")
    assert "1 of them differ" not in text


def test_a_receipt_that_is_not_ok_is_not_hidden() -> None:
    result = make_result()
    result.receipts[0].content["status"] = "error"
    assert "1 of them differ from the request" in report.render(result)


def test_the_data_block_is_the_result() -> None:
    result = make_result(HOSTILE)
    checker = parse(report.render(result))
    assert ("script", "id", report.DATA_ID) in checker.attributes
    assert json.loads(checker.data) == json.loads(json.dumps(result.to_dict()))


def test_a_heatmap_has_a_cell_per_layer_and_token_with_its_numbers() -> None:
    token_map = make_result().token_maps[0]
    checker = parse(charts.heatmap(token_map, limit=0.4, marked=3, weights=[1.0] * 5))
    assert checker.seen.count("rect") == 5 * 3 + 1
    assert "'two', layer 4: cosine +0.35, projection +0.35" in checker.text
    assert {"One", "two", "⏎"} <= set(checker.text)


@pytest.mark.parametrize(
    ("value", "expected"), [(0.0, 10), (1.0, 20), (-1.0, 0), (9.0, 20), (-9.0, 0), (0.5, 15)]
)
def test_colours_run_from_end_to_end(value: float, expected: int) -> None:
    assert charts.color_bin(value, 1.0) == expected


def test_a_scale_without_size_is_the_middle() -> None:
    assert charts.color_bin(0.0, 0.0) == charts.NUM_BINS // 2


def test_every_bin_has_a_colour_in_both_modes() -> None:
    light, dark = template.style_sheet().split("@media (prefers-color-scheme: dark)")
    for index in range(charts.NUM_BINS):
        assert re.search(rf"\.b{index} {{ fill: #[0-9a-f]{{6}}", light)
        assert re.search(rf"\.b{index} {{ fill: #[0-9a-f]{{6}}", dark)


def luminance(rgb: template.Rgb) -> float:
    parts = [part / 255 for part in rgb]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    levels = sorted(
        luminance((int(c[1:3], 16), int(c[3:5], 16), int(c[5:7], 16))) + 0.05 for c in (one, other)
    )
    return levels[1] / levels[0]


@pytest.mark.parametrize("mode", [template.CSS, template.DARK_CSS])
def test_text_contrasts_with_its_ground_in_both_modes(mode: str) -> None:
    """WCAG's 4.5 for text; its 3 for the lines of charts."""

    def color(name: str) -> str:
        found = re.search(rf"--{name}: (#[0-9a-f]{{3,6}})", mode)
        assert found
        value = found[1]
        return value if len(value) == 7 else "#" + "".join(2 * c for c in value[1:])

    for ground in (color("page"), color("card")):
        assert contrast(color("ink"), ground) > 7
        assert contrast(color("soft"), ground) > 4.5
        assert contrast(color("a"), ground) > 3
        assert contrast(color("b"), ground) > 3


@pytest.mark.parametrize("span", [1e-6, 0.3, 0.55, 1.0, 3.3, 7.0, 42.0, 1e5])
def test_chart_levels_are_few_and_round(span: float) -> None:
    chart = charts.strength_chart("", [0.0, 1.0], [[0.0, span]])
    labels = re.findall(r'class="tick end"[^>]*>([^<]+)<', chart)
    assert 2 <= len(labels) <= 9
