"""What `llm.sites()` says of a model."""

import pytest

from midstream import sites
from midstream.plan import ModelShape
from midstream.results.site_table import SiteState, SiteTable

SHAPE = ModelShape(
    5,
    8,
    [("resid_post", layer) for layer in (0, 1, 2, 4)] + [("resid_mid", 3), ("z", 1), ("router", 1)],
    {("resid_mid", layer): "no <norm>" for layer in (0, 1)},
    widths={("z", 1): 12, ("router", 1): 5},
    heads={("z", 1): 3},
)
TABLE = SiteTable.of(SHAPE)


def test_it_has_every_site_of_every_layer_in_the_order_of_a_forward():
    places = [(state.layer, sites.NAMES.index(state.site)) for state in TABLE.states]
    assert places == sorted(places)
    assert len(places) == 5 * len(sites.IN_LAYERS) + len(sites.ENDS)
    assert TABLE["final_norm"].layer == 4
    assert {(state.site, state.layer) for state in TABLE.states if state.tapped} == SHAPE.taps
    assert all(bool(state.reason) != state.tapped for state in TABLE.states)


def test_one_state_is_found_by_site_or_alias_and_layer():
    found = TABLE["resid_post", 4]
    assert found == TABLE["post_block", 4] == SiteState("resid_post", 4, True, width=8)
    assert TABLE["z", 1] == SiteState("z", 1, True, width=12, heads=3)
    assert TABLE["z", 2].width == TABLE["z", 2].heads == 0
    assert TABLE["resid_mid", 1].reason == "no <norm>"
    assert "settings `sites` and `layers`" in TABLE["resid_mid", 2].reason


def test_what_the_model_lacks_is_not_there():
    for site, layer in (("resid", 0), ("resid_post", 5), ("resid_post", -1)):
        with pytest.raises(KeyError, match=f"there is no {site} at layer {layer}"):
            TABLE[site, layer]


def test_layers_that_are_alike_stand_together():
    rows = TABLE.rows()
    assert ("resid_post", "0–2, 4", "8", "tapped") in rows
    assert ("resid_mid", "0–1", "", "no <norm>") in rows
    assert ("resid_mid", "3", "8", "tapped") in rows
    assert ("z", "1", "3 heads of 4", "tapped") in rows
    assert ("router", "1", "5", "tapped") in rows
    assert [layers for site, layers, *_ in rows if site == "resid_mid"] == ["0–1", "2, 4", "3"]
    assert list(dict.fromkeys(site for site, *_ in rows)) == list(sites.NAMES)


def test_its_text_is_a_table_with_aligned_columns():
    lines = str(TABLE).splitlines()
    assert lines[0].split() == ["site", "layers", "width"]
    assert len(lines) == 1 + len(TABLE.rows())
    column = lines[0].index("layers")
    assert all(line[column - 1] == " " and line[column] != " " for line in lines)
    assert not any(line.endswith(" ") for line in lines)


def test_its_html_is_escaped_and_has_the_same_rows():
    shown = TABLE._repr_html_()
    assert "no &lt;norm&gt;" in shown
    assert shown.count("<tr>") == 1 + len(TABLE.rows())


def test_a_model_without_taps_says_why():
    table = SiteTable.of(ModelShape(1, 4, []))
    assert not any(state.tapped for state in table.states)
    assert all("not tapped; add it" in state.reason for state in table.states)
