"""A folder for each request: whole or not there, never elsewhere, never overwritten."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.codec_rows import CODECS, codec, encoded
from support.sinking import ORIGIN, RECEIPT, WIDE, WIDE_ORIGIN, WIDTH, activations, delivery

from midstream.codecs import parse_codec
from midstream.errors import SpecError
from midstream.results.activations import Activations, with_heads
from midstream.results.media_span import MediaSpan
from midstream.sinks.files import LAYOUTS, FileSink

TAPS = (("resid_pre", 0), ("resid_post", 1))


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


@pytest.fixture
def sink(root):
    made = FileSink(str(root))
    made.open(ORIGIN)
    return made


def reduced(codec, plain):
    """Rows as they come from the device under a codec."""
    rows = {tap: encoded(codec, value) for tap, value in plain.items()}
    return Activations(rows, dict.fromkeys(rows, plain.positions), torch.arange(100, 104))


def values_of(found, width=WIDTH):
    """The rows of a file by its arrays: `rows`; or a scale, a zero and uint8 values."""
    if "rows" in found:
        return found["rows"]
    values = found["zero"][:, None] + found["scale"][:, None] * found["q"].astype("f4")
    if "indices" not in found:
        return values
    full = np.zeros((len(values), width), np.float32)
    np.put_along_axis(full, found["indices"], values, axis=1)
    return full


def written(sink, **given):
    sink.write(delivery(**given))
    (result,) = sink.flush()
    return result


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_request_has_a_file_for_each_site_and_layer_and_a_manifest(sink, root):
    result = written(sink, name="r1", tag="v1", activations=activations(TAPS))
    assert files_in(root) == [
        "v1", "v1/r1", "v1/r1/manifest.json", "v1/r1/resid_post.1.npz", "v1/r1/resid_pre.0.npz",
    ]  # fmt: skip
    assert result.status == "ok"
    assert sorted(result.paths) == [
        str(root / "v1" / "r1" / name)
        for name in ("manifest.json", "resid_post.1.npz", "resid_pre.0.npz")
    ]
    expected = activations(TAPS)
    for site, layer in TAPS:
        with np.load(root / "v1" / "r1" / f"{site}.{layer}.npz") as found:
            assert sorted(found) == ["positions", "rows", "token_ids"]
            assert np.array_equal(found["rows"], expected[site, layer].numpy())
            assert found["positions"].tolist() == [0, 2]
            assert found["token_ids"].tolist() == [100, 102]


def test_the_manifest_has_shapes_paths_codec_and_whose_they_are(sink, root):
    ranks = {("resid_pre", 0): (1,)}
    result = written(
        sink, name="r1", metadata={"a": [1]}, return_="sharded", ranks=ranks,
        activations=with_heads(activations(TAPS), {}, (MediaSpan("audio", 0, 1, 2, "a1"),)),
    )  # fmt: skip
    on_disk = json.loads((root / "r1" / "manifest.json").read_text())
    assert on_disk["files"][0] == {
        "path": "resid_pre.0.npz",
        "site": "resid_pre",
        "layer": 0,
        "rows": 2,
        "ranks": [1],
        "arrays": {
            "rows": {"shape": [2, WIDTH], "dtype": "float32"},
            "positions": {"shape": [2], "dtype": "int64"},
            "token_ids": {"shape": [2], "dtype": "int64"},
        },
        "scales": None,
    }
    # fmt: off
    wanted = {"codec": "raw", "return": "sharded", "request_id": "7", "metadata": {"a": [1]},
              "model": "a/model", "hidden_size": WIDTH, "prompt_tokens": 3, "generated_tokens": 2,
              "completion": 0, "status": "ok", "problems": [],
              "media": [{"kind": "audio", "index": 0, "first": 1, "length": 2, "hash": "a1"}]}
    # fmt: on
    assert {name: on_disk[name] for name in wanted} == wanted
    # To the caller it is the same, with paths that need no folder.
    for one in on_disk["files"]:
        one["path"] = str(root / "r1" / one["path"])
    assert result.manifest == on_disk


def test_bfloat16_is_read_as_float32_bit_by_bit(sink, root):
    rows = activations(dtype=torch.bfloat16)
    written(sink, activations=rows)
    with np.load(root / "r" / "resid_post.1.npz") as found:
        assert found["rows"].dtype == np.float32
        assert np.array_equal(found["rows"], rows["resid_post", 1].float().numpy())


@pytest.mark.parametrize("spec", CODECS)
def test_rows_of_every_codec_are_in_its_arrays(spec, sink, root):
    """Another codec needs a case in `npz_arrays`."""
    used = codec(spec.replace("k=16", "k=4"))
    plain = activations(TAPS)
    rows = plain if spec == "raw" else reduced(used, plain)
    manifest = written(sink, activations=rows).manifest
    assert manifest["codec"] == used.spec
    for site, layer in TAPS:
        with np.load(root / "r" / f"{site}.{layer}.npz") as found:
            assert np.array_equal(values_of(found), rows[site, layer].float().numpy())
            scales = next(file["scales"] for file in manifest["files"] if file["site"] == site)
            if "scale" in found:
                assert scales == {"min": found["scale"].min(), "max": found["scale"].max()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spec", ["raw", "full8", "topk8:k=3"])
def test_rows_of_two_widths_read_back_and_the_manifest_has_the_other_width(root, layout, spec):
    sink, codec = FileSink(str(root), layout), parse_codec(spec)
    sink.open(WIDE_ORIGIN)
    plain = activations((WIDE, ("resid_post", 1)), origin=WIDE_ORIGIN)
    rows = plain if spec == "raw" else reduced(codec, plain)
    result = written(sink, activations=rows)
    assert result.manifest["hidden_size"] == WIDTH
    for file, width in zip(result.manifest["files"], (12, None), strict=True):
        tap = file["site"], file["layer"]
        assert file.get("width") == width
        with np.load(file["path"]) as every:
            start = file.get("prefix", "")
            found = {name.removeprefix(start): every[name] for name in every}
        values = values_of(found, width or WIDTH)
        assert np.array_equal(values, rows[tap].numpy())
        if spec != "topk8:k=3":
            assert np.abs(values - plain[tap].numpy()).max() < 1 / 255


def test_each_of_several_completions_has_a_folder(sink, root):
    for nth in range(2):
        sink.write(delivery("r", completion=nth, completions=2))
    assert [one.status for one in sink.flush()] == ["ok", "ok"]
    assert sorted(os.listdir(root / "r")) == ["0", "1"]
    assert json.loads((root / "r" / "1" / "manifest.json").read_text())["completion"] == 1


def test_rows_that_never_came_leave_empty_arrays(sink, root):
    written(sink, activations=activations(positions=()))
    with np.load(root / "r" / "resid_post.1.npz") as found:
        assert found["rows"].shape == (0, WIDTH)


def test_a_folder_appears_with_all_of_its_files_after_they_were_synced(sink, root, monkeypatch):
    seen = []
    rename, fsync = os.rename, os.fsync

    def watched_rename(*args, **kwargs):
        seen.append("rename")
        assert not (root / "r").exists()
        rename(*args, **kwargs)
        assert files_in(root / "r") == ["manifest.json", "resid_post.1.npz"]

    def watched_fsync(descriptor):
        seen.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    sink.write(delivery())
    assert files_in(root)[0].endswith(".part")
    monkeypatch.setattr(os, "rename", watched_rename)
    monkeypatch.setattr(os, "fsync", watched_fsync)
    sink.flush()
    part, *files = sorted(seen[:3])
    assert part.endswith(".part")
    assert files == ["manifest.json", "resid_post.1.npz"]
    assert seen[3:] == ["rename", "root"]


def test_what_is_there_is_not_overwritten(sink, root):
    assert written(sink).status == "ok"
    before = (root / "r" / "manifest.json").read_bytes()
    with pytest.raises(FileExistsError, match="exists already"):
        sink.write(delivery(metadata={"other": 1}))
    assert not sink.flush()
    assert (root / "r" / "manifest.json").read_bytes() == before
    assert os.listdir(root) == ["r"]


def test_of_two_that_come_at_once_under_one_name_the_second_is_an_error(sink, root):
    sink.write(delivery(metadata={"first": 1}))
    sink.write(delivery(metadata={"second": 1}))
    first, second = sink.flush()
    assert first.status == "ok"
    assert (second.status, "not empty" in second.reason) == ("error", True)
    assert json.loads((root / "r" / "manifest.json").read_text())["metadata"] == {"first": 1}
    assert os.listdir(root) == ["r"]


def test_what_cannot_be_synced_leaves_nothing(sink, root, monkeypatch):
    def broken(_):
        raise OSError(5, "Input/output error")

    sink.write(delivery("a", tag="t"))
    sink.write(delivery("b", layout="sharded"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        results = sink.flush()
    assert [one.status for one in results] == ["error", "error"]
    assert not [path for path in root.rglob("*") if path.name != "t"]


def test_a_write_that_fails_leaves_nothing_and_the_next_is_well(sink, root, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full)
        with pytest.raises(OSError, match="No space left"):
            sink.write(delivery())
    assert os.listdir(root) == []
    assert written(sink).status == "ok"


def test_a_root_that_is_deleted_is_an_error_and_not_made_anew(sink, root):
    sink.write(delivery())
    for path in sorted(root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    root.rmdir()
    (result,) = sink.flush()
    assert (result.status, "No such file" in result.reason) == ("error", True)
    with pytest.raises(FileNotFoundError):
        sink.write(delivery())
    assert not root.exists()


@pytest.mark.parametrize("target", ["folder", "nothing"])
def test_a_tag_that_is_a_link_is_refused_at_the_door_and_when_it_is_written(
    sink, root, tmp_path, target
):
    outside = tmp_path / "outside"
    if target == "folder":
        outside.mkdir()
    (root / "v1").symlink_to(outside)
    with pytest.raises(SpecError, match="v1 is not a folder") as caught:
        sink.check("v1", "r1")
    assert caught.value.path == "tag"
    with pytest.raises(OSError, match="v1"):
        sink.write(delivery(tag="v1"))
    assert not outside.exists() or not any(outside.iterdir())


def test_an_id_that_is_a_link_is_refused_too(sink, root, tmp_path):
    (tmp_path / "outside").mkdir()
    (root / "r").symlink_to(tmp_path / "outside")
    with pytest.raises(SpecError, match="exists already"):
        sink.check("", "r")
    with pytest.raises(FileExistsError):
        sink.write(delivery())
    with pytest.raises(OSError, match="r"):
        sink.write(delivery(completions=2))
    assert not any((tmp_path / "outside").iterdir())


def test_a_link_laid_between_write_and_flush_gets_nothing(sink, root, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    sink.write(delivery(tag="v1"))
    (root / "v1").rename(root / "moved")
    (root / "v1").symlink_to(outside)
    (result,) = sink.flush()
    assert result.status == "error"
    assert not any(outside.iterdir())


def test_the_door_lets_pass_what_is_not_there_yet(sink, root):
    sink.check("v1", "r1")
    sink.check("", "")
    written(sink, name="r1", tag="v1")
    sink.check("v1", "r2")
    with pytest.raises(SpecError, match="r1 exists already; use another id") as caught:
        sink.check("v1", "r1")
    assert caught.value.path == "request_id"


def test_the_root_itself_may_be_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    sink = FileSink(str(tmp_path / "link"))
    sink.open(ORIGIN)
    assert written(sink).status == "ok"
    assert (tmp_path / "real" / "r" / "manifest.json").exists()


@settings(max_examples=30)
@given(
    st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", fullmatch=True),
    st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", fullmatch=True),
)
def test_every_allowed_name_is_a_folder_right_beneath_the_one_before(tmp_path_factory, tag, name):
    root = tmp_path_factory.mktemp("names")
    sink = FileSink(str(root))
    sink.open(ORIGIN)
    assert written(sink, tag=tag, name=name).status == "ok"
    assert os.listdir(root) == [tag]
    assert os.listdir(root / tag) == [name]


def test_a_root_that_is_no_folder_and_another_layout_are_refused(tmp_path):
    for root in ("", None, 7, ["a"]):
        with pytest.raises(ValueError, match="root: expected the path of a folder"):
            FileSink(root)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        FileSink(str(tmp_path / "file")).open(ORIGIN)
    with pytest.raises(ValueError, match="layout: expected one of per_file, packed, sharded"):
        FileSink(str(tmp_path), layout="flat")


def test_a_receipt_with_problems_is_in_the_manifest(sink):
    bad = replace(RECEIPT, problems=("a row is missing",))
    manifest = written(sink, receipt=bad).manifest
    assert (manifest["status"], manifest["problems"]) == ("error", ["a row is missing"])


def read_back(manifest):
    """The arrays of each tap, by (site, layer) and name."""
    found = {}
    for one in manifest["files"]:
        with np.load(one["path"]) as arrays:
            prefix = one.get("prefix", "")
            mine = {name: arrays[prefix + name] for name in one["arrays"]}
            if not prefix:
                assert set(mine) == set(arrays.files)
        found[one["site"], one["layer"]] = mine
    return found


@pytest.mark.parametrize("by_request", [False, True])
@pytest.mark.parametrize("codec", ["raw", "full8", "topk8:k=4"])
@pytest.mark.parametrize("layout", ["per_file", "packed", "sharded"])
def test_every_layout_has_the_same_arrays(tmp_path, layout, codec, by_request):
    sink = FileSink(str(tmp_path / "other"), **({} if by_request else {"layout": layout}))
    sink.open(ORIGIN)
    plain = FileSink(str(tmp_path / "plain"))
    plain.open(ORIGIN)
    rows = reduced(parse_codec(codec), activations(TAPS))
    named = {"layout": layout} if by_request else {}
    found = [written(one, tag="t", activations=rows, **extra).manifest
             for one, extra in ((sink, named), (plain, {}))]  # fmt: skip
    assert (found[0]["layout"], found[1]["layout"]) == (layout, "per_file")
    mine, theirs = (read_back(one) for one in found)
    assert set(mine) == set(theirs) == set(TAPS)
    for tap, arrays in theirs.items():
        assert set(mine[tap]) == set(arrays)
        for name, value in arrays.items():
            np.testing.assert_array_equal(mine[tap][name], value)


@settings(max_examples=30, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.sampled_from(["", "a", "b"]), st.sampled_from(LAYOUTS)),
        min_size=1,
        max_size=8,
    )
)
def test_results_come_in_the_order_of_writes_whatever_the_layouts(tmp_path_factory, requests):
    root = tmp_path_factory.mktemp("root")
    sink = FileSink(str(root))
    sink.open(ORIGIN)
    for nth, (tag, layout) in enumerate(requests):
        rows = activations(TAPS[:1], positions=range(nth % 4 + 1))
        sink.write(delivery(f"r{nth}", tag=tag, layout=layout, activations=rows))
    results = sink.flush()
    for nth, ((tag, layout), result) in enumerate(zip(requests, results, strict=True)):
        assert result.status == "ok"
        manifest = result.manifest
        assert (manifest["name"], manifest["tag"], manifest["layout"]) == (f"r{nth}", tag, layout)
        (arrays,) = read_back(manifest).values()
        assert arrays["positions"].tolist() == list(range(nth % 4 + 1))
        assert all(os.path.exists(path) for path in result.paths)
    shards = list(root.rglob("shard-*/manifest.json"))
    assert len(shards) == len({tag for tag, layout in requests if layout == "sharded"})
    for path in shards:
        shard = json.loads(path.read_text())
        assert shard["format"] == "midstream.npz-shards"
        wanted = [f"r{nth}" for nth, (tag, layout) in enumerate(requests)
                  if layout == "sharded" and tag == shard["requests"][0]["tag"]]  # fmt: skip
        assert [one["name"] for one in shard["requests"]] == wanted
        assert {one["path"] for each in shard["requests"] for one in each["files"]} == {"rows.npz"}
    assert not list(root.rglob("*.part"))


def test_a_shard_that_cannot_be_written_is_an_error_of_its_requests_alone(sink, root):
    root.mkdir(exist_ok=True)
    (root / "t").write_text("a file")
    sink.write(delivery("a", tag="t", layout="sharded"))
    sink.write(delivery("b", layout="sharded"))
    first, second = sink.flush()
    assert (first.status, second.status) == ("error", "ok")
    assert second.manifest["name"] == "b"
