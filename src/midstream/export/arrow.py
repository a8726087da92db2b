"""Rows of a store as Arrow record batches, and as Parquet and Arrow files."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from midstream.errors import StoreError
from midstream.store import Batch, Header, Selection

_BATCH_BYTES = 16 << 20  # of vectors
_NAMES = ("request", "tag", "site")  # columns of few different values


def record_batches(selection: Selection) -> Any:
    """Rows as a `pyarrow.RecordBatchReader`, which reads them as it is read.

    Columns: `request`, `tag`, `site` string; `child`, `layer` int32; `position`, `token_id` int64;
    `vector` a list of fixed size: decoded, of float32, or of float16 where codec raw kept that.
    (Arrow has no bfloat16; float32 holds all of its values.) The schema's metadata has under
    `midstream` the headers of the shards, as JSON.

    Raises:
        StoreError: the selection is empty, so that nobody knows how wide its vectors are; or
            pyarrow is not installed. While it is read: rows are damaged.
    """
    pa = _pyarrow()
    schema, rows = _schema(selection)
    batches = (_record_batch(batch, schema) for batch in selection.batches(rows))
    return pa.RecordBatchReader.from_batches(schema, batches)


def export_parquet(selection: Selection, path: str | os.PathLike[str]) -> Path:
    """Writes the columns of `record_batches` to a Parquet file, compressed by zstd. It loads as
    `datasets.Dataset.from_parquet(path)` and wherever else Parquet does.

    Raises:
        StoreError: as `record_batches`; or there is a file already, or it cannot be written.
    """
    reader = record_batches(selection)
    from pyarrow import parquet

    with (
        _unfinished(path) as file,
        parquet.ParquetWriter(
            file, reader.schema, compression="zstd", use_dictionary=list(_NAMES)
        ) as writer,
    ):
        for batch in reader:
            writer.write_batch(batch)
    return Path(path)


def export_arrow(selection: Selection, path: str | os.PathLike[str]) -> Path:
    """Writes the columns of `record_batches` as an Arrow stream. It can be memory-mapped:
    `datasets.Dataset.from_file(path)` reads only what is asked for.

    Raises:
        StoreError: as `record_batches`; or there is a file already, or it cannot be written.
    """
    reader = record_batches(selection)
    from pyarrow import ipc

    with _unfinished(path) as file, ipc.new_stream(file, reader.schema) as writer:
        for batch in reader:
            writer.write_batch(batch)
    return Path(path)


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise StoreError('this needs pyarrow: pip install "midstream[arrow]"') from None
    return pyarrow


def _schema(selection: Selection) -> tuple[Any, int]:
    """The schema of a selection's record batches, and how many rows each of them has."""
    pa = _pyarrow()
    headers: list[Header] = list(
        dict.fromkeys(segment.shard.header for segment in selection.segments)
    )
    if not headers:
        raise StoreError("there are no rows to export: the selection is empty")
    first = headers[0]
    nothing = torch.zeros(0, first.row_bytes, dtype=torch.uint8)
    values = first.open_codec().decode(nothing, first.hidden_size, first.torch_dtype)
    width = values.shape[1]
    kind = pa.float16() if values.dtype == torch.float16 else pa.float32()
    schema = pa.schema(
        [
            ("request", pa.string()),
            ("child", pa.int32()),
            ("tag", pa.string()),
            ("site", pa.string()),
            ("layer", pa.int32()),
            ("position", pa.int64()),
            ("token_id", pa.int64()),
            ("vector", pa.list_(kind, width)),
        ],
        metadata={"midstream": json.dumps([asdict(header) for header in headers])},
    )
    return schema, max(1, _BATCH_BYTES // (width * kind.bit_width // 8))


def _record_batch(batch: Batch, schema: Any) -> Any:
    pa = _pyarrow()
    kind = schema.field("vector").type
    vectors = pa.array(batch.numpy().reshape(-1), kind.value_type)
    columns = [
        batch.request,
        batch.child.numpy(),
        batch.tag,
        batch.site,
        batch.layer.numpy(),
        batch.position.numpy(),
        batch.token_id.numpy(),
        pa.FixedSizeListArray.from_arrays(vectors, kind.list_size),
    ]
    arrays = [
        column if isinstance(column, pa.Array) else pa.array(column, field.type)
        for column, field in zip(columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


@contextmanager
def _unfinished(path: str | os.PathLike[str]) -> Iterator[str]:
    """Another file's path, which becomes this one if nothing is raised.

    Raises:
        StoreError: there is a file already, or it cannot be written.
    """
    target = Path(path)
    if os.path.lexists(target):
        raise StoreError(f"{target} is there already")
    part = target.parent / f".{target.name}.{uuid.uuid4().hex}.part"
    try:
        yield str(part)
        part.rename(target)
    except OSError as error:
        # By the name that was asked for.
        problem = os.strerror(error.errno) if error.errno else error
        raise StoreError(f"{target}: {problem}") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
