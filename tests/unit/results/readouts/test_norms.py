"""Norms as a result: by site and layer, as JSON, and as a picture."""

import json

import pytest
import torch

from midstream.results.readouts.norms import NormResults, NormRows


def made() -> NormResults:
    rows = {
        ("resid_post", layer): NormRows(
            torch.tensor([1.5 + layer, 0.0, 2e4]), torch.tensor([0, 3, 4])
        )
        for layer in range(2)
    }
    rows["z", 1] = NormRows(torch.tensor([3.0]), torch.tensor([4]))
    return NormResults(rows, 2)


def test_they_are_found_by_site_and_layer() -> None:
    norms = made()
    assert norms["z", 1].values.tolist() == [3.0]
    assert norms["resid_post", -1] is norms["resid_post", 1]
    assert ("resid_post", 2) not in norms
    assert list(norms) == [("resid_post", 0), ("resid_post", 1), ("z", 1)]
    with pytest.raises(KeyError, match=r"no norms of \('z', 0\); there are \('resid_post', 0\)"):
        norms["z", 0]


def test_a_key_is_what_it_is_of_activations() -> None:
    norms = made()
    last = norms["resid_post", 1]
    assert norms["resid_post.1"] is norms["blocks.1.hook_resid_post"] is last
    assert norms["post_mlp", -1] is last
    with pytest.raises(KeyError, match="no norms of 1;"):
        norms[1]  # of which site?
    of_one_site = NormResults({tap: norms[tap] for tap in norms if tap[0] == "resid_post"}, 2)
    assert of_one_site[1] is of_one_site[-1] is last
    for key in (2, True, 1.0, "resid_post", ("resid_pre", 1), slice(1)):
        with pytest.raises(KeyError, match="there are no norms of"):
            of_one_site[key]


def test_they_are_read_back_from_their_json_form() -> None:
    norms = made()
    assert norms.nbytes == 4 * 7
    again = NormResults.from_json(json.loads(json.dumps(norms.to_json())))
    assert list(again) == list(norms)
    for tap, rows in norms.items():
        assert torch.equal(again[tap].values, rows.values)
        assert torch.equal(again[tap].positions, rows.positions)
        assert (again[tap].values.dtype, len(again[tap])) == (torch.float32, len(rows))
