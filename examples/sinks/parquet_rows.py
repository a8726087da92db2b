"""A sink that writes rows to Parquet files, for pandas, DuckDB or Spark. Needs pyarrow.

LLM(midstream={"sinks": {"parquet": {"class": "parquet_rows:ParquetRows", "root": "rows"}}})
"""

from __future__ import annotations

import os
import uuid
from typing import Any

from midstream.sinks import Delivery, Sink


class ParquetRows(Sink):
    """Writes a file per flush, with a line per row: its request, site, layer, token and vector."""

    group_seconds = 1.0

    def __init__(self, root: str) -> None:
        """Args:
        root: folder of the files; created if missing.
        """
        self._root = root
        self._rows: list[dict[str, Any]] = []

    def write(self, delivery: Delivery) -> None:
        rows = delivery.activations
        for (site, layer), values in rows.items():
            positions = rows.positions_of(site, layer).tolist()
            tokens = rows.token_ids_of(site, layer).tolist()
            for position, token, vector in zip(
                positions, tokens, values.float().numpy(), strict=True
            ):
                self._rows.append(
                    {
                        "request": delivery.name,
                        "tag": delivery.tag,
                        "site": site,
                        "layer": layer,
                        "position": position,
                        "token_id": token,
                        "vector": vector.copy(),
                    }
                )

    def flush(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows, self._rows = self._rows, []
        if not rows:
            return
        os.makedirs(self._root, exist_ok=True)
        path = os.path.join(self._root, f"{uuid.uuid4().hex}.parquet")
        pq.write_table(pa.Table.from_pylist(rows), f"{path}.part")
        os.replace(f"{path}.part", path)
