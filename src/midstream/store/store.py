"""Reader of a store: requests by id, and selections of rows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from midstream import sites
from midstream.console import format_ranges
from midstream.errors import StoreError
from midstream.hub import Card, HubObject
from midstream.plan.argument_names import accept_spellings
from midstream.results.activations import Activations
from midstream.sites import Tap
from midstream.store.arrow import record_batches
from midstream.store.backends.base import Folder, check_store
from midstream.store.backends.local import folder_of, local_folder_of
from midstream.store.filter import read_filter
from midstream.store.format.shard import Shard
from midstream.store.selection import Selection
from midstream.store.stored_activations import read_activations
from midstream.validation import hint, is_int, kind, show, suggests


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """One completion in a store.

    Attributes:
        request: id of the request.
        child: index of the completion.
        tag: as in the Entry.
        prompt_tokens: number of prompt tokens.
        shard: name of its shard.
    """

    request: str
    child: int
    tag: str
    prompt_tokens: int
    shard: str
    _shard: Shard = field(repr=False, compare=False)
    _index: int = field(repr=False, compare=False)

    def activations(self) -> Activations:
        """Return the captured rows; each tap's rows are read on access.

        Raises:
            StoreError: the index of the rows is damaged.
        """
        return read_activations(self._shard, self._index)

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the entry."""
        return self._shard.metadata(self._index)

    @property
    def taps(self) -> tuple[Tap, ...]:
        """Every (site, layer) of the completion."""
        return self._shard.taps(self._index)

    def __repr__(self) -> str:
        tag = f", tag={self.tag!r}" if self.tag else ""
        return f"StoredRequest({self.request!r}, child={self.child}{tag}, {len(self.taps)} taps)"


def open_store(root: str | os.PathLike[str], since: str = "") -> Store:
    """Open a store for reading. Only the names of its shards are read.

    Args:
        root: its directory, or `s3://bucket/prefix`. An empty directory is an empty store.
        since: a shard name; shards whose names sort before it are ignored. Names begin with the
            time of writing, see `midstream.store.writer.new_name`.

    Raises:
        StoreError: the directory does not exist, or has files and no shard; or `since` is not a
            name.
    """
    return Store(check_store(folder_of(root)), since)


# Names of tables and of data sets.
_TABLE = "store.to_arrow(layer=10) has a row for each captured row; "
_INSTEAD = {
    "to_pandas": _TABLE + "write store.to_arrow(layer=10).read_pandas()",
    "to_polars": _TABLE + "write polars.from_arrow(store.to_arrow(layer=10))",
    "to_duckdb": _TABLE + "write duckdb.from_arrow(store.to_arrow(layer=10))",
    **dict.fromkeys(("to_dataset", "to_parquet"), "see midstream.lab.export.export_parquet"),
    **dict.fromkeys(("batches", "take"), "select rows first, as store.select(layer=10)"),
}


