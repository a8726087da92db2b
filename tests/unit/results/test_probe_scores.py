"""What a caller gets of its probes."""

from __future__ import annotations

import pytest
import torch

from midstream.results.probe_scores import Probes


@pytest.fixture
def probes():
    return Probes(
        {"b": torch.tensor([0.5, -1.0]), "a": torch.zeros(0)},
        {"b": torch.tensor([1, 3]), "a": torch.zeros(0, dtype=torch.int64)},
        torch.tensor([10, 11, 12, 13]),
    )


def test_it_is_a_mapping_of_names_in_the_order_of_the_plan(probes):
    assert list(probes) == ["b", "a"]
    assert len(probes) == 2
    assert "a" in probes
    assert "c" not in probes
    assert probes["b"].tolist() == [0.5, -1.0]
    assert probes.get("c") is None
    assert dict(probes.items())["a"].shape == (0,)


def test_scores_come_with_their_positions_and_tokens(probes):
    assert probes.positions_of("b").tolist() == [1, 3]
    assert probes.token_ids_of("b").tolist() == [11, 13]
    assert probes.token_ids_of("a").tolist() == []


@pytest.mark.parametrize("ask", ["__getitem__", "positions_of", "token_ids_of"])
def test_an_unknown_name_is_refused_with_those_that_there_are(probes, ask):
    with pytest.raises(KeyError, match="there is no probe 'c'; there are b, a"):
        getattr(probes, ask)("c")


def test_it_shows_names_and_counts(probes):
    assert repr(probes) == "Probes(b: 2, a: 0)"


def test_it_keeps_its_own_names():
    given = {"a": torch.zeros(1)}
    probes = Probes(given, {"a": torch.tensor([0])}, torch.tensor([1]))
    given["b"] = torch.zeros(1)
    assert list(probes) == ["a"]
