"""The forms of exports, and the function that writes a selection in one of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from midstream.errors import StoreError
from midstream.lab.export import datasets, memmap, saelens, specforge, speculators
from midstream.lab.export.arrow import export_arrow, export_parquet
from midstream.lab.export.npz import export_npz
from midstream.lab.export.rows import AlignedRows
from midstream.lab.export.target import unfinished
from midstream.sites import Tap
from midstream.store import Selection, Store
from midstream.store.selection import as_selection
from midstream.validation import listed, show

# Each form with a row per stored row.
ROWS: Mapping[str, Callable[[Selection, Any], Any]] = {
    "npz": export_npz,
    "parquet": export_parquet,
    "arrow": export_arrow,
}
# Each form in which the rows of a token are together: it writes a folder, and returns the tokens.
ALIGNED: Mapping[str, Callable[[AlignedRows, Path], int]] = {
    "saelens": saelens.write,
    "speculators": speculators.write,
    "specforge": specforge.write,
    "datasets": datasets.write,
    "memmap": memmap.write,
}
# Those that have a length.
_LENGTHS = ("saelens", "speculators", "specforge")


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote.

    Attributes:
        path: the file or folder.
        rows: number of rows: of stored ones, or of tokens if the rows of a token are together.
        skipped: number of tokens that lack a row at a tap; of completions, in speculators' and
            SpecForge's form.
        cut: number of tokens beyond `length`.
        files: number of folders of npz, else 1.
    """

    path: Path
    rows: int
    skipped: int = 0
    cut: int = 0
    files: int = 1


def export(
    selection: Selection | Store,
    path: str | os.PathLike[str],
    to: str,
    *,
    join: Sequence[Tap | str] | None = None,
    length: int | None = None,
    exclude: Literal["first"] | None = None,
) -> Exported:
    """Write rows in a form of another tool, in constant memory.

    The file or folder appears once it is complete. Vectors are decoded; where a form is of NumPy or
    Arrow, which have no bfloat16, these are float32.

    Args:
        selection: the rows, or a store, of which it is all rows.
        path: file or folder to write.
        to: "npz", "parquet" or "arrow": see `export_npz`, `export_parquet`, `export_arrow`.
            "saelens": cached activations for SAELens. "speculators", "specforge": files of whole
            completions for draft models. "datasets": Parquet with a card, for the Hugging Face
            Hub. "memmap": an array in a file for each tap.
        join: (site, layer) of the vectors of a token, or their names; default: all of the
            selection, by layer. The order is that of draft models' inputs.
        length: tokens of a context of SAELens, default 128; or the tokens of a completion that are
            kept at most, default all.
        exclude: "first" leaves out the first token of each prompt; of completions, its loss.

    Raises:
        StoreError: an argument is malformed or not of the form, rows are damaged, or the target
            exists or cannot be written.
        MissingExtraError: a package is not installed.
    """
    known = (*ROWS, *ALIGNED)
    if to not in known:
        raise StoreError(f"to: expected one of {listed(known)}, got {show(to)}")
    options = {"join": join, "length": length, "exclude": exclude}
    for name, value in options.items():
        if value is not None and (to in ROWS or (name == "length" and to not in _LENGTHS)):
            raise StoreError(f"{name}: the form {to} has none, got {show(value)}")
    if to in ROWS:
        chosen = as_selection(selection)
        written = ROWS[to](chosen, path)
        files = len(written) if isinstance(written, list) else 1
        return Exported(Path(path), len(chosen), files=files)
    with unfinished(path) as folder:
        rows = AlignedRows(selection, join, length, exclude)
        tokens = ALIGNED[to](rows, folder)
    return Exported(Path(path), tokens, rows.skipped, rows.cut)
