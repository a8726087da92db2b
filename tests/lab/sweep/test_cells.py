"""The cells of a grid: each once, in an order that the prefix cache serves."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream import KL
from midstream.errors import SpecError
from midstream.lab.sweep import SweepRequest
from midstream.lab.sweep.alignment import align_positions
from midstream.lab.sweep.cells import plan_grid
from midstream.plan import Positions
from midstream.plan.positions.prompt import Prompt
from midstream.plan.shape import ModelShape

TAPS = [*product(["resid_pre", "mlp_out"], range(4)), ("z", 0), ("z", 2), ("k", 0)]
SHAPE = ModelShape(4, 8, TAPS, heads={("z", 0): 4, ("z", 2): 4, ("k", 0): 2}, widths={("k", 0): 4})


def grid(length=6, aligned=None, rows=None, **more):
    request = SweepRequest("a", KL(), **{"sites": "resid_pre", **more})
    return plan_grid(request, SHAPE, Prompt(length, tuple(range(length))), aligned, rows)


@given(
    st.integers(1, 20),
    st.sets(st.integers(0, 3), min_size=1),
    st.lists(st.sampled_from(["resid_pre", "mlp_out"]), min_size=1, unique=True),
    st.integers(1, 20),
)
def test_each_cell_is_there_once_with_its_labels(length, layers, sites, source):
    aligned = align_positions("suffix", length, source)
    found = grid(length, aligned, layers=sorted(layers), sites=sites)
    assert found.shape == (len(sites), len(layers), length)
    assert found.coords == {
        "site": sites, "layer": sorted(layers), "position": list(range(length))
    }  # fmt: skip
    wanted = set(product(sites, layers, aligned))
    assert {(*one.tap, *one.positions) for one in found.cells} == wanted
    assert len(found.cells) == len(wanted)
    for one in found.cells:
        site, layer, position = one.index
        assert one.tap == (sites[site], sorted(layers)[layer])
        assert one.positions == found.places[position]


@given(st.permutations(range(8)), st.integers(1, 8))
def test_the_first_patched_positions_descend(order, count):
    groups = {str(nth): order[nth : nth + count] for nth in range(8)}
    found = grid(8, groups=groups)
    first = [one.positions[0] for one in found.cells]
    assert first == sorted(first, reverse=True)
    assert all(one.positions == tuple(sorted(one.positions)) for one in found.cells)


def test_cells_of_sites_that_a_layer_lacks_and_those_without_a_row_are_left_out():
    found = grid(1, sites=["resid_pre", "z"])
    assert found.coords["layer"] == [0, 1, 2, 3]
    assert {one.index[:2] for one in found.cells} == {*product([0], range(4)), (1, 0), (1, 2)}
    rows = {("resid_pre", 1): frozenset({0, 2}), ("resid_pre", 3): frozenset({1})}
    found = grid(3, {0: 0, 1: 1, 2: 2}, rows)
    assert {(one.tap[1], one.positions[0]) for one in found.cells} == {(1, 0), (1, 2), (3, 1)}
    assert grid(4, exclude=[0, -1]).coords["position"] == [1, 2]
    assert grid(4, positions=Positions("all", "prompt")).coords["position"] == [0, 1, 2, 3]


def test_heads_are_a_dimension_and_a_group_is_one_cell():
    found = grid(2, sites="z", heads="all")
    assert found.dims == ("site", "layer", "position", "head")
    assert found.coords["head"] == [0, 1, 2, 3]
    assert found.coords["layer"] == [0, 2]
    assert {(one.index[3], one.head) for one in found.cells} == {(nth, nth) for nth in range(4)}
    some = grid(2, sites=["z", "k"], layers=0, heads=[1])
    assert {one.index for one in some.cells} == set(product(range(2), [0], range(2), [0]))
    found = grid(6, {4: 0, 5: 1}, layers=0, groups={"all": "prompt", "end": [5, 4]})
    assert found.coords["position"] == ["all", "end"]
    assert found.places == ((0, 1, 2, 3, 4, 5), (4, 5))
    assert [one.index for one in found.cells] == [(0, 0, 1)]


@pytest.mark.parametrize(
    ("more", "path"),
    [
        ({"layers": 4}, "layers"),
        ({"sites": "attn_out"}, "sites"),
        ({"sites": "z", "layers": 1}, "layers"),
        ({"positions": 6}, "positions"),
        ({"groups": {"a": [0, 6]}}, "groups.a[1]"),
        ({"heads": 0}, "heads"),
        ({"sites": ["z", "k"], "layers": 0, "heads": "all"}, "heads"),
        ({"aligned": {}}, "align"),
        ({"aligned": {0: 0}, "rows": {}}, "source"),
        ({"rows": {("resid_post", 0): frozenset()}}, "source"),
    ],
)
def test_what_the_model_or_the_prompt_lacks_is_refused(more, path):
    with pytest.raises(SpecError) as error:
        grid(**more)
    assert error.value.path == path


def test_positions_of_groups_have_a_budget():
    length, groups = 1000, {f"g{nth}": "prompt" for nth in range(66)}
    problem = "with it the groups have 66000 positions, and the budget is 65536"
    with pytest.raises(SpecError, match=problem) as caught:
        grid(length, layers=0, groups=groups)
    assert caught.value.path == "groups.g65"
    del groups["g65"]
    assert len(grid(length, layers=0, groups=groups).cells) == 65
    everywhere = {"layers": "all", "sites": ["resid_pre", "mlp_out"], "groups": groups}
    assert len(grid(length, **everywhere).cells) == 520
    # 65,000 positions at each of so many taps are above the budget of all cells.
    taps = [("resid_pre", layer) for layer in range(17)]
    request = SweepRequest("a", KL(), sites="resid_pre", groups=groups)
    with pytest.raises(SpecError, match="the cells patch 1105000 positions, and the budget"):
        plan_grid(request, ModelShape(17, 8, taps), Prompt(length, tuple(range(length))), None)
