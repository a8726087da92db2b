"""Parquet and Arrow files of a store, read by pyarrow and by Hugging Face's datasets."""

import json
import sys
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from unit.store.making import TAPS, entry, header, write

from midstream import open_store
from midstream.errors import MissingExtraError, StoreError
from midstream.lab.export import export_arrow, export_parquet
from midstream.store import Batch

KINDS = {"float16": pa.float16(), "float32": pa.float32(), "bfloat16": pa.float32()}


def selected(tmp_path, head=None, **chosen):
    """34 rows or fewer of three taps, of five completions."""
    head = head or header()
    entries = [entry(f"r{i}", rows=i, seed=i, head=head, tag="t" * (i % 2)) for i in range(4)]
    media = {"midstream": {"media": [{"kind": "audio", "index": 1, "first": 1, "length": 2}]}}
    entries.append(entry("r3", child=1, rows=4, seed=9, head=head, metadata=media))
    write(tmp_path / "store", entries, head, shard_bytes=1500)
    return open_store(tmp_path / "store").select(**chosen)


def expected(selection):
    """The columns of a table, by way of the store's reader alone."""
    batch = selection.take(range(len(selection)))
    return {
        "request": batch.request,
        "child": batch.child.tolist(),
        "tag": batch.tag,
        "site": batch.site,
        "layer": batch.layer.tolist(),
        "position": batch.position.tolist(),
        "token_id": batch.token_id.tolist(),
        "media": [span and f"{span.kind}.{span.index}" for span in batch.media],
        "vector": batch.numpy(),
    }


def holds(columns, wanted):
    """Whether the columns of a table are those wanted, bit by bit."""
    vectors = np.stack([np.asarray(one, wanted["vector"].dtype) for one in columns["vector"]])
    same = np.array_equal(vectors, wanted["vector"], equal_nan=True)
    return same and all(list(columns[name]) == wanted[name] for name in wanted if name != "vector")


@pytest.mark.parametrize("dtype", KINDS)
def test_a_parquet_file_has_every_row_with_what_it_is_of(tmp_path, dtype):
    selection = selected(tmp_path, header(dtype=dtype))
    path = export_parquet(selection, tmp_path / "rows.parquet")
    table = pa.parquet.read_table(path)
    assert table.num_rows == len(selection) == 30
    assert table.schema.field("vector").type == pa.list_(KINDS[dtype], 8)
    assert table.schema.types[:-1] == [
        pa.string(),
        pa.int32(),
        pa.string(),
        pa.string(),
        pa.int32(),
        pa.int64(),
        pa.int64(),
        pa.string(),
    ]
    assert holds(table.to_pydict(), expected(selection))
    (said,) = json.loads(table.schema.metadata[b"midstream"])
    assert said["codec"] == "raw"
    assert said["dtype"] == dtype
    assert said["model"] == "acme/tiny"


def test_an_arrow_stream_and_a_file_of_many_groups_have_the_same_rows(tmp_path, monkeypatch):
    selection = selected(tmp_path)
    path = export_arrow(selection, tmp_path / "rows.arrow")
    with pa.memory_map(str(path)) as file:
        table = pa.ipc.open_stream(file).read_all()
    assert table.equals(open_store(tmp_path / "store").to_arrow().read_all())
    monkeypatch.setattr("midstream.store.arrow._BATCH_BYTES", 7 * 8 * 4)
    path = export_parquet(selection, tmp_path / "rows.parquet")
    file = pa.parquet.ParquetFile(path)
    assert file.num_row_groups == 5
    assert holds(file.read().to_pydict(), expected(selection))


def test_rows_that_are_not_finite_stay_so(tmp_path):
    head = header(codec="full8")
    made = entry("a", head=head)
    tap = made.taps[TAPS[0]]
    bad = head.open_codec().encode(torch.full((3, 8), torch.inf).bfloat16())
    from dataclasses import replace

    write(tmp_path / "store", [replace(made, taps={TAPS[0]: replace(tap, data=bad)})], head)
    selection = open_store(tmp_path / "store").select()
    table = pa.parquet.read_table(export_parquet(selection, tmp_path / "x.parquet"))
    assert np.isnan(np.stack(table.to_pydict()["vector"])).all()


@pytest.mark.parametrize("export", [export_parquet, export_arrow])
def test_what_is_there_is_not_overwritten_and_a_failure_leaves_nothing(
    tmp_path, export, monkeypatch
):
    selection = selected(tmp_path)
    path = tmp_path / "out" / "rows"
    path.parent.mkdir()
    path.write_text("mine")
    with pytest.raises(StoreError, match="out/rows exists already"):
        export(selection, path)
    assert path.read_text() == "mine"
    path.unlink()

    def broken(batch, schema):
        raise OSError("gone")

    monkeypatch.setattr("midstream.store.arrow._record_batch", broken)
    with pytest.raises(StoreError, match="rows: gone"):
        export(selection, path)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("export", [export_parquet, export_arrow])
