"""Norms of a store's rows, and their chart."""

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from unit.store.making import entry, header, rows_of, vectors, write
from unit.viz.drawn import read, same

from midstream import open_store
from midstream.errors import StoreError
from midstream.lab.tools.inspect import norms as module
from midstream.lab.tools.inspect.norms import PERCENTILES, NormSample
from midstream.store import Entry

TAPS = (("resid_pre", 0), ("resid_post", 0), ("resid_post", 3), ("resid_post", 5))


def make(root, requests=30, rows=4):
    """A store whose request n has the vectors of seeds 10 n and on, tap by tap."""
    write(root, [entry(f"r{n}", rows=rows, taps=TAPS, seed=10 * n) for n in range(requests)])
    return open_store(root)


def norms_at(tap, requests=30, rows=4):
    """[requests, rows]: what `make` stored at a tap, by its index."""
    head = header()
    return np.stack(
        [vectors(10 * n + tap, rows, head).float().norm(dim=1).numpy() for n in range(requests)]
    )


def test_norms_by_layer_and_by_position_are_those_of_the_rows(tmp_path):
    found = NormSample.of(make(tmp_path / "acts"))
    assert [spread.name for spread in found.by_layer] == ["resid_pre", "resid_post"]
    before, after = found.by_layer
    assert before.x.tolist() == [0]
    assert after.x.tolist() == [0, 3, 5]
    percentiles_of = [*before.percentiles, *after.percentiles]
    for tap, percentiles in zip((0, 1, 2, 3), percentiles_of, strict=True):
        expected = np.percentile(norms_at(tap), PERCENTILES)
        np.testing.assert_allclose(percentiles, expected, rtol=1e-6)
    assert found.rows == 4 * 120
    assert found.site == "resid_post"
    assert [spread.name for spread in found.by_position] == ["layer 0", "layer 3", "layer 5"]
    for tap, spread in zip((1, 2, 3), found.by_position, strict=True):
        assert spread.x.tolist() == [0, 1, 2, 3]
        expected = np.percentile(norms_at(tap), PERCENTILES, axis=0).T
        np.testing.assert_allclose(spread.percentiles, expected, rtol=1e-6)


def test_norms_of_a_request_are_those_of_its_rows_alone(tmp_path):
    store = make(tmp_path / "acts")
    found = NormSample.of(store, request="r7")
    assert found.rows == 4 * 4
    assert [spread.x.tolist() for spread in found.by_layer] == [[0], [0, 3, 5]]
    for tap, percentiles in enumerate(
        [*found.by_layer[0].percentiles, *found.by_layer[1].percentiles]
    ):
        np.testing.assert_allclose(
            percentiles, np.percentile(norms_at(tap)[7], PERCENTILES), rtol=1e-6
        )
    np.testing.assert_allclose(found.by_position[0].percentiles[:, 1], norms_at(1)[7], rtol=1e-6)
    assert "16 rows of request r7" in found.picture().title


