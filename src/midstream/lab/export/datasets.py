"""A data set of the Hugging Face Hub: Parquet files with a row per token, and a card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from midstream import sites
from midstream.console import format_ranges
from midstream.errors import MissingExtraError
from midstream.lab.export.dataset_folder import fixed
from midstream.lab.export.rows import AlignedRows, TokenRows, as_numpy
from midstream.version import __version__

_FILE_BYTES = 500 << 20


def write(rows: AlignedRows, folder: Path) -> int:
    """Write `data/train-00000.parquet` and so on with `README.md`; return the tokens.

    Columns: `request`, `tag`, `child`, `position`, `token_id`, `loss_mask`, and the vector at each
    tap, `resid_post.2`.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise MissingExtraError.of(error, "the export datasets") from None
    (folder / "data").mkdir(parents=True)
    per_file = max(_FILE_BYTES // rows.nbytes, 1)
    tokens = files = room = 0
    writer: Any = None
    for batch in rows.batches():
        table = pa.table(_columns(rows, batch))
        if writer is None or room < len(batch):
            if writer is not None:
                writer.close()
            name = f"train-{files:05d}.parquet"
            writer = parquet.ParquetWriter(
                str(folder / "data" / name), table.schema, compression="zstd"
            )
            files, room = files + 1, per_file
        writer.write_table(table)
        room -= len(batch)
        tokens += len(batch)
    if writer is not None:
        writer.close()
    (folder / "README.md").write_text(card(rows, tokens), "utf-8")
    return tokens


def card(rows: AlignedRows, tokens: int) -> str:
    """Return the text of the card, with the metadata that `load_dataset` reads."""
    header = rows.header
    files = [{"split": "train", "path": "data/*.parquet"}]
    # Values in JSON are YAML too, whatever is in them.
    metadata = {
        "configs": [{"config_name": "default", "data_files": files}],
        "tags": ["midstream", "activations"],
    }
    layers = sorted({layer for site, layer in rows.taps if site not in sites.ENDS})
    facts = {
        "Model": header.model,
        "Revision": header.revision or "its default",
        "Sites": ", ".join(dict.fromkeys(site for site, _ in rows.taps)),
        "Layers": format_ranges(layers),
        "Width": ", ".join(map(str, dict.fromkeys(rows.widths))),
        "Dtype of the model": header.dtype,
        "Codec": header.codec,
        "Tokens": f"{tokens:,}",
        "Rows": f"{tokens * len(rows.taps):,}",
        "midstream": __version__,
        "vLLM": header.vllm,
    }
    front = "\n".join(f"{name}: {json.dumps(value)}" for name, value in metadata.items())
    table = "\n".join(f"| {name} | {_cell(value)} |" for name, value in facts.items())
    return (
        f"---\n{front}\n---\n\n# Activations of {_cell(header.model)}\n\n"
        "A row is a token; its vectors are in the columns of "
        f"{', '.join(f'`{name}`' for name in rows.names)}. `loss_mask` is true of the assistant's "
        f"tokens, or where roles are not known of all.\n\n| | |\n|---|---|\n{table}\n"
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("`", "'").replace("<", "&lt;")


def _columns(rows: AlignedRows, batch: TokenRows) -> dict[str, Any]:
    import pyarrow as pa

    own = rows.selection.take(batch.index)
    columns = {
        "request": pa.array(own.request, pa.string()),
        "tag": pa.array(own.tag, pa.string()),
        "child": pa.array(own.child.numpy(), pa.int32()),
        "position": pa.array(batch.positions.numpy()),
        "token_id": pa.array(batch.token_ids.numpy()),
        "loss_mask": pa.array(batch.loss_mask.numpy()),
    }
    vectors = zip(rows.names, batch.values, strict=True)
    return columns | {name: fixed(as_numpy(values)) for name, values in vectors}
