"""The notebooks run as they stand, by nbclient, and show what their texts say."""

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import notebooks

pytestmark = [pytest.mark.model]


@pytest.fixture(scope="module")
def hub(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return notebooks.hub_cache(tmp_path_factory.mktemp("hub"), smollm2)


@pytest.fixture(scope="module")
def shared(hub: Path) -> Iterator[Any]:
    with notebooks.kernel(hub) as started:
        notebooks.share_engine(started)
        yield started


def run(name: str, started: Any) -> list[str]:
    """Execute a notebook; return the plain text of its outputs, and of heatmaps their cells."""
    found = notebooks.read(notebooks.FOLDER / f"{name}.ipynb")
    try:
        notebooks.execute(found, started)
    finally:
        if name not in notebooks.ASYNC:
            notebooks.forget(started)
    return [
        _text(one["data"])
        for cell in notebooks.code_cells(found)
        for one in cell.outputs
        if "data" in one
    ]


def _text(data: dict[str, str]) -> str:
    cells = re.findall(r'aria-label="([^"]*: −?[\d.]+)"', data.get("text/html", ""))
    return "\n".join([data["text/plain"], *map(html.unescape, cells)])


@pytest.mark.nightly
def test_the_lens_says_paris_at_the_last_layer_and_its_direction_says_berlin(shared: Any) -> None:
    *_, cards = run("logit_lens", shared)
    answers = dict(re.findall(r"^ *(plain|\+[\d.]+)  (.*)$", cards, re.M))
    assert answers["plain"].startswith(" Paris")
    assert answers["+0.4"].startswith(" Berlin")


@pytest.mark.nightly
def test_ablating_the_refusal_direction_ends_the_refusal(shared: Any) -> None:
    _, cards, receipt = run("refusal_direction", shared)
    assert "I'm sorry" in cards.split("+1")[0]
    assert "I'm sorry" not in cards.split("+1")[1]
    assert "ok" in receipt


@pytest.mark.nightly
def test_the_answer_moves_from_the_name_to_the_end_by_one_layer_of_attention(shared: Any) -> None:
    known, stream, written, heads = run("causal_tracing", shared)
    assert known == "[' Paris', ' Rome']"
    assert (
        value(stream, 10, "position 2 'osse'") > 0.7 > 0.1 > value(stream, 10, "position 8 ' of'")
    )
    assert (
        value(stream, 28, "position 8 ' of'") > 0.7 > 0.1 > value(stream, 28, "position 2 'osse'")
    )
    assert value(written, 23, "position 8 ' of'") > 0.5
    assert value(heads, 23, "head 4") + value(heads, 23, "head 5") > 0.4


def value(cells: str, layer: int, column: str) -> float:
    found = re.search(rf"^layer {layer}, {re.escape(column)}: (.*)$", cells, re.M)
    assert found, cells
    return float(found[1].replace("−", "-"))


@pytest.mark.nightly
def test_a_stronger_push_reads_gladder(shared: Any) -> None:
    directions, tuning, cards = run("steer_and_tune", shared)
    assert "best_layer" in directions
    assert tuning.startswith("Tuning(4 layers × 5 scales)")
    assert len(re.findall(r"^ *[+−][\d.]+  ", cards, re.M)) == 5


@pytest.mark.nightly
def test_a_feature_of_cooking_turned_up_writes_of_food(shared: Any) -> None:
    trained, rows, cards = run("sae_feature", shared)
    assert "variance explained" in trained
    found = {word: float(one) for one, word in re.findall(r"^ *\d+ +([\d.]+)  '(.*)'$", rows, re.M)}
    assert max(found, key=lambda word: found[word]) in (" garlic", " parsley")
    assert found[" book"] == found[" moon"] == 0
    plain, *steered = re.findall(r"^ *(?:plain|\+\d+)  (.*)$", cards, re.M)
    food = re.compile("recipe|bake|cook|garlic|butter|sauce|salt|pepper|onion")
    assert not food.search(plain)
    assert all(food.search(each) for each in steered)


@pytest.mark.nightly
def test_a_probe_follows_a_stream(hub: Path) -> None:
    with notebooks.kernel(hub) as started:
        _, shown = run("live_probe", started)
    rows = re.findall(r"^ *\d+ +(−?[\d.]+)  '", shown, re.M)
    scores = [float(row.replace("−", "-")) for row in rows]
    assert len(scores) == 47
    assert max(scores[21:]) > 0 > sum(scores[5:18]) / 13
