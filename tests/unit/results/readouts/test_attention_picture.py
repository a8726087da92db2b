"""Pictures of attention weights: each weight is where its query, key and head are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from unit.viz.pages import Page

from midstream.errors import SpecError
from midstream.results.readouts.attention import AttentionRows

WORDS = ["The", " <b>", " sat"]


def rows(reduce: str, values: object, keys: object = None) -> AttentionRows:
    """Two queries, at positions 1 and 2, of the heads 0 and 3."""
    found = torch.tensor(values)
    places = None if keys is None else torch.tensor(keys)
    return AttentionRows(reduce, found, places, torch.tensor([1, 2]), (0, 3))


FULL = [[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], [[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]]]


def labels(page: Page) -> list[str]:
    return [cell.attributes["aria-label"] for cell in page.all("td")]


def test_weights_are_a_cell_for_each_query_and_key_as_a_mean_over_the_heads() -> None:
    page = Page(rows("full", FULL)._repr_html_())
    assert page.one("figcaption").text == "attention, mean of 2 heads"
    assert labels(page) == [
        "query 1, key 0: 0.75",
        "query 1, key 1: 0.25",
        "query 1, key 2: 0.00",
        "query 2, key 0: 0.40",
        "query 2, key 1: 0.30",
        "query 2, key 2: 0.30",
    ]


def test_one_head_and_the_texts_of_tokens_are_shown() -> None:
    page = Page(rows("full", FULL).picture(WORDS, head=3).body)
    page.check_harmless()
    assert page.one("figcaption").text == "attention, head 3"
    assert labels(page)[:2] == ["query 1  <b>, key 0 The: 1.00", "query 1  <b>, key 1  <b>: 0.00"]
    with pytest.raises(SpecError, match=r"head: expected one of \[0, 3\], got 1"):
        rows("full", FULL).picture(head=1)


def test_scores_of_keys_that_a_query_does_not_see_are_empty_cells() -> None:
    hidden = -float("inf")
    values = [[[1.0, 2.0, hidden]] * 2, [[1.0, 2.0, 4.0]] * 2]
    page = Page(rows("scores", values).picture().body)
    assert labels(page)[2] == "query 1, key 2: no value"
    assert page.all("td")[5].classes == {"c", "b40"}


@pytest.mark.parametrize(("reduce", "said"), [("mass", "0.25"), ("entropy", "0.25 nats")])
def test_reduced_weights_are_a_cell_for_each_query_and_head(reduce: str, said: str) -> None:
    page = Page(rows(reduce, [[0.5, 1.0], [0.25, 0.75]])._repr_html_())
    assert page.one("figcaption").text == f"{reduce} of attention"
    assert labels(page)[2] == f"query 2, head 0: {said}"
    assert len(Page(rows(reduce, [[0.5, 1.0], [0.25, 0.75]]).picture(head=3).body).all("td")) == 2


def test_the_keys_with_most_weight_are_a_line_for_each_query_and_head() -> None:
    keys = [[[0, 1], [0, -1]], [[2, 1], [0, 1]]]
    values = [[[0.5, 0.5], [1.0, 0.0]], [[0.5, 0.3], [0.6, 0.3]]]
    page = Page(rows("top_keys", values, keys).picture(WORDS).body)
    assert [th.text for th in page.all("th", scope="row")] == [
        "1  <b>, head 0",
        "1  <b>, head 3",
        "2  sat, head 0",
        "2  sat, head 3",
    ]
    assert [cell.text for cell in page.all("td")][:4] == ["0 The", "1  <b>", "0 The", ""]
    assert labels(page)[4] == "query 2  sat, head 0, key 1: 2  sat, 0.50"
    assert page.all("td")[3].classes == {"c"}


@pytest.mark.parametrize("reduce", ["full", "top_keys"])
def test_a_notebook_shows_the_first_part_of_many_queries(reduce: str) -> None:
    values = torch.rand(200, 2, 300 if reduce == "full" else 3)
    keys = torch.zeros(200, 2, 3, dtype=torch.int64) if reduce == "top_keys" else None
    many = AttentionRows(reduce, values, keys, torch.arange(200), (0, 1))
    page = Page(many._repr_html_())
    assert page.one("figcaption").text.endswith(", the first part")
    assert len(page.all("td")) == (128 * 128 if reduce == "full" else 128 * 3)


def test_arrays_of_a_client_without_torch_are_drawn_alike() -> None:
    given = rows("full", FULL)
    arrays = AttentionRows(
        "full",
        np.array(FULL, np.float32),  # type: ignore[arg-type]
        None,
        np.array([1, 2]),  # type: ignore[arg-type]
        (0, 3),
    )
    assert arrays._repr_html_() == given._repr_html_()
