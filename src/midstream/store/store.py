"""A store, opened for reading."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from midstream import sites
from midstream.errors import StoreError
from midstream.results.activations import Activations
from midstream.sites import Tap
from midstream.store.backends.local import Folder, folder_of
from midstream.store.filter import read_filter
from midstream.store.format.shard import Shard
from midstream.store.selection import Selection
from midstream.store.stored_activations import read_activations
from midstream.validation import hint, show


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """One completion in a store.

    Attributes:
        request: its id.
        child: which of the request's completions.
        tag: as it was stored.
        prompt_tokens: how many tokens its prompt had.
        shard: name of the shard that it is in.
    """

    request: str
    child: int
    tag: str
    prompt_tokens: int
    shard: str
    _shard: Shard = field(repr=False, compare=False)
    _index: int = field(repr=False, compare=False)

    def activations(self) -> Activations:
        """What was captured; each tap's rows are read when they are asked for.

        Raises:
            StoreError: its index is damaged.
        """
        return read_activations(self._shard, self._index)

    @property
    def metadata(self) -> dict[str, Any]:
        """What was stored with it."""
        return self._shard.metadata(self._index)

    @property
    def taps(self) -> tuple[Tap, ...]:
        """Every (site, layer) that it has rows of."""
        return self._shard.taps(self._index)

    def __repr__(self) -> str:
        tag = f", tag={self.tag!r}" if self.tag else ""
        return f"StoredRequest({self.request!r}, child={self.child}{tag}, {len(self.taps)} taps)"


def open_store(root: str | os.PathLike[str], since: str = "") -> Store:
    """Opens a store for reading. Nothing is read yet but the names of its shards.

    Args:
        root: its directory, or `s3://bucket/prefix`. It may be empty: a store that nothing was
            written to yet.
        since: a shard's name, as `midstream.store.writer.new_name` makes them of the time: those
            whose names sort before it are left out.

    Raises:
        StoreError: there is no such directory.
    """
    return Store(folder_of(root), since)


class Store:
    """The captures in a directory.

    Shards are opened, and found to be right, when they are first needed; then their headers and
    lists of requests are held. Rows are memory-mapped, checked against their checksums when they
    are first read, and copied where they are asked for.

    What is written while a store is open is seen after `refresh`.
    """

    def __init__(self, folder: Folder, since: str = "") -> None:
        self._folder = folder
        self._since = since
        self._open: dict[str, Shard] = {}
        self._names: list[str] = []
        self._requests: tuple[StoredRequest, ...] | None = None
        self._by_id: dict[tuple[str, int], list[StoredRequest]] | None = None
        self.refresh()

    def refresh(self) -> None:
        """Looks for shards that have come since, and lets go of those that are gone."""
        self._names = [name for name in self._folder.names() if name >= self._since]
        self._open = {name: self._open[name] for name in self._names if name in self._open}
        self._requests = self._by_id = None

    @property
    def root(self) -> str:
        """Where it is."""
        return str(self._folder)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Its shards by ascending name, which is about the order in which they were written;
        those without that another one stands for.

        Raises:
            StoreError: one is damaged; the message names it. `midstream.store.verify` finds all
                that are, and `prune` can drop them.
        """
        self._open_all()
        replaced = {name for shard in self._open.values() for name in shard.layout.replaces}
        return tuple(self._open[name] for name in self._names if name not in replaced)

    @property
    def requests(self) -> tuple[StoredRequest, ...]:
        """Every completion in the store, in the order of the shards. One that was stored twice,
        as by a run that was started again from its beginning, is here twice.
        """
        if self._requests is None:
            self._requests = tuple(_listed(self.shards))
        return self._requests

    def __len__(self) -> int:
        return len(self.requests)

    def __contains__(self, key: object) -> bool:
        """Whether a completion is stored: `"id"` is the request's first, or `("id", child)`."""
        return (key if isinstance(key, tuple) else (key, 0)) in self._ids()

    def find(self, request: str, child: int = 0, shard: str | None = None) -> StoredRequest:
        """The completion with an id.

        Args:
            request: the request's id.
            child: which of its completions.
            shard: name of the shard to look in; needed where it was stored more than once.

        Raises:
            StoreError: there is none, or more than one.
        """
        found = self._ids().get((request, child), [])
        if shard is not None:
            found = [each for each in found if each.shard == shard]
        if not found:
            ids = {each.request for each in self.requests}
            problem = (
                f"there is no completion {show(child)} of request {show(request)}"
                if request in ids
                else f"there is no request {show(request)}{hint(request, ids)}"
            )
            raise StoreError(f"{self.root}: {problem}" + (f" in {shard}" if shard else ""))
        if len(found) > 1:
            shards = ", ".join(each.shard for each in found)
            raise StoreError(
                f"{self.root}: request {show(request)} was stored {len(found)} times, in {shards}; "
                "say which by `shard`, or see `midstream.store.prune`"
            )
        return found[0]

    def get(self, request: str, child: int = 0, shard: str | None = None) -> Activations:
        """What was captured for a completion. Each tap's rows are read when they are asked for.

        Args and Raises: as `find`; also raises StoreError where its index is damaged.
        """
        return self.find(request, child, shard).activations()

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
        """Rows of many requests; see `midstream.store.selection.Selection`. Nothing is read yet.

        Each argument is one value or a list of them; None: all there are.

        Args:
            site: names, or other names by which sites are known.
            layer: also a range or slice.
            request, tag: as they were stored.
            child: which completions of the requests; also a range or slice.
            position: anything that `Positions` takes but texts, roles and "last": ints, where a
                negative one counts from the prompt's end, slices, "prompt", "generated".
            token: ids; also a range.
            model, codec: as in the shards' headers.

        Raises:
            StoreError: something is asked for by name that is not in the store, or the rows
                are not all of one codec, width and dtype.
            SpecError: `position` is malformed.
        """
        asked = {
            "site": site,
            "layer": layer,
            "request": request,
            "child": child,
            "tag": tag,
            "position": position,
            "token": token,
            "model": model,
            "codec": codec,
        }
        return Selection(self.shards, read_filter(self.shards, asked))

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites that there are rows of, in the order in which a layer reaches them."""
        there = {site for site, _ in self._taps()}
        return tuple(name for name in sites.NAMES if name in there)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that there are rows of, ascending."""
        return tuple(sorted({layer for _, layer in self._taps()}))

    @property
    def models(self) -> tuple[str, ...]:
        """The models that rows are of, by name."""
        return tuple(sorted({shard.header.model for shard in self.shards}))

    @property
    def codecs(self) -> tuple[str, ...]:
        """The codecs that rows are encoded by, as they are written out."""
        return tuple(sorted({shard.header.codec for shard in self.shards}))

    @property
    def nbytes(self) -> int:
        """How much its shards take on disk."""
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
        """Every completion by its request's id and its number."""
        if self._by_id is None:
            self._by_id = {}
            for each in self.requests:
                self._by_id.setdefault((each.request, each.child), []).append(each)
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
                # It was merged into another or pruned since the names were read.
                self.refresh()
                self._open_all()
                break


def _listed(shards: Iterable[Shard]) -> Iterable[StoredRequest]:
    for shard in shards:
        for index, line in enumerate(shard.lines):
            yield StoredRequest(
                line.request, line.child, line.tag, line.prompt_tokens, shard.name, shard, index
            )