@suggests(_INSTEAD)
class Store(HubObject):
    """The captures in a directory.

    A shard is opened and checked on first use; its header and list of requests stay in memory.
    Rows are memory-mapped, compared with their checksums on first read, and copied on access.

    Shards written after the store was opened become visible with `refresh`.
    """

    def __init__(self, folder: Folder, since: str = "") -> None:
        if not isinstance(since, str):
            raise StoreError(f"since: expected the name of a shard, got {kind(since)}")
        self._folder = folder
        self._since = since
        self._open: dict[str, Shard] = {}
        self._names: list[str] = []
        self._requests: tuple[StoredRequest, ...] | None = None
        self._by_id: dict[tuple[str, int], list[StoredRequest]] | None = None
        self.refresh()

    hub_files: ClassVar[tuple[str, ...]] = ("*.safetensors",)
    hub_type: ClassVar[str] = "dataset"

    def to_folder(self, folder: Path) -> None:
        """Write links to the shards into a folder.

        Raises:
            StoreError: the store is in no local directory.
        """
        root = Path(local_folder_of(self.root).root).resolve()
        for name in self._names:
            (folder / name).symlink_to(root / name)

    @classmethod
    def from_folder(cls, folder: Path) -> Store:
        """Open a store in a local directory."""
        return open_store(folder)

    def card(self) -> Card:
        """Return what the card of a repository says."""
        taps = [tap for request in self.requests for tap in request.taps]
        layers = sorted({layer for site, layer in taps if site not in sites.ENDS})
        facts = {
            "Sites": ", ".join(name for name in sites.NAMES if name in {tap[0] for tap in taps}),
            "Layers": format_ranges(layers),
            "Requests": len(self.requests),
            "Shards": len(self.shards),
        }
        use = "for batch in found.select(layer=…).batches(1024): ..."
        return Card("Activations", facts, use=use)

    if not TYPE_CHECKING:  # for type checkers these are errors too

        def __getitem__(self, key: object) -> Any:
            raise StoreError(
                f"store[{show(key)}]: a request's activations are store.get(id), all requests "
                "store.requests, and rows store.select(layer=10)"
            )

    def refresh(self) -> None:
        """List the shards again: add new ones and drop removed ones."""
        self._names = [name for name in self._folder.names() if name >= self._since]
        self._open = {name: self._open[name] for name in self._names if name in self._open}
        self._requests = self._by_id = None

    @property
    def root(self) -> str:
        """Path or URL of the store."""
        return str(self._folder)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Shards by ascending name, approximately the order of writing, without replaced ones.

        Raises:
            StoreError: a shard is damaged; the message names it. `midstream.store.verify` finds
                all damaged shards, and `prune` can set them aside.
        """
        self._open_all()
        replaced = {name for shard in self._open.values() for name in shard.layout.replaces}
        return tuple(self._open[name] for name in self._names if name not in replaced)

    @property
    def requests(self) -> tuple[StoredRequest, ...]:
        """Every completion in the store, in the order of the shards.

        A completion that was stored twice, for example by a job that was restarted from its
        beginning, is listed twice.
        """
        if self._requests is None:
            self._requests = tuple(
                StoredRequest(
                    line.request, line.child, line.tag, line.prompt_tokens, shard.name, shard, index
                )
                for shard in self.shards
                for index, line in enumerate(shard.lines)
            )
        return self._requests

    def __len__(self) -> int:
        return len(self.requests)

    def __contains__(self, key: object) -> bool:
        """Whether a completion is stored: `"id"` (the first completion) or `("id", child)`."""
        return (key if isinstance(key, tuple) else (key, 0)) in self._ids()

    def find(self, request: str, child: int = 0, shard: str | None = None) -> StoredRequest:
        """Return the completion with an id.

        Args:
            request: the request's id.
            child: index of the completion.
            shard: name of the shard to search; required if it was stored more than once.

        Raises:
            StoreError: there is no such completion, or more than one; or an argument has a wrong
                type.
        """
        _check_key(request, child, shard)
        child = int(child)
        hits = self._ids().get((request, child), [])
        if shard is not None:
            hits = [completion for completion in hits if completion.shard == shard]
        if not hits:
            ids = {completion.request for completion in self.requests}
            problem = f"there is no request {show(request)}{hint(request, ids)}"
            if request in ids:
                problem = f"there is no completion {show(child)} of request {show(request)}"
            raise StoreError(f"{self.root}: {problem}" + (f" in {shard}" if shard else ""))
        if len(hits) > 1:
            raise _stored_again(self.root, hits)
        return hits[0]

    def get(self, request: str, child: int = 0, shard: str | None = None) -> Activations:
        """Return the captured rows of a completion. Each tap's rows are read on access.

        Args and Raises: as `find`; also raises StoreError if the index of the rows is damaged.
        """
        return self.find(request, child, shard).activations()

    @accept_spellings
    def select(
        self,
        *,
        site: object = None,
        layer: object = None,
        request: object = None,
        child: object = None,
        tag: object = None,
        position: object = None,
        token: object = None,
        model: object = None,
        codec: object = None,
    ) -> Selection:
        """Select rows of many requests lazily; see `midstream.store.selection.Selection`.

        Each argument is one value or a list of values; None matches everything.

        Args:
            site: site names or their aliases.
            layer: layer indices; also a range or slice.
            request, tag: as in the entries.
            child: completion indices; also a range or slice.
            position: any value of `Positions` except texts, roles and "last_row": ints (negative
                ones count from the prompt's end), slices, "prompt", "generated".
            token: token ids; also a range.
            model, codec: as in the shards' headers.

        Raises:
            StoreError: a value does not occur in the store, or the selected rows differ in codec,
                hidden size or dtype.
            SpecError: `position` is malformed, or there is no such argument.
        """
        chosen = {name: value for name, value in locals().items() if name != "self"}
        return Selection(self.shards, read_filter(self.shards, chosen))

    def to_arrow(self, **chosen: Any) -> Any:
        """Return the rows of `select(**chosen)` as a `pyarrow.RecordBatchReader`, read lazily.

        `request`, `tag`, `site` are string; `child`, `layer` int32; `position`, `token_id` int64;
        `media`, such as `image.0`, null for text; `vector` [width], decoded: float16 for float16
        rows with codec raw, else float32. The metadata has the shards' headers, as JSON.

        Raises:
            StoreError: as `select`; there are no such rows, or their widths differ.
            MissingExtraError: pyarrow is not installed.
        """
        return record_batches(self.select(**chosen))

    @property
    def sites(self) -> tuple[str, ...]:
        """Sites with rows, in execution order within a layer."""
        present = {site for site, _ in self._taps()}
        return tuple(name for name in sites.NAMES if name in present)

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers with rows, ascending."""
        return tuple(sorted({layer for _, layer in self._taps()}))

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models of the rows, sorted."""
        return tuple(sorted({shard.header.model for shard in self.shards}))

    @property
    def codecs(self) -> tuple[str, ...]:
        """Full specs of the codecs of the rows, sorted."""
        return tuple(sorted({shard.header.codec for shard in self.shards}))

    @property
    def nbytes(self) -> int:
        """Total length of the shards in bytes."""
        return sum(shard.size for shard in self.shards)

    def __repr__(self) -> str:
        if not self._names:
            return f"Store({self.root!r}, empty)"
        return (
            f"Store({self.root!r}, {len(self)} requests; {', '.join(self.sites)}; "
            f"{len(self.layers)} layers; {', '.join(self.codecs)}; {self.nbytes / 1e6:.1f} MB in "
            f"{len(self.shards)} shards)"
        )

    def _ids(self) -> dict[tuple[str, int], list[StoredRequest]]:
        if self._by_id is None:
            self._by_id = {}
            for stored in self.requests:
                self._by_id.setdefault((stored.request, stored.child), []).append(stored)
        return self._by_id

    def _taps(self) -> set[Tap]:
        return {tap for shard in self.shards for group in shard.groups for tap in group.taps}

    def _open_all(self) -> None:
        for name in self._names:
            if name in self._open:
                continue
            try:
                self._open[name] = Shard(self._folder, name)
            except StoreError:
                if name in self._folder.names():
                    raise
                # The shard was merged or pruned after the names were read.
                self.refresh()
                self._open_all()
                break


def _check_key(request: object, child: object, shard: object) -> None:
    if not isinstance(request, str):
        raise StoreError(f"request: expected `str`, got {kind(request)}")
    if not is_int(child):
        raise StoreError(f"child: expected `int`, got {kind(child)}")
    if not (shard is None or isinstance(shard, str)):
        raise StoreError(f"shard: expected the name of a shard, got {kind(shard)}")


def _stored_again(root: str, completions: Sequence[StoredRequest]) -> StoreError:
    shards = ", ".join(completion.shard for completion in completions)
    where = ", after `merge` into a directory" if "://" in root else ""
    return StoreError(
        f"{root}: request {show(completions[0].request)} was stored {len(completions)} times, in "
        f"{shards}; choose one by `shard`, or remove duplicates with `midstream.store.prune`{where}"
    )
