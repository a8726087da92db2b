"""What the outputs of each notebook must show, since its text says so."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from support import notebooks


def texts_of(notebook: Any) -> list[str]:
    """The plain text of each output."""
    return [
        one["data"]["text/plain"]
        for cell in notebooks.code_cells(notebook)
        for one in cell.outputs
        if "data" in one
    ]


def the_lens_says_paris_at_the_last_layer_and_its_direction_says_berlin(texts: list[str]) -> None:
    *_, cards = texts
    answers = dict(re.findall(r"^ *(plain|\+[\d.]+)  (.*)$", cards, re.M))
    assert answers["plain"].startswith(" Paris")
    assert answers["+0.4"].startswith(" Berlin")


def ablating_the_refusal_direction_ends_the_refusal(texts: list[str]) -> None:
    _, cards, receipt = texts
    assert "I'm sorry" in cards.split("+1")[0]
    assert "I'm sorry" not in cards.split("+1")[1]
    assert "ok" in receipt


def the_answer_moves_from_the_name_to_the_end_by_one_layer_of_attention(texts: list[str]) -> None:
    known, stream, written, heads = texts
    assert known == "[' Paris', ' Rome']"
    assert number(stream, 10, "2 'osse'") > 0.7 > 0.1 > number(stream, 10, "8 ' of'")
    assert number(stream, 28, "8 ' of'") > 0.7 > 0.1 > number(stream, 28, "2 'osse'")
    assert number(written, 23, "8 ' of'") > 0.5
    assert number(heads, 23, "4") + number(heads, 23, "5") > 0.4


def a_stronger_push_reads_gladder(texts: list[str]) -> None:
    directions, tuning, cards = texts
    apart = re.findall(r"^ *\d+ +([\d.]+)  ", directions, re.M)
    assert len(apart) == 30
    assert min(map(float, apart)) > 2
    assert tuning.startswith("Tuning(4 layers × 5 scales)")
    assert number(tuning, 20, "1") > 0.5 > number(tuning, 20, "−1")
    assert len(re.findall(r"^ *[+−][\d.]+  ", cards, re.M)) == 5


def a_feature_of_cooking_turned_up_writes_of_food(texts: list[str]) -> None:
    trained, rows, cards = texts
    assert "variance explained" in trained
    found = {word: float(one) for one, word in re.findall(r"^ *\d+ +([\d.]+)  '(.*)'$", rows, re.M)}
    assert max(found, key=lambda word: found[word]) in (" garlic", " parsley")
    assert found[" book"] == found[" moon"] == 0
    plain, *steered = re.findall(r"^ *(?:plain|\+\d+)  (.*)$", cards, re.M)
    food = re.compile("recipe|bake|cook|garlic|butter|sauce|salt|pepper|onion")
    assert not food.search(plain)
    assert all(food.search(each) for each in steered)


def a_probe_follows_a_stream(texts: list[str]) -> None:
    _, shown = texts
    rows = re.findall(r"^ *\d+ +(−?[\d.]+)  '", shown, re.M)
    scores = [float(row.replace("−", "-")) for row in rows]
    assert len(scores) == 47
    assert max(scores[21:]) > 0 > sum(scores[5:18]) / 13


def number(table: str, layer: int, column: str) -> float:
    """The number of a layer in the first table of a text."""
    rows = [re.split(" {2,}", line.strip()) for line in table.splitlines()]
    [names, *_] = [row for row in rows if row[0].startswith("layer↓ ")]
    [cells, *_] = [row for row in rows if row[0] == str(layer)]
    return float(cells[names.index(column)].rstrip(" ★×").replace("−", "-"))


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "causal_tracing": the_answer_moves_from_the_name_to_the_end_by_one_layer_of_attention,
    "live_probe": a_probe_follows_a_stream,
    "logit_lens": the_lens_says_paris_at_the_last_layer_and_its_direction_says_berlin,
    "refusal_direction": ablating_the_refusal_direction_ends_the_refusal,
    "sae_feature": a_feature_of_cooking_turned_up_writes_of_food,
    "steer_and_tune": a_stronger_push_reads_gladder,
}
