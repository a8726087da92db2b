"""Results of SAEs as the caller reads them."""

import pytest
import torch

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
