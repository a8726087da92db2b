"""Folders that `datasets.load_from_disk` reads, written a batch at a time."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from midstream.errors import MissingExtraError

_FILE_BYTES = 500 << 20


def hugging_face(needed_by: str) -> Any:
    """Import `datasets`, and with it pyarrow; MissingExtraError: it is not installed."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise MissingExtraError.of(error, needed_by) from None
    return datasets


class DatasetFolder:
    """Arrow files of 500 MB, with the features and the state that belong to them."""

    def __init__(self, folder: Path, features: Any, torch_format: bool = False) -> None:
        """Args:
        folder: where the files are written; it exists.
        features: `datasets.Features` of the columns.
        torch_format: whether the columns are read as tensors.
        """
        self._folder = folder
        self._features = features
        self._torch_format = torch_format
        self._files: list[str] = []
        self._writer: Any = None
        self._bytes = 0

    def __enter__(self) -> DatasetFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end_file()
        if kind is None:
            self._describe()

    def write(self, columns: Mapping[str, Any]) -> None:
        """Write rows: of each column a pyarrow array in the storage of its feature."""
        import pyarrow as pa

        schema = self._features.arrow_schema
        arrays = []
        for field in schema:
            array = columns[field.name]
            if isinstance(field.type, pa.BaseExtensionType):
                array = pa.ExtensionArray.from_storage(field.type, array)
            arrays.append(array)
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        if self._writer is None or self._bytes + batch.nbytes > _FILE_BYTES:
            self._end_file()
            name = f"data-{len(self._files):05d}.arrow"
            self._writer = pa.ipc.new_stream(str(self._folder / name), schema)
            self._files.append(name)
            self._bytes = 0
        self._writer.write_batch(batch)
        self._bytes += batch.nbytes

    def _end_file(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _describe(self) -> None:
        from datasets import DatasetInfo

        DatasetInfo(features=self._features).write_to_directory(str(self._folder))
        state: dict[str, Any] = {
            "_data_files": [{"filename": name} for name in self._files],
            "_fingerprint": uuid.uuid4().hex[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": "torch" if self._torch_format else None,
            "_output_all_columns": False,
            "_split": None,
        }
        (self._folder / "state.json").write_text(json.dumps(state, indent=2), "utf-8")


def nested(values: np.ndarray[Any, Any]) -> Any:
    """Return an array [n, …] as a pyarrow array of n lists (of lists)."""
    import pyarrow as pa

    array = pa.array(values.reshape(-1))
    for axis in range(values.ndim - 1, 0, -1):
        size = values.shape[axis]
        offsets = np.arange(0, len(array) + 1, size, dtype=np.int32)
        array = pa.ListArray.from_arrays(offsets, array)
    return array


def fixed(values: np.ndarray[Any, Any]) -> Any:
    """Return an array [n, width] as a pyarrow array of n lists of a fixed size."""
    import pyarrow as pa

    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])


def lists(parts: Sequence[np.ndarray[Any, Any]]) -> Any:
    """Return one-dimensional arrays as a pyarrow array of lists of different lengths."""
    import pyarrow as pa

    offsets = np.cumsum([0, *map(len, parts)], dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(parts)))
