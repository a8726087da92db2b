"""Export of stored rows as Arrow record batches, and as Parquet and Arrow files."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from midstream.errors import StoreError
from midstream.store import Batch, Header, Selection

_BATCH_BYTES = 16 << 20  # bytes of vectors per record batch
_NAMES = ("request", "tag", "site", "media")  # columns with few distinct values


def record_batches(selection: Selection) -> Any:
    """Return the rows as a `pyarrow.RecordBatchReader`, which reads them lazily.

    Columns: `request`, `tag`, `site` string; `child`, `layer` int32; `position`, `token_id` int64;
    `media` string, such as `image.0` for the tokens of a prompt's first image, null for text;
    `vector` a fixed-size list with the decoded vector, of float16 for float16 rows with codec raw,
    else of float32. (Arrow has no bfloat16; float32 represents all of its values.) The schema's
    metadata has the shards' headers under `midstream`, as JSON.

    Raises:
        StoreError: the selection is empty, so that the width of its vectors is unknown; its taps
            differ in width; or pyarrow is not installed. During iteration: rows are damaged.
    """
    pa = _pyarrow()
    schema, rows = _schema(selection)
    batches = (_record_batch(batch, schema) for batch in selection.batches(rows))
    return pa.RecordBatchReader.from_batches(schema, batches)


def export_parquet(selection: Selection, path: str | os.PathLike[str]) -> Path:
    """Write the columns of `record_batches` to a Parquet file, compressed with zstd.

    `datasets.Dataset.from_parquet(path)` and other Parquet readers can load it.

    Raises:
        StoreError: as `record_batches`; or the file exists already or cannot be written.
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
    """Write the columns of `record_batches` as an Arrow stream file.

    The file can be memory-mapped: `datasets.Dataset.from_file(path)` reads only accessed rows.

    Raises:
        StoreError: as `record_batches`; or the file exists already or cannot be written.
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
        raise StoreError('pyarrow is required: pip install "midstream[arrow]"') from None
    return pyarrow


def _schema(selection: Selection) -> tuple[Any, int]:
    """Return the schema of a selection's record batches, and the rows per batch."""
    pa = _pyarrow()
    headers: list[Header] = list(
        dict.fromkeys(segment.shard.header for segment in selection.segments)
    )
    if not headers:
        raise StoreError("no rows to export: the selection is empty")
    first = headers[0]
    width = selection.width()
    nothing = torch.zeros(0, first.row_bytes(selection.taps[0]), dtype=torch.uint8)
    values = first.open_codec().decode(nothing, width, first.torch_dtype)
    width = values.shape[1]  # as decoded
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
            ("media", pa.string()),
            ("vector", pa.list_(kind, width)),
        ],
        metadata={"midstream": json.dumps([header.to_dict() for header in headers])},
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
        [span and f"{span.kind}.{span.index}" for span in batch.media],
        pa.FixedSizeListArray.from_arrays(vectors, kind.list_size),
    ]
    arrays = [
        column if isinstance(column, pa.Array) else pa.array(column, field.type)
        for column, field in zip(columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


@contextmanager
def _unfinished(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the path of a temporary file, which is renamed to `path` if nothing is raised."""
    target = Path(path)
    if os.path.lexists(target):
        raise StoreError(f"{target} exists already")
    part = target.parent / f".{target.name}.{uuid.uuid4().hex}.part"
    try:
        yield str(part)
        part.rename(target)
    except OSError as error:
        # The message names the target, not the temporary file.
        problem = os.strerror(error.errno) if error.errno else error
        raise StoreError(f"{target}: {problem}") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
