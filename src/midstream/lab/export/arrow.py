"""Export of stored rows as Parquet and Arrow files."""

from __future__ import annotations

import os
from pathlib import Path

from midstream.lab.export.target import unfinished
from midstream.store import Selection, Store
from midstream.store.arrow import NAMES, record_batches
from midstream.store.selection import as_selection


def export_parquet(selection: Selection | Store, path: str | os.PathLike[str]) -> Path:
    """Write the columns of `Store.to_arrow` to a Parquet file, compressed with zstd.

    `datasets.Dataset.from_parquet(path)` and other Parquet readers can load it.

    Raises:
        StoreError: as `Store.to_arrow`; or the file exists already or cannot be written.
    """
    reader = record_batches(as_selection(selection))
    from pyarrow import parquet

    with (
        unfinished(path) as file,
        parquet.ParquetWriter(
            str(file), reader.schema, compression="zstd", use_dictionary=list(NAMES)
        ) as writer,
    ):
        for batch in reader:
            writer.write_batch(batch)
    return Path(path)


def export_arrow(selection: Selection | Store, path: str | os.PathLike[str]) -> Path:
    """Write the columns of `Store.to_arrow` as an Arrow stream file.

    The file can be memory-mapped: `datasets.Dataset.from_file(path)` reads only accessed rows.

    Raises:
        StoreError: as `Store.to_arrow`; or the file exists already or cannot be written.
    """
    reader = record_batches(as_selection(selection))
    from pyarrow import ipc

    with unfinished(path) as file, ipc.new_stream(str(file), reader.schema) as writer:
        for batch in reader:
            writer.write_batch(batch)
    return Path(path)
