"""Results of SAEs as the caller reads them."""

import pytest
import torch
from unit.viz.pages import Page

from midstream.results.readouts.features import FeatureResults, FeatureRows


def rows() -> FeatureRows:
    """Two positions; one feature is active at the second."""
    return FeatureRows(
        torch.tensor([[7, 2], [40, -1]]),
        torch.tensor([[3.0, 1.5], [0.25, 0.0]]),
        (2,),
        torch.tensor([[1.5], [0.0]]),
        torch.tensor([9, 1]),
        torch.tensor([3, 7]),
        "resid_post",
        12,
    )


def test_the_json_form_is_read_back() -> None:
    given = FeatureResults({"sae": rows()})
    found = FeatureResults.from_json(given.to_json())["sae"]
    for name in ("ids", "values", "feature_values", "l0", "positions"):
        assert torch.equal(getattr(found, name), getattr(rows(), name))
    assert (found.features, found.site, found.layer) == ((2,), "resid_post", 12)
    assert given.nbytes == rows().nbytes == 4 * (4 + 4 + 2 + 2)
    with pytest.raises(KeyError, match=r"there are no features 'x'; there are 'sae'"):
        given["x"]


def test_the_table_has_a_line_for_each_position() -> None:
    assert len(rows()) == 2
    assert repr(rows()) == (
        "FeatureRows(2 positions at resid_post of layer 12: top 2 and 1 features)"
    )
    assert rows().table() == "3  7 3      2 1.5\n7  40 0.25"
    tokens = ["<b>"] * 8
    assert rows().table(tokens, top=1) == "3  '<b>'  7 3\n7  '<b>'  40 0.25"


def test_the_picture_has_a_cell_for_each_active_feature() -> None:
    page = Page(rows()._repr_html_())
    assert page.one("figcaption").text == "features at resid_post of layer 12"
    assert [(cell.text, cell.attributes["aria-label"]) for cell in page.all("td")] == [
        ("7", "position 3, most active 1: 7, 3"),
        ("2", "position 3, most active 2: 2, 1.5"),
        ("40", "position 7, most active 1: 40, 0.25"),
        ("", "position 7, most active 2: "),
    ]
    assert page.all("td")[0].classes == {"c", "b40"}
    assert page.all("td")[3].classes == {"c"}
    page = Page(rows().picture(["<b>"] * 8, top=1).body)
    page.check_harmless()
    assert [th.text for th in page.all("th", scope="row")] == ["3 <b>", "7 <b>"]
    assert len(page.all("td")) == 2


def test_notebooks_show_the_first_rows_of_many() -> None:
    every = torch.arange(300)
    ones = torch.ones(300, 1)
    many = FeatureRows(every[:, None], ones, (), ones[:, :0], every, every, "mlp_out", 3)
    page = Page(many._repr_html_())
    assert page.one("figcaption").text == "features at mlp_out of layer 3: 256 of 300 positions"
    assert len(page.all("td")) == 256
    assert len(Page(many.picture().body).all("td")) == 300
