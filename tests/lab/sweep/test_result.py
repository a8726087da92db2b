"""`Sweep`: its files, tables and pictures."""

import json

import numpy as np
import pytest
from matplotlib.figure import Figure
from unit.viz.drawn import drawn, read, same

from midstream import LogitDiff, LogProb, Recovered
from midstream.errors import MissingExtraError, SpecError
from midstream.lab.sweep import Sweep, SweepReceipts
from midstream.results.receipt import Edited, Receipt

DIMS = ("site", "layer", "position")
COORDS = {
    "site": ["resid_pre", "z"], "layer": [0, 7], "position": [3, 4, "end"]
}  # fmt: skip
TOKENS = (" the", "<b>", " of it")


def made(**more):
    values = np.array(
        [[[0.0, 1.0, 0.5], [np.nan, -3.0, 0.25]], [[0.1, 0.2, 0.3], [2.0, 0.0, 0.0]]], np.float32
    )
    receipts = SweepReceipts((Receipt("1", 9, 1, (), Edited(3, 2, 2, 1)),), 90, 64)
    given = {
        "values": values, "dims": DIMS, "coords": COORDS, "metric": Recovered(LogProb(" a")),
        "corrupt": -5.0, "clean": -1.0, "noise_floor": 1e-6, "tokens": TOKENS, "receipts": receipts,
    }  # fmt: skip
    return Sweep(**{**given, **more})


@pytest.mark.parametrize(
    "more",
    [{}, {"metric": "a_function", "clean": None, "noise_floor": float("nan")}, {"corrupt": np.nan}],
)
def test_a_file_has_all_of_a_sweep(tmp_path, more):
    sweep = made(**more)
    found = Sweep.load(sweep.save(tmp_path / "sweep.json"))
    assert found.to_json() == sweep.to_json()
    np.testing.assert_array_equal(found.values, sweep.values)
    assert found.values.dtype == np.float32
    assert found.receipts == sweep.receipts
    assert found.metric == sweep.metric


@pytest.mark.parametrize(
    "change",
    [
        {"format": "midstream.sweep/2"},
        {"values": "AAAA"},
        {"dims": 3},
        {"coords": {}},
        {"clean": "much"},
        {"receipts": [{}]},
        {"more": 1},
    ],
)
def test_what_is_no_sweep_is_refused(tmp_path, change):
    target = tmp_path / "sweep.json"
    target.write_text(json.dumps({**made().to_json(), **change}))
    with pytest.raises(SpecError):
        Sweep.load(target)


def test_the_best_cells_are_farthest_from_the_unpatched_run_and_receipts_are_summed():
    assert [one["value"] for one in made().best(3)] == [-3.0, 2.0, 1.0]
    first = made().best(1)[0]
    assert first == {
        "site": "resid_pre", "layer": 7, "position": 4, "token": "<b>", "value": -3.0
    }  # fmt: skip
    assert len(made().best(100)) == 11
    plain = made(metric=LogitDiff(1, 2), corrupt=-3.0).best(1)[0]
    assert plain["value"] == 2.0
    found = made().receipts
    assert (found.expected, found.applied, found.cached, found.status) == (3, 2, 1, "ok")
    assert "3 of 3 edits; 64 of 90 prompt tokens" in str(found)
    bad = SweepReceipts((Receipt("1", 9, 1, (), None, problems=("lost",)),), 9, 0)
    assert bad.status == "error"
    assert bad.problems == ("request 1: lost",)


def test_labelled_arrays_and_tables_have_each_cell():
    array = made().to_xarray()
    assert array.sel(site="z", layer=7).values.tolist() == [2.0, 0.0, 0.0]
    assert array.token.values.tolist() == list(TOKENS)
    assert array.attrs["clean"] == -1.0
    table = made().to_pandas()
    assert list(table.columns) == [*DIMS, "token", "value"]
    assert len(table) == 12
    row = table[(table.site == "resid_pre") & (table.layer == 7) & (table.position == 4)]
    assert row.value.item() == -3.0
    assert table.value.isna().sum() == 1


@pytest.mark.parametrize(
    ("package", "extra", "use"),
    [
        ("xarray", "sweep", Sweep.to_xarray),
        ("pandas", "sweep", Sweep.to_pandas),
        ("matplotlib", "plot", Sweep.plot),
    ],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, package, extra, use):
    from importlib import util

    find = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(MissingExtraError, match=rf"midstream\[{extra}\]"):
        use(made())


def plotted(sweep, count):
    return [read(axes) for axes in sweep.plot(Figure().subplots(1, count))]


def test_plots_have_a_panel_for_each_site_and_heads_as_columns_where_there_is_one_position():
    panels = plotted(made(), 2)
    for panel, title, values in zip(panels, ["resid_pre", "z"], made().values, strict=True):
        assert (panel.title, panel.titles) == (title, ("position", "layer"))
        assert (panel.x, panel.y) == (["3 ' the'", "4 '<b>'", "end"], ["0", "7"])
        same(panel.image, values)
        assert panel.limits == (-3, 3)
    assert panels[0].bar == "Recovered(LogProb(' a')) (share)"
    assert str(made().picture()).startswith(repr(made()))
    plain = plotted(made(metric=LogProb(" a"), corrupt=-1.0), 2)[0]
    assert (plain.limits, plain.bar) == ((-4, 2), "LogProb(' a') (nats)")  # around no effect
    values = np.arange(8, dtype=np.float32).reshape(1, 2, 1, 4)
    coords = {"site": ["z"], "layer": [0, 1], "position": [3], "head": [0, 1, 2, 3]}
    dims = (*DIMS, "head")
    panel = drawn(made(values=values, dims=dims, coords=coords, tokens=("a",)))
    assert panel.titles == ("head", "layer")
    same(panel.image, values[0, :, 0])
    several = np.arange(16, dtype=np.float32).reshape(1, 2, 2, 4)
    coords = {**coords, "position": [3, 4]}
    panels = plotted(made(values=several, dims=dims, coords=coords, tokens=("a", "b")), 4)
    assert [one.title for one in panels] == [f"z, head {nth}" for nth in range(4)]
    same(panels[1].image, several[0, :, :, 1])
    values, coords = np.zeros((1, 1, 2, 14), np.float32), {**coords, "layer": [0]}
    coords["head"] = list(range(14))
    sweep = made(values=values, dims=dims, coords=coords, tokens=("a", "b"))
    assert "2 of 14 heatmaps are not drawn" in sweep.picture().title
    assert len(sweep.picture().panels) == 12


def test_a_sweep_that_is_too_large_to_draw_says_so_in_a_notebook():
    values = np.zeros((1, 101, 10_000), np.float32)
    coords = {"site": ["z"], "layer": list(range(101)), "position": list(range(10_000))}
    large = made(values=values, coords=coords, tokens=("a",) * 10_000)
    shown = large._repr_mimebundle_()["text/plain"]
    assert shown.startswith(repr(large))
    assert "1010000 cells" in shown
