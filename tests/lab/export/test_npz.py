"""npz files of a store: NumPy alone reads them."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from unit.sinks.test_files import values_of
from unit.store.making import TAPS, entry, header, vectors, write

from midstream import open_store
from midstream.errors import StoreError
from midstream.lab.export import export_npz
from midstream.lab.export.npz import _folder_name


def exported(tmp_path, entries, head=None, **chosen):
    """The folders of some entries, by way of a store."""
    write(tmp_path / "store", entries, head)
    return export_npz(open_store(tmp_path / "store").select(**chosen), tmp_path / "out")


def manifest(folder):
    return json.loads((folder / "manifest.json").read_text())


def test_each_request_has_a_folder_and_each_of_its_taps_a_file(tmp_path):
    entries = [entry("a", rows=3, metadata={"why": "ü"}), entry("b", rows=2, tag="t", seed=9)]
    folders = exported(tmp_path, entries)
    assert folders == [tmp_path / "out" / "a", tmp_path / "out" / "t" / "b"]
    assert sorted(path.name for path in folders[0].iterdir()) == [
        "manifest.json",
        "resid_post.0.npz",
        "resid_post.3.npz",
        "resid_pre.0.npz",
    ]
    for folder, rows, seed in zip(folders, (3, 2), (0, 9), strict=True):
        for i, (site, layer) in enumerate(TAPS):
            with np.load(folder / f"{site}.{layer}.npz", allow_pickle=False) as found:
                assert set(found) == {"rows", "positions", "token_ids"}
                expected = vectors(seed + i, rows, header()).float().numpy()
                np.testing.assert_array_equal(found["rows"], expected)
                assert found["positions"].tolist() == list(range(rows))
                assert found["token_ids"].tolist() == [10 * p + 1 for p in range(rows)]
    said = manifest(folders[0])
    assert said["metadata"] == {"why": "ü"}
    assert said["codec"] == "raw"
    assert said["model"] == "acme/tiny"
    assert said["name"] == "a"
    assert said["hidden_size"] == 8
    for each in said["files"]:
        with np.load(folders[0] / each["path"]) as found:
            assert each["rows"] == 3
            assert each["arrays"] == {
                name: {"shape": list(found[name].shape), "dtype": str(found[name].dtype)}
                for name in found
            }


@pytest.mark.parametrize("codec", ["full8", "rp8:k=16,seed=1", "topk8:k=3"])
def test_what_a_codec_reduced_is_there_as_it_wrote_it_with_its_scales(tmp_path, codec):
    head = header(codec=codec, hidden_size=24)
    (folder,) = exported(tmp_path, [entry("a", rows=4, head=head)], head)
    batch = open_store(tmp_path / "store").select(site="resid_pre").take(range(4))
    with np.load(folder / "resid_pre.0.npz", allow_pickle=False) as found:
        np.testing.assert_array_equal(values_of(found, 24), batch.values.numpy())
        said = manifest(folder)
        (file,) = (each for each in said["files"] if each["path"] == "resid_pre.0.npz")
        assert said["codec"] == codec
        assert file["scales"] == {
            "min": pytest.approx(found["scale"].min()),
            "max": pytest.approx(found["scale"].max()),
        }


@pytest.mark.parametrize("codec", ["raw", "full8", "cast:dtype=float16"])
def test_taps_of_two_widths_are_exported_together(tmp_path, codec):
    wide = ("attn_out", 0)
    head = header(codec=codec, dtype="float32", widths={wide: 12})
    (folder,) = exported(tmp_path, [entry("a", taps=(wide, TAPS[1]), head=head)], head)
    said = manifest(folder)
    assert [file.get("width") for file in said["files"]] == [12, None]
    assert "widths" not in said
    for nth, tap in enumerate((wide, TAPS[1])):
        with np.load(folder / f"{tap[0]}.{tap[1]}.npz") as found:
            values = values_of(found)
            expected = vectors(nth, 3, head, tap).numpy()
            assert values.shape == expected.shape
            assert np.abs(values - expected).max() <= (0 if codec == "raw" else 0.02)


def test_only_the_rows_that_are_selected_are_exported(tmp_path):
    entries = [entry("a", positions=[1, 4, 6]), entry("b", positions=[2]), entry("c", rows=1)]
    folders = exported(tmp_path, entries, layer=0, position=[2, 4, 6])
    assert [folder.name for folder in folders] == ["a", "b"]
    assert sorted(path.name for path in folders[0].glob("*.npz")) == [
        "resid_post.0.npz",
        "resid_pre.0.npz",
    ]
    with np.load(folders[0] / "resid_post.0.npz") as found:
        assert found["positions"].tolist() == [4, 6]
        assert found["token_ids"].tolist() == [41, 61]
        expected = vectors(1, 3, header())[1:].float().numpy()
        np.testing.assert_array_equal(found["rows"], expected)


def test_completions_of_one_request_lie_in_folders_of_their_own(tmp_path):
    entries = [entry("a", child=0), entry("a", child=2, seed=5), entry("b"), entry("c", child=1)]
    folders = exported(tmp_path, entries)
    names = [folder.relative_to(tmp_path / "out").as_posix() for folder in folders]
    assert names == ["a/0", "a/2", "b", "c/1"]
    assert [manifest(folder)["completion"] for folder in folders] == [0, 2, 0, 1]


def test_what_is_there_is_not_overwritten_and_nothing_else_is_written(tmp_path):
    (tmp_path / "out" / "b").mkdir(parents=True)
    with pytest.raises(StoreError, match=r"request 'b': .+/out/b exists already"):
        exported(tmp_path, [entry("a"), entry("b")])
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["b"]


def test_a_request_that_was_stored_twice_is_refused(tmp_path):
    write(tmp_path / "store", [entry("a")])
    with pytest.raises(StoreError, match="request 'a': stored more than once"):
        exported(tmp_path, [entry("a")])


def test_a_request_whose_export_fails_leaves_nothing(tmp_path, monkeypatch):
    def broken(path, **arrays):
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", broken)
    with pytest.raises(OSError, match="disk full"):
        exported(tmp_path, [entry("a")])
    assert list((tmp_path / "out").iterdir()) == []


NAMES = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=300)


@given(NAMES, NAMES)
def test_any_name_is_one_folder_s_and_two_names_are_two_folders(first, second):
    names = [_folder_name(name) for name in (first, second)]
    assert (names[0] == names[1]) == (first == second)
    for name in names:
        assert 1 <= len(name.encode()) <= 255
        assert not name.startswith(".")
        assert "/" not in name
        assert "\0" not in name


@pytest.mark.parametrize("name", ["../../x", ".", "..", "a/b", "/etc", "ü" * 200, "a\nb"])
def test_no_name_leads_out_of_the_folder(tmp_path, name):
    (folder,) = exported(tmp_path, [entry(name, rows=1, tag=name)])
    assert folder.resolve().parent.parent == (tmp_path / "out").resolve()
    assert manifest(folder)["name"] == name


def test_positions_and_tokens_of_taps_that_were_captured_apart_are_each_one_s(tmp_path):
    both = entry("a", positions=[0, 5], taps=TAPS[:1])
    other = entry("a", positions=[3], taps=TAPS[2:])
    from dataclasses import replace

    (folder,) = exported(tmp_path, [replace(both, taps={**both.taps, **other.taps})])
    for tap, positions in ((TAPS[0], [0, 5]), (TAPS[2], [3])):
        with np.load(folder / f"{tap[0]}.{tap[1]}.npz") as found:
            assert found["positions"].tolist() == positions
            assert found["token_ids"].tolist() == [10 * one + 1 for one in positions]
            assert torch.from_numpy(found["rows"]).shape == (len(positions), 8)


@pytest.mark.parametrize("turned", [False, True])
def test_a_request_may_have_the_name_of_another_ones_tag(turned, tmp_path):
    entries = [entry("t", rows=2), entry("x", rows=3, tag="t")]
    folders = exported(tmp_path, entries[::-1] if turned else entries)
    assert sorted(folders) == [tmp_path / "out" / "t", tmp_path / "out" / "t" / "x"]
    assert [manifest(folder)["name"] for folder in sorted(folders)] == ["t", "x"]
    names = ["manifest.json", "resid_post.0.npz", "resid_post.3.npz", "resid_pre.0.npz"]
    assert sorted(path.name for path in (tmp_path / "out" / "t").iterdir()) == [*names, "x"]


def test_a_completion_in_the_folder_of_another_request_is_named(tmp_path):
    entries = [entry("t", child=1), entry("1", tag="t")]
    with pytest.raises(
        StoreError, match=r"'1': .+/t/1 is the folder of completion 1 of request 't'"
    ):
        exported(tmp_path, entries)
    assert not (tmp_path / "out").exists()
