"""`Sweep`: its files, tables and pictures."""

import json
import sys

import numpy as np
import pytest

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


def test_labelled_arrays_tables_and_plots_have_each_cell():
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
    import matplotlib

    matplotlib.use("Agg")
    figure = made().plot()
    images = [axis.images[0] for axis in figure.axes if axis.images]
    np.testing.assert_array_equal(images[0].get_array().filled(np.nan), made().values[0])
    assert images[0].get_clim() == (-3.0, 3.0)
    matplotlib.pyplot.close(figure)
    assert "matplotlib" in sys.modules


@pytest.mark.parametrize(
    ("package", "extra", "use"),
    [
        ("xarray", "sweep", Sweep.to_xarray),
        ("pandas", "sweep", Sweep.to_pandas),
        ("matplotlib", "inspect", Sweep.plot),
    ],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, package, extra, use):
    from importlib import util

    find = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(MissingExtraError, match=rf"midstream\[{extra}\]"):
        use(made())


def test_pictures_have_a_panel_for_each_site_and_heads_as_columns_where_there_is_one_position(
    tmp_path,
):
    html = made()._repr_html_()
    assert "&lt;b&gt;" in html
    assert "<b>" not in html
    panels = made().panels()
    assert [one.title for one in panels] == ["resid_pre", "z"]
    assert panels[0].columns == ["3 ' the'", "4 '<b>'", "end"]
    assert panels[1].values.tolist() == made().values[1].tolist()
    text = str(made().picture())
    assert "Recovered(LogProb(' a')), resid_pre" in text
    assert "\N{MINUS SIGN}3.00" in text
    assert "\N{MINUS SIGN}3.00" in made().picture().save(tmp_path / "sweep.html").read_text()
    values = np.arange(8, dtype=np.float32).reshape(1, 2, 1, 4)
    coords = {"site": ["z"], "layer": [0, 1], "position": [3], "head": [0, 1, 2, 3]}
    dims = (*DIMS, "head")
    (panel,) = made(values=values, dims=dims, coords=coords, tokens=("a",)).panels()
    assert (panel.row, panel.column) == ("layer", "head")
    assert panel.values.tolist() == values[0, :, 0].tolist()
    several = np.arange(16, dtype=np.float32).reshape(1, 2, 2, 4)
    coords = {**coords, "position": [3, 4]}
    panels = made(values=several, dims=dims, coords=coords, tokens=("a", "b")).panels()
    assert [one.title for one in panels] == [f"z, head {nth}" for nth in range(4)]
    assert panels[1].values.tolist() == several[0, :, :, 1].tolist()
    values, coords = np.zeros((1, 1, 2, 14), np.float32), {**coords, "layer": [0]}
    coords["head"] = list(range(14))
    sweep = made(values=values, dims=dims, coords=coords, tokens=("a", "b"))
    assert "2 of 14 heatmaps are not shown" in str(sweep.picture())
