"""NumPy arrays that are memory-mapped when they are read, one for each tap."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap

from midstream.lab.export.rows import AlignedRows
from midstream.version import __version__

MANIFEST = "manifest.json"


def write(rows: AlignedRows, folder: Path) -> int:
    """Write `resid_post.2.npy` [tokens, width] and so on; return the tokens.

    `position`, `token_id`, `loss_mask` and `completion` are [tokens]; line i of `requests.jsonl`
    has the id, tag and child of completion i, and `manifest.json` what all rows share.
    """
    folder.mkdir()
    count = rows.count()

    def array(name: str, dtype: Any, *shape: int) -> Any:
        path = folder / f"{name}.npy"
        return open_memmap(path, "w+", np.dtype(dtype), (count, *shape))  # type: ignore[no-untyped-call]

    vectors = [
        array(name, rows.numpy_dtype, width)
        for name, width in zip(rows.names, rows.widths, strict=True)
    ]
    position, token_id = array("position", np.int64), array("token_id", np.int64)
    loss_mask, completion = array("loss_mask", np.bool_), array("completion", np.int64)
    numbers: dict[tuple[str, str, int], int] = {}
    start = 0
    with (folder / "requests.jsonl").open("w", encoding="utf-8") as file:
        for batch in rows.batches():
            where = slice(start, start + len(batch))
            for target, values in zip(vectors, batch.values, strict=True):
                torch.from_numpy(target[where]).copy_(values)
            position[where], token_id[where] = batch.positions.numpy(), batch.token_ids.numpy()
            loss_mask[where] = batch.loss_mask.numpy()
            own = rows.selection.take(batch.index)
            keys = zip(own.request, own.tag, own.child.tolist(), strict=True)
            for at, key in enumerate(keys, start):
                if key not in numbers:
                    numbers[key] = len(numbers)
                    line = dict(zip(("request", "tag", "child"), key, strict=True))
                    file.write(json.dumps(line) + "\n")
                completion[at] = numbers[key]
            start += len(batch)
    for written in (*vectors, position, token_id, loss_mask, completion):
        written.flush()
    manifest = {"taps": rows.names, "tokens": count, **rows.header.to_dict()}
    text = json.dumps({**manifest, "exported_by": __version__}, indent=1)
    (folder / MANIFEST).write_text(text, "utf-8")
    return count
