"""Files of speculators' offline training: a data set of prompts, a file of rows for each."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from midstream.errors import StoreError
from midstream.lab.export.dataset_folder import DatasetFolder, hugging_face, lists
from midstream.lab.export.rows import AlignedRows, TokenRows, check_one_width

ROWS = "hidden_states"
_TOGETHER = 256


def write(rows: AlignedRows, folder: Path) -> int:
    """Write what speculators' `ArrowDataset` reads as `datapath`; return the tokens.

    The data set has `input_ids`, `loss_mask` and `seq_len` of each completion; its rows, [tokens,
    taps, width], are in `hidden_states/hs_i.safetensors`. The trainer applies the final norm of the
    model to the last tap, and joins the others. `token_freq.pt` counts the tokens of `loss_mask` by
    id, from which it chooses a vocabulary of `--draft-vocab-size`.
    """
    site, layer = rows.taps[-1]
    if site != "resid_post" or layer < max(number for _, number in rows.taps):
        raise StoreError(
            f"join: speculators applies the final norm to the last tap, so it must be resid_post "
            f"of the last layer, got {rows.names[-1]}"
        )
    check_one_width(rows, "speculators")
    datasets = hugging_face("the export speculators")
    number = datasets.Value("int64")
    features = datasets.Features(
        input_ids=datasets.Sequence(number), loss_mask=datasets.Sequence(number), seq_len=number
    )
    (folder / ROWS).mkdir(parents=True)
    tokens = files = 0
    counts: Counter[int] = Counter()
    sequences = rows.sequences()
    with DatasetFolder(folder, features, torch_format=True) as target:
        while part := [
            _saved(sequence, folder, files + at)
            for at, sequence in enumerate(islice(sequences, _TOGETHER))
        ]:
            target.write(_columns(part))
            files += len(part)
            tokens += sum(len(ids) for ids, _ in part)
            for ids, mask in part:
                counts.update(ids[mask > 0].tolist())
    torch.save(dict(counts), folder / "token_freq.pt")
    return tokens


def _saved(rows: TokenRows, folder: Path, number: int) -> tuple[Any, Any]:
    """Write the rows of a completion; return its token ids and loss mask, int64 [n]."""
    from safetensors.torch import save_file

    path = folder / ROWS / f"hs_{number}.safetensors"
    assert rows.stacked is not None
    save_file({"hidden_states": rows.stacked, "token_ids": rows.token_ids}, path)
    return rows.token_ids.numpy(), rows.loss_mask.numpy().astype(np.int64)


def _columns(part: list[tuple[Any, Any]]) -> dict[str, Any]:
    import pyarrow as pa

    ids, masks = zip(*part, strict=True)
    lengths = pa.array([len(own) for own in ids], pa.int64())
    return {"input_ids": lists(ids), "loss_mask": lists(masks), "seq_len": lengths}
