"""What is pushed to a repository of the Hub is read again as it was, with a card that names it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from support.hub import StandIn, hub_stand_in
from support.refusals import refused_calls
from unit.store.making import entry, same, write

from midstream import SAE, JacobianLens, Probe, TunedLens
from midstream.errors import SpecError
from midstream.lab.fit import Directions, LayerScore
from midstream.store import Store, open_store

V = np.arange(1.0, 4.0, dtype="f4")
SCORES = {12: LayerScore(0.75, 0.5, 1.25)}
DIRECTIONS = Directions(
    np.stack([V, 2 * V]), (11, 12), midpoints=np.stack([V, V]), scores=SCORES, method="mean",
    num_folds=5, model_type="llama",
)  # fmt: skip
MATRIX = torch.arange(9.0).reshape(3, 3)
ONES = torch.ones(3)
RESID = "blocks.3.hook_resid_post"
AUTOENCODER = SAE(MATRIX, ONES, MATRIX.T, ONES, ONES / 2, hook_name=RESID)
# (object, files, words of the card, what must be equal)
OBJECTS: list[tuple[Any, set[str], list[str], Any]] = [
    (
        DIRECTIONS,
        {"directions.safetensors"},
        ["# mood", "| Site | resid_post |", "| Layers | 11–12 |", "| Method | mean |",
         "| 12 * | 0.750 | 0.500 | 1.25 |", "edits=1.0 * found[12]"],
        lambda one: one.to_json(),
    ),
    (
        Probe(V, layer=4, bias=0.5, name="guard"),
        {"probe.safetensors"},
        ["| Layers | 4 |", "Scores on my data: 0.9", '.probes["guard"]'],
        lambda one: one.to_dict(),
    ),
    (
        AUTOENCODER,
        {"cfg.json", "sae_weights.safetensors"},
        ["| Hook point | blocks.3.hook_resid_post |", "| Features | 3 |", "JumpReLU"],
        lambda one: (one.encode(MATRIX).tolist(), one.hook_name),
    ),
    (
        TunedLens({0: MATRIX, 1: MATRIX.T}, {0: ONES, 1: ONES}),
        {"config.json", "params.safetensors"},
        ["Tuned lens", "| After layers | 0 to 1 |"],
        lambda one: (one.matrices[1].tolist(), one.biases[0].tolist(), one.adds),
    ),
    (
        JacobianLens({2: MATRIX, 5: MATRIX.T}),
        {"lens.safetensors"},
        ["Jacobian lens", "| After layers | 3, 6 |"],
        lambda one: {depth: matrix.tolist() for depth, matrix in one.matrices.items()},
    ),
]  # fmt: skip


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StandIn]:
    with hub_stand_in(monkeypatch, tmp_path / "cache") as found:
        yield found


def test_objects_come_back_with_cards_that_say_what_they_are(hub: StandIn, tmp_path: Path) -> None:
    for nth, (given, files, words, content) in enumerate(OBJECTS):
        name = f"me{nth}/mood"
        url = given.push_to_hub(
            name, model="org/model@abc", license="mit", notes="Scores on my data: 0.9"
        )
        assert url.startswith("http://127.0.0.1:")
        pushed = hub.repositories[f"models/{name}"]
        assert pushed.keys() == {*files, "README.md"}
        card = pushed["README.md"].decode()
        data = yaml.safe_load(card.split("---")[1])
        assert (data["base_model"], data["license"]) == ("org/model", "mit")
        assert data["library_name"] == "midstream"
        for word in (*words, "| Model | org/model |", "| Revision | abc |", "| Licence | mit |"):
            assert word in card, card
        hub.asked.clear()
        read = type(given).from_pretrained(name)
        assert set(hub.asked) == files
        assert type(read) is type(given)
        assert content(read) == content(given)
        folder = tmp_path / str(nth)
        folder.mkdir()
        given.to_folder(folder)
        assert content(type(given).from_pretrained(folder)) == content(given)


def test_a_probe_of_an_earlier_release_is_read(hub: StandIn) -> None:
    old = b'{"direction": [1, 2, 3], "layer": 4, "bias": 0.5, "name": "guard"}'
    hub.repositories["models/me/old"] = {"probe.json": old}
    assert Probe.from_pretrained("me/old") == Probe(V, layer=4, bias=0.5, name="guard")
    hub.repositories["models/me/cut"] = {"probe.json": b"{"}
    with pytest.raises(SpecError, match=r"probe\.json: expected JSON"):
        Probe.from_pretrained("me/cut")


def test_an_sae_is_read_from_a_folder_within_a_repository(hub: StandIn, tmp_path: Path) -> None:
    AUTOENCODER.to_folder(tmp_path)
    files = {
        f"layers.3/{file.name}": file.read_bytes() for file in tmp_path.iterdir() if file.is_file()
    }
    hub.repositories["models/me/many"] = files | {"layers.4/huge.safetensors": b""}
    read = SAE.from_pretrained("me/many", "layers.3")
    assert torch.equal(read.encode(MATRIX), AUTOENCODER.encode(MATRIX))
    assert set(hub.asked) == set(files)


def test_a_store_is_a_data_set_of_its_shards(hub: StandIn, tmp_path: Path) -> None:
    write(tmp_path / "store", [entry("a"), entry("b", seed=5)])
    store = open_store(tmp_path / "store")
    store.push_to_hub("me/rows", model="org/model")
    pushed = hub.repositories["datasets/me/rows"]
    assert pushed.keys() == {*(shard.name for shard in store.shards), "README.md"}
    assert "| Requests | 2 |" in pushed["README.md"].decode()
    assert "| Licence | none is given |" in pushed["README.md"].decode()
    read = Store.from_pretrained("me/rows")
    assert [one.request for one in read.requests] == ["a", "b"]
    for ours, theirs in zip(read.requests, store.requests, strict=True):
        for tap, rows in theirs.activations().items():
            assert same(ours.activations()[tap], rows)


def test_what_is_not_there_is_refused_by_the_name_of_the_repository(hub: StandIn) -> None:
    hub.repositories["models/me/empty"] = {"README.md": b""}
    refused_calls(
        (lambda: Directions.from_pretrained("me/gone"), "repo_id", "'me/gone': 404"),
        (lambda: Directions.from_pretrained("not a name"), "repo_id", "Repo id must"),
        (lambda: Directions.from_pretrained("me/empty"), "path", "directions.safetensors: No such"),
        (lambda: Probe.from_pretrained("me/empty"), "it cannot be read"),
        (lambda: SAE.from_pretrained("me/gone", "layers.3"), "repo_id", "'me/gone': 404"),
        (lambda: DIRECTIONS.push_to_hub("a/b/c", model="m"), "repo_id", "Repo id must"),
    )
