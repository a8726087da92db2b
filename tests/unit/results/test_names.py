"""Keys of activations in every spelling, stacked layers and prompts, files."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.refusals import refused

import midstream
from midstream.errors import SpecError
from midstream.results.activations import Activations
from midstream.results.serialization import pack, unpack


def make(rows=3, layers=(1, 3), names=("resid_post",), num_layers=4, first=0.0):
    taps = [(site, layer) for layer in layers for site in names]
    values = {
        tap: torch.arange(rows * 2.0).reshape(rows, 2) + first + 10 * nth
        for nth, tap in enumerate(taps)
    }
    places = torch.arange(rows)
    return Activations(values, dict.fromkeys(taps, places), [5] * rows, num_layers)


def test_a_tap_is_read_by_any_of_its_names():
    for key in (
        ("resid_post", 3),
        ("resid_post", -1),
        ("post_mlp", np.int64(3)),
        ("hook_resid_post", torch.tensor(3)),
        "blocks.3.hook_resid_post",
        "model.layers.3.output",
        "model.layers[-1].output",
        "resid_post.3",
        3,
        -1,
    ):
        acts = make()
        assert key in acts, key
        assert acts[key] is acts["resid_post", 3]


def test_a_layer_that_is_no_key_says_why():
    assert 3 not in make(names=("resid_pre", "resid_post"))
    with pytest.raises(KeyError, match="the number of layers is unknown here"):
        make(num_layers=None)["resid_post", -1]


def test_a_site_alone_is_its_layers_stacked():
    acts = make()
    assert acts["resid_post"].shape == (2, 3, 2)
    assert torch.equal(acts["resid_post"][1], acts["resid_post", 3])
    assert "hook_resid_post" in acts
    with pytest.raises(KeyError, match="was not captured"):
        acts["resid_pre"]


def test_layers_at_other_positions_are_not_stacked():
    values = {("resid_post", layer): torch.ones(2, 2) for layer in (0, 1)}
    places = {("resid_post", 0): torch.tensor([0, 1]), ("resid_post", 1): torch.tensor([0, 2])}
    with pytest.raises(ValueError, match="at other positions at layer 1 than at layer 0"):
        Activations(values, places, [1, 2, 3])["resid_post"]


def test_the_form_of_transformer_lens_has_its_names_and_a_batch_dimension():
    acts = make(names=("mlp_in", "resid_post"), layers=(3,))
    found = acts.to_transformer_lens()
    assert list(found) == ["blocks.3.mlp.hook_in", "blocks.3.hook_resid_post"]
    assert found["blocks.3.hook_resid_post"].shape == (1, 3, 2)
    assert all(name in acts for name in found)


def test_a_file_and_packed_rows_are_read_again(tmp_path):
    acts = make(names=("mlp_in", "resid_post"))
    path = acts.save(tmp_path / "rows.safetensors")
    for again in (Activations.load(path), unpack(pack(acts, 2, torch.float32))):
        assert set(again.keys()) == set(acts.keys())
        assert all(torch.equal(again[tap], acts[tap]) for tap in acts)
        assert torch.equal(again["resid_post", -1], acts["resid_post", 3])
        assert (again.positions.tolist(), again.token_ids.tolist()) == ([0, 1, 2], [5, 5, 5])


def test_another_file_is_not_loaded(tmp_path):
    (tmp_path / "x").write_bytes(b"pickle")
    with pytest.raises(SpecError, match="expected a safetensors file"):
        Activations.load(tmp_path / "x")


def test_prompts_are_stacked_over_layers():
    outputs = [SimpleNamespace(activations=make(first=first)) for first in (0.0, 100.0)]
    found = midstream.stack(outputs, "resid_post")
    assert found.shape == (2, 2, 3, 2)
    assert torch.equal(found[1, 0], outputs[1].activations["resid_post", 1])
    assert torch.equal(midstream.stack(outputs), found)
    assert torch.equal(midstream.stack(outputs, layers=[-1]), found[:, 1:])
    assert torch.equal(midstream.stack(outputs, "blocks.3.hook_resid_post"), found[:, 1:])
    assert torch.equal(midstream.stack([make(), make()], row=-1), found[[0, 0], :, -1])


def test_prompts_of_unequal_rows_are_stacked_by_one_row_alone():
    outputs = [make(rows=3), make(rows=2)]
    with pytest.raises(SpecError, match=r"^outputs\[1\]: has 2 rows where others have 3.*row=-1"):
        midstream.stack(outputs)
    assert midstream.stack(outputs, row=-1).shape == (2, 2, 2)


def test_what_cannot_be_stacked_is_rejected():
    refused(
        lambda call: midstream.stack(call[0], **call[1]),
        (([], {}), "^outputs: expected at least one"),
        (([SimpleNamespace(activations=None)], {}), r"^outputs\[0\]: has no activations"),
        (([SimpleNamespace(outputs=[1, 2])], {}), r"^outputs\[0\]: has several completions"),
        (([make()], {"site": "resid_pre"}), r"^outputs\[0\]: .*was not captured"),
        (([make()], {"site": "resid_psot"}), "^site: unknown site"),
        (([make()], {"layers": [0]}), r"^outputs\[0\]: .*was not captured"),
        (([make(names=("resid_pre", "resid_post"))], {}), "^site: give one of the captured"),
        (([make()], {"row": 7}), r"^outputs\[0\]: "),
    )
