"""Norms of a store's rows, and their chart."""

import sys
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from unit.store.making import entry, header, rows_of, vectors, write

from midstream import open_store
from midstream.errors import StoreError, UnsupportedError
from midstream.lab.tools.inspect import norms as module
from midstream.lab.tools.inspect.chart import DPI, SIZE, _scale_norms, check_supported, draw
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
    np.testing.assert_allclose(found.by_position[0].percentiles[:, 2], norms_at(1)[7], rtol=1e-6)
    draw(found, tmp_path / "norms.svg")
    assert "16 rows of request r7" in (tmp_path / "norms.svg").read_text()


def test_no_more_is_read_than_is_seen_and_the_same_each_time(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MOST_ROWS", 50)
    monkeypatch.setattr(module, "_AT_ONCE", 7)
    store = make(tmp_path / "acts")
    found, again, other = NormSample.of(store), NormSample.of(store), NormSample.of(store, seed=1)
    assert found.rows == 4 * 50
    assert (found.by_layer[0].percentiles == again.by_layer[0].percentiles).all()
    assert (found.by_layer[0].percentiles != other.by_layer[0].percentiles).any()
    expected = np.percentile(norms_at(0), 50)
    assert abs(found.by_layer[0].percentiles[0, 2] / expected - 1) < 0.2


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
    assert abs(found.by_layer[0].percentiles[0, 2] - 5) < 0.1


def test_rows_of_several_codecs_are_not_put_into_one_picture(tmp_path):
    make(tmp_path / "acts", requests=1)
    write(tmp_path / "acts", [entry("z", head=header(codec="full8"))], header(codec="full8"))
    with pytest.raises(StoreError, match="different codecs"):
        NormSample.of(open_store(tmp_path / "acts"))


def test_pictures_have_the_names_of_what_is_drawn_and_their_size(tmp_path):
    path = tmp_path / "norms.svg"
    draw(NormSample.of(make(tmp_path / "acts")), path)
    root = ElementTree.fromstring(path.read_text())
    words = {each.text for each in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"by layer", "by position, resid_post", "resid_pre", "resid_post", "layer 3"} <= words
    assert "Norms of 480 rows, codec raw" in words
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / "norms.png"
    draw(NormSample.of(make(tmp_path / "acts")), path)
    with image.open(path) as opened:
        assert opened.size == tuple(round(inches * DPI) for inches in SIZE)
        assert len(opened.getcolors(1 << 20)) > 100


def test_a_picture_of_another_kind_and_one_without_matplotlib_are_refused(tmp_path, monkeypatch):
    with pytest.raises(UnsupportedError, match=r"ends in \.png or \.svg"):
        check_supported(tmp_path / "a.gif")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match=r'pip install "midstream\[inspect\]"'):
        check_supported(tmp_path / "a.png")


def test_rows_of_nothing_can_be_drawn(tmp_path):
    head = header()
    taps = {("resid_post", 1): rows_of(torch.zeros(2, 8).to(head.torch_dtype), head)}
    write(tmp_path / "acts", [Entry(request="a", prompt_tokens=2, taps=taps)])
    draw(NormSample.of(open_store(tmp_path / "acts")), tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size > 500


@given(low=st.floats(-6, 6), span=st.floats(0.01, 8))
def test_the_axis_of_norms_has_a_few_ticks(low, span):
    axes = Figure().subplots()
    _scale_norms(axes, 10**low, 10 ** (low + span))
    bottom, top = axes.get_ylim()
    ticks = [tick for tick in axes.yaxis.get_majorticklocs() if bottom <= tick <= top]
    assert 2 <= len(ticks) <= 10
    labels = axes.yaxis.get_major_formatter().format_ticks(ticks)
    assert len(set(labels)) == len(ticks)


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
    draw(found, tmp_path / "a.svg")
    words = (tmp_path / "a.svg").read_text()
    assert "nan" not in words
    assert "2 rows, codec raw (6 non-finite rows omitted)" in words


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
