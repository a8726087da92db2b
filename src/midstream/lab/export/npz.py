"""Export of stored rows as npz files, one per site and layer of a request."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.errors import StoreError
from midstream.results.activations import Activations
from midstream.results.encoded_rows import Rows
from midstream.results.media_span import spans_to_json
from midstream.sinks.files import MANIFEST
from midstream.sinks.manifest import FORMAT, VERSION
from midstream.sinks.npz_arrays import arrays_of, described
from midstream.sites import Tap
from midstream.store import Selection, Store
from midstream.store.format.shard import Shard
from midstream.store.selection import as_selection
from midstream.store.stored_activations import media_of
from midstream.validation import show

_MAX_NAME = 200
_CUT = 180  # characters kept of a longer name, before its digest: 245 in total


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of one tap of a request: indices `rows` into a group of its shard."""

    tap: Tap
    group: int
    rows: NDArray[np.int64]


def export_npz(selection: Selection | Store, folder: str | os.PathLike[str]) -> list[Path]:
    """Write `folder/tag/request/resid_post.12.npz` and so on, each request with `manifest.json`.

    The files have the format of the sink `npz`: `positions`, `token_ids`, and `rows` or the encoded
    arrays of other codecs; see `midstream.sinks.npz_arrays.arrays_of`. The manifest has shapes,
    dtypes, paths, the codec, the range of its scales, and the request's metadata. If the selection
    has any completion of a request but its first, completion i is in `folder/tag/request/i`. Each
    folder appears atomically by a rename. Characters that a folder name cannot have are
    percent-encoded: `a/b` becomes `a%2Fb`.

    Args:
        selection: the rows, or a store, of which it is all rows.
        folder: target folder; created if missing.

    Returns:
        The folder of each completion.

    Raises:
        StoreError: a completion's folder exists already, a completion was stored twice, or rows
            are damaged.
        OSError: a file cannot be written.
    """
    requests = _by_request(as_selection(selection))
    lines = [shard.lines[request] for shard, request, _ in requests]
    # Requests with a completion other than the first.
    several = {(line.tag, line.request) for line in lines if line.child}
    places = [_place(Path(folder), shard, request, several) for shard, request, _ in requests]
    seen: dict[Path, tuple[str, str, int]] = {}
    for place, line in zip(places, lines, strict=True):
        name = show(line.request)
        if os.path.lexists(place):
            raise StoreError(f"request {name}: {place} exists already")
        own = line.tag, line.request, line.child
        owner = seen.get(place)
        if owner == own:
            raise StoreError(
                f"request {name}: stored more than once; remove duplicates with `prune`"
            )
        if owner is not None:
            raise StoreError(
                f"request {name}: {place} is the folder of completion {owner[2]} of request "
                f"{show(owner[1])} too; export them to two folders, selected by `tag`"
            )
        seen[place] = own
    # A request may have the name of another one's tag: its folder, which has that one's in it, must
    # be there first.
    for place, (shard, request, parts) in sorted(
        zip(places, requests, strict=True), key=lambda pair: len(pair[0].parts)
    ):
        place.parent.mkdir(parents=True, exist_ok=True)
        unfinished = place.parent / f".{uuid.uuid4().hex}.part"
        unfinished.mkdir()
        try:
            _fill(unfinished, shard, request, parts)
            unfinished.rename(place)
        except BaseException:
            shutil.rmtree(unfinished)
            raise
    return places


def _by_request(selection: Selection) -> list[tuple[Shard, int, list[_Part]]]:
    """Return the completions of a selection, in the order of shards, with their rows."""
    completions: dict[tuple[str, int], tuple[Shard, int, list[_Part]]] = {}
    for segment in selection.segments:
        owners, bounds = segment.shard.owners(segment.group)
        runs = np.searchsorted(bounds, segment.rows, side="right") - 1
        cuts = np.flatnonzero(np.diff(runs)) + 1
        for rows in np.split(segment.rows, cuts):
            request = int(owners[np.searchsorted(bounds, rows[0], side="right") - 1])
            key = segment.shard.name, request
            _, _, parts = completions.setdefault(key, (segment.shard, request, []))
            parts.append(_Part(segment.tap, segment.group, rows))
    return [completions[key] for key in sorted(completions)]


def _place(folder: Path, shard: Shard, request: int, several: set[tuple[str, str]]) -> Path:
    line = shard.lines[request]
    place = folder / _folder_name(line.tag) if line.tag else folder
    place = place / _folder_name(line.request)
    return place / str(line.child) if (line.tag, line.request) in several else place


def _folder_name(name: str) -> str:
    """Return a valid folder name, distinct for each `name`."""
    safe = quote(name, safe="+=,@ ")
    if safe.startswith("."):
        safe = f"%2E{safe[1:]}"
    if len(safe) > _MAX_NAME:
        safe = f"{safe[:_CUT]}~{sha256(name.encode()).hexdigest()}"
    return safe


def _fill(folder: Path, shard: Shard, request: int, parts: Sequence[_Part]) -> None:
    header, line = shard.header, shard.lines[request]
    activations = _activations(shard, parts)
    files = []
    for site, layer in activations:
        width = header.width((site, layer))
        arrays = arrays_of(activations, site, layer, width)
        name = f"{site}.{layer}.npz"
        # No array is named `allow_pickle`, which is an argument of savez.
        np.savez(folder / name, **arrays)  # type: ignore[arg-type]
        files.append(
            {
                "path": name,
                "site": site,
                "layer": layer,
                "rows": len(arrays["positions"]),
                **described(arrays, width, header.hidden_size),
            }
        )
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "name": line.request,
        "tag": line.tag,
        "completion": line.child,
        "prompt_tokens": line.prompt_tokens,
        "media": spans_to_json(media_of(shard, request)),
        "metadata": shard.metadata(request),
        **replace(header, widths=()).to_dict(),
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _activations(shard: Shard, parts: Sequence[_Part]) -> Activations:
    header = shard.header
    values: dict[Tap, Tensor | Rows] = {}
    positions: dict[Tap, Tensor] = {}
    tokens = torch.zeros(0, dtype=torch.int64)
    for part in parts:
        data = torch.from_numpy(shard.gather(part.group, part.tap, part.rows))
        width = header.width(part.tap)
        values[part.tap] = Rows(
            header.open_codec(), width, header.torch_dtype, (data[:, None],), (0,)
        )
        places = torch.from_numpy(shard.column(part.group, "position")[part.rows])
        positions[part.tap] = places
        more = int(places[-1]) + 1 - len(tokens)
        tokens = torch.nn.functional.pad(tokens, (0, max(more, 0)))
        tokens[places] = torch.from_numpy(shard.column(part.group, "token_id")[part.rows])
    return Activations(values, positions, tokens)
