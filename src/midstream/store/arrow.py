"""Stored rows as Arrow record batches, which pandas, Polars and DuckDB read."""

from __future__ import annotations

import json
from typing import Any

import torch

from midstream.errors import MissingExtraError, StoreError
from midstream.store.format.entry import Header
from midstream.store.selection import Batch, Selection

NAMES = ("request", "tag", "site", "media")  # columns with few distinct values
_BATCH_BYTES = 16 << 20  # bytes of vectors per record batch


def record_batches(selection: Selection) -> Any:
    """Return a reader of the rows; see `Store.to_arrow`."""
    pa = _pyarrow()
    schema, rows = _schema(selection)
    batches = (_record_batch(batch, schema) for batch in selection.batches(rows))
    return pa.RecordBatchReader.from_batches(schema, batches)


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ModuleNotFoundError as error:
        raise MissingExtraError.of(error, "to_arrow") from None
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
