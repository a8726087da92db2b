"""Export of stored rows as Parquet and Arrow files."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from midstream.errors import StoreError
from midstream.store import Selection
from midstream.store.arrow import NAMES, record_batches


def export_parquet(selection: Selection, path: str | os.PathLike[str]) -> Path:
    """Write the columns of `Store.to_arrow` to a Parquet file, compressed with zstd.

    `datasets.Dataset.from_parquet(path)` and other Parquet readers can load it.

    Raises:
        StoreError: as `Store.to_arrow`; or the file exists already or cannot be written.
    """
    reader = record_batches(selection)
    from pyarrow import parquet

    with (
        _unfinished(path) as file,
        parquet.ParquetWriter(
            file, reader.schema, compression="zstd", use_dictionary=list(NAMES)
        ) as writer,
    ):
        for batch in reader:
            writer.write_batch(batch)
    return Path(path)


def export_arrow(selection: Selection, path: str | os.PathLike[str]) -> Path:
    """Write the columns of `Store.to_arrow` as an Arrow stream file.

    The file can be memory-mapped: `datasets.Dataset.from_file(path)` reads only accessed rows.

    Raises:
        StoreError: as `Store.to_arrow`; or the file exists already or cannot be written.
    """
    reader = record_batches(selection)
    from pyarrow import ipc

    with _unfinished(path) as file, ipc.new_stream(file, reader.schema) as writer:
        for batch in reader:
            writer.write_batch(batch)
    return Path(path)


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