def test_a_file_that_cannot_be_written_is_named_as_it_was_asked_for(tmp_path, export):
    wanted = tmp_path / "nowhere" / "rows"
    with pytest.raises(StoreError) as error:
        export(selected(tmp_path), wanted)
    assert str(error.value) == f"{wanted}: No such file or directory"


def test_an_empty_selection_is_refused_and_pyarrow_is_asked_for_where_it_is_missing(
    tmp_path, monkeypatch
):
    write(tmp_path / "store", [entry("a", rows=0)])
    with pytest.raises(StoreError, match="the selection is empty"):
        open_store(tmp_path / "store").to_arrow()
    selected(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r'pip install "midstream\[arrow\]"'):
        open_store(tmp_path / "store").to_arrow()


def test_other_tools_read_a_store_as_a_table_batch_by_batch(tmp_path, monkeypatch):
    monkeypatch.setattr("midstream.store.arrow._BATCH_BYTES", 7 * 8 * 4)
    selection = selected(tmp_path, layer=0)
    wanted, store = expected(selection), open_store(tmp_path / "store")
    taken, reads = Batch.numpy, []
    monkeypatch.setattr(Batch, "numpy", lambda batch: reads.append(len(batch)) or taken(batch))
    assert store.to_arrow(layer=0).read_next_batch().num_rows == 7
    assert reads == [7]
    frame = store.to_arrow(layer=0).read_pandas()
    media = [None if name != name else name for name in frame.pop("media")]
    assert holds({**frame.to_dict("list"), "media": media}, wanted)


def test_polars_reads_every_column(tmp_path):
    polars = pytest.importorskip("polars", reason="needs polars")
    wanted, store = expected(selected(tmp_path)), open_store(tmp_path / "store")
    frame = polars.from_arrow(store.to_arrow())
    assert holds(frame.to_dict(as_series=False), wanted)
    chosen = frame.filter(polars.col("layer") == 0).group_by("request").len().sort("request")
    by_request = Counter(
        request
        for request, layer in zip(wanted["request"], wanted["layer"], strict=True)
        if layer == 0
    )
    assert chosen.rows() == sorted(by_request.items())


def test_duckdb_reads_every_column(tmp_path):
    duckdb = pytest.importorskip("duckdb", reason="needs duckdb")
    wanted, store = expected(selected(tmp_path)), open_store(tmp_path / "store")
    relation = duckdb.from_arrow(store.to_arrow())
    columns = relation.columns
    rows = relation.fetchall()
    assert holds({name: [row[n] for row in rows] for n, name in enumerate(columns)}, wanted)
    sums = duckdb.from_arrow(store.to_arrow()).aggregate(
        "layer, sum(list_dot_product(vector::FLOAT[], vector::FLOAT[]))"
    )
    norms: dict[int, float] = {}
    for layer, vector in zip(wanted["layer"], wanted["vector"], strict=True):
        norms[layer] = norms.get(layer, 0.0) + sum(x * x for x in map(float, vector))
    assert dict(sums.fetchall()) == pytest.approx(norms, rel=1e-3)


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
    return datasets


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_datasets_loads_the_files(tmp_path, datasets, form, dtype):
    selection = selected(tmp_path, header(dtype=dtype))
    if form == "parquet":
        path = export_parquet(selection, tmp_path / "rows.parquet")
        found = datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache"))
    else:
        path = export_arrow(selection, tmp_path / "rows.arrow")
        found = datasets.Dataset.from_file(str(path))
    assert len(found) == len(selection)
    assert holds({name: found[name] for name in found.column_names}, expected(selection))
    vectors = found.with_format("torch", columns=["vector"])[:]["vector"]
    assert vectors.shape == (30, 8)
    torch.testing.assert_close(
        vectors.float(), torch.from_numpy(expected(selection)["vector"]).float()
    )


@pytest.mark.parametrize(
    ("codec", "decoded"), [("raw", 12), ("full8", 12), ("rp8:k=16,seed=1", 16)]
)
def test_a_tap_of_another_width_has_vectors_of_it_and_is_not_mixed_with_others(
    tmp_path, codec, decoded
):
    wide = ("attn_out", 0)
    head = header(codec=codec, dtype="float32", widths={wide: 12})
    write(tmp_path / "store", [entry("a", taps=(wide, TAPS[1]), head=head)], head)
    store = open_store(tmp_path / "store")
    with pytest.raises(StoreError, match="the rows differ in width: 12 at attn_out.0, 8 at resid"):
        store.to_arrow()
    selection = store.select(site="attn_out")
    path = export_parquet(selection, tmp_path / "rows.parquet")
    table = pa.parquet.read_table(path)
    assert table.schema.field("vector").type == pa.list_(pa.float32(), decoded)
    assert holds(table.to_pydict(), expected(selection))
    (said,) = json.loads(table.schema.metadata[b"midstream"])
    assert said["widths"] == {"attn_out.0": 12}