def test_no_more_is_read_than_is_seen_and_the_same_each_time(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MOST_ROWS", 50)
    monkeypatch.setattr(module, "_AT_ONCE", 7)
    store = make(tmp_path / "acts")
    found, again, other = NormSample.of(store), NormSample.of(store), NormSample.of(store, seed=1)
    assert found.rows == 4 * 50
    assert (found.by_layer[0].percentiles == again.by_layer[0].percentiles).all()
    assert (found.by_layer[0].percentiles != other.by_layer[0].percentiles).any()
    expected = np.percentile(norms_at(0), 50)
    assert abs(found.by_layer[0].percentiles[0, 1] / expected - 1) < 0.2


def test_many_positions_are_put_together(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MOST_BINS", 4)
    spread = NormSample.of(make(tmp_path / "acts", requests=9, rows=10)).by_position[0]
    assert spread.x.tolist() == [1.0, 4.0, 7.0, 10.0]
    expected = np.percentile(norms_at(1, 9, 10)[:, 3:6], PERCENTILES)
    np.testing.assert_allclose(spread.percentiles[1], expected, rtol=1e-6)


def test_rows_that_are_reduced_are_drawn_as_what_is_left_of_them(tmp_path):
    head = header(codec="topk8:k=2")
    values = torch.zeros(1, 8)
    values[0, :3] = torch.tensor([3.0, 4.0, 0.5])
    tap = ("mlp_out", 1)
    rows = rows_of(values.to(head.torch_dtype), head, [4], [9])
    write(tmp_path / "acts", [Entry(request="a", prompt_tokens=5, taps={tap: rows})], head)
    found = NormSample.of(open_store(tmp_path / "acts"))
    assert (found.codec, found.site) == ("topk8:k=2", "mlp_out")
    assert abs(found.by_layer[0].percentiles[0, 1] - 5) < 0.1


def test_rows_of_several_codecs_are_not_put_into_one_picture(tmp_path):
    make(tmp_path / "acts", requests=1)
    write(tmp_path / "acts", [entry("z", head=header(codec="full8"))], header(codec="full8"))
    with pytest.raises(StoreError, match="different codecs"):
        NormSample.of(open_store(tmp_path / "acts"))


def test_a_chart_has_medians_and_ranges_by_layer_and_by_position(tmp_path):
    found = NormSample.of(make(tmp_path / "acts"))
    axes = Figure().subplots(1, 2)
    found.picture().plot(axes)
    by_layer, by_position = map(read, axes)
    same(by_layer.lines["resid_pre"], [np.median(norms_at(0)), np.nan, np.nan])
    same(by_layer.lines["resid_post"], [np.median(norms_at(tap)) for tap in (1, 2, 3)])
    bars = [one for one in axes[0].collections if len(one.get_segments()) == 3]
    low, high = np.percentile(norms_at(3), (5, 95))
    same(bars[-1].get_segments()[2][:, 1], [low, high])
    assert (by_layer.title, by_layer.titles) == ("by layer", ("layer", "L2 norm"))
    assert (by_position.title, by_position.titles[0]) == ("by position, resid_post", "position")
    same(by_position.lines["layer 3"], np.median(norms_at(2), axis=0))
    assert found.picture().title.startswith("Norms of 480 rows, codec raw: medians")
    assert axes[0].get_yscale() == "log"


def test_rows_of_nothing_can_be_drawn(tmp_path):
    head = header()
    taps = {("resid_post", 1): rows_of(torch.zeros(2, 8).to(head.torch_dtype), head)}
    write(tmp_path / "acts", [Entry(request="a", prompt_tokens=2, taps=taps)])
    NormSample.of(open_store(tmp_path / "acts")).picture().save(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size > 500


def test_rows_that_are_not_finite_are_counted_and_not_drawn(tmp_path):
    head = header()
    values = torch.ones(4, 8)
    values[1, 2], values[3, 0] = torch.nan, torch.inf
    taps = {
        ("resid_post", 1): rows_of(values.to(head.torch_dtype), head),
        ("resid_post", 2): rows_of(torch.full((4, 8), torch.nan).to(head.torch_dtype), head),
    }
    write(tmp_path / "acts", [Entry(request="a", prompt_tokens=4, taps=taps)])
    found = NormSample.of(open_store(tmp_path / "acts"))
    assert (found.rows, found.not_finite) == (2, 6)
    assert found.by_layer[0].x.tolist() == [1]
    assert found.by_position[0].x.tolist() == [0, 2]
    assert "2 rows, codec raw (6 non-finite rows omitted)" in found.picture().title


def test_long_rows_have_a_norm_although_their_squares_overflow(tmp_path):
    head = header()
    rows = rows_of(torch.full((2, 8), 3e38).to(head.torch_dtype), head)
    write(tmp_path / "acts", [Entry(request="a", prompt_tokens=2, taps={("resid_post", 1): rows})])
    assert NormSample.of(open_store(tmp_path / "acts")).not_finite == 0


def test_a_store_of_nothing_finite_is_refused(tmp_path):
    head = header()
    rows = rows_of(torch.full((2, 8), torch.nan).to(head.torch_dtype), head)
    write(tmp_path / "acts", [Entry(request="a", prompt_tokens=2, taps={("resid_post", 1): rows})])
    with pytest.raises(StoreError, match="no finite rows to draw"):
        NormSample.of(open_store(tmp_path / "acts"))
