"""Rows as SAELens reads them: cached activations, and batches for its trainers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from midstream import sites
from midstream.errors import StoreError
from midstream.lab.export.dataset_folder import DatasetFolder, fixed, hugging_face, nested
from midstream.lab.export.rows import AlignedRows, as_numpy
from midstream.sites import Tap

CONTEXT = 128
CONFIG = "cache_activations_runner_cfg.json"


def write(rows: AlignedRows, folder: Path) -> int:
    """Write what `ActivationsStore` reads as `cached_activations_path`; return the tokens.

    A row of the data set is a context: of each tap a column with TransformerLens's name, [context,
    width], and `token_ids`. Contexts are pieces of one stream of tokens in the store's order; the
    last ones, too few for a context, are left out.
    """
    datasets = hugging_face("the export saelens")
    context = rows.length or CONTEXT
    tokens = rows.count()
    count = tokens // context * context
    if not count:
        raise StoreError(f"length: {tokens} tokens are fewer than a context of {context}")
    rows.cut = tokens - count
    hooks = [sites.transformer_lens_name(tap) for tap in rows.taps]
    dtype = rows.numpy_dtype.name
    features: dict[str, Any] = {
        hook: datasets.Array2D(shape=(context, width), dtype=dtype)
        for hook, width in zip(hooks, rows.widths, strict=True)
    }
    features["token_ids"] = datasets.Sequence(datasets.Value("int32"), length=context)
    folder.mkdir()
    with DatasetFolder(folder, datasets.Features(features)) as target:
        for batch in rows.batches(multiple=context):
            whole = batch.cut(len(batch) // context * context)
            if not len(whole):
                continue
            columns = {
                hook: nested(as_numpy(values).reshape(-1, context, values.shape[1]))
                for hook, values in zip(hooks, whole.values, strict=True)
            }
            ids = whole.token_ids.numpy().astype(np.int32).reshape(-1, context)
            target.write({**columns, "token_ids": fixed(ids)})
    config = {
        "dataset_path": rows.store,
        "model_name": rows.header.model,
        "model_batch_size": max(1, min(32, count // context)),
        "hook_name": hooks[0],
        "d_in": rows.widths[0],
        "training_tokens": count,
        "context_size": context,
        "dtype": dtype,
        "prepend_bos": False,
        "shuffle": False,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2), "utf-8")
    return count


def saelens_batches(
    dataset: Any, *, epochs: int | None = None, dtype: torch.dtype = torch.float32
) -> Iterator[Any]:
    """Yield batches for the argument `data_provider` of SAELens' trainers.

    Args:
        dataset: a `RowDataset`, or the `LiveRows` of an engine.
        epochs: how often to read it; None: without end.
        dtype: of the batches; that of the SAE.

    Yields:
        [rows, width] of one tap, for `SAETrainer`. Of several taps a dict of these by
        TransformerLens's name, for `MultiSAETrainer`: the same tokens in each.
    """
    for epoch in itertools.count() if epochs is None else range(epochs):
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        is_empty = True
        for batch in dataset:
            is_empty = False
            yield _named(batch["values"], dataset.taps, dtype)
        if is_empty:
            return


def _named(values: Any, taps: Sequence[Tap] | None, dtype: torch.dtype) -> Any:
    """Return the values of a batch without the axis of taps, or by the names of these."""
    if taps is None:
        return values.to(dtype)
    columns = list(values.values()) if isinstance(values, dict) else list(values.unbind(1))
    if len(columns) == 1:
        return columns[0].to(dtype)
    return {
        sites.transformer_lens_name(tap): column.to(dtype)
        for tap, column in zip(taps, columns, strict=True)
    }
