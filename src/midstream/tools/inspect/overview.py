"""What a store has, counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from midstream.sites import NAMES
from midstream.store import Header, Store, StoredRequest


@dataclass(frozen=True, slots=True)
class SiteCount:
    """The rows of one site.

    Attributes:
        site: its name.
        layers: those that there are rows of, ascending.
        rows: of all of these layers together.
    """

    site: str
    layers: tuple[int, ...]
    rows: int


@dataclass(frozen=True, slots=True)
class Overview:
    """What a store has.

    Attributes:
        root: where it is.
        shards: how many there are.
        requests: how many completions.
        rows: how many vectors.
        nbytes: what it takes on disk.
        headers: what rows share; mostly one.
        sites: in the order in which a layer reaches them.
        tags: how many completions each has; "" are those without.
        prompt_tokens: the fewest, the median and the most; None: there are no requests.
    """

    root: str
    shards: int
    requests: int
    rows: int
    nbytes: int
    headers: tuple[Header, ...]
    sites: tuple[SiteCount, ...]
    tags: dict[str, int]
    prompt_tokens: tuple[int, float, int] | None

    @staticmethod
    def of(store: Store) -> Overview:
        """Counts what there is. No rows are read.

        Raises:
            StoreError: a shard is damaged.
        """
        shards = store.shards
        lines = [line for shard in shards for line in shard.lines]
        rows: Counter[tuple[str, int]] = Counter()
        for shard in shards:
            for group in shard.groups:
                for tap in group.taps:
                    rows[tap] += group.rows
        lengths = [line.prompt_tokens for line in lines]
        return Overview(
            root=store.root,
            shards=len(shards),
            requests=len(lines),
            rows=rows.total(),
            nbytes=store.nbytes,
            headers=tuple(dict.fromkeys(shard.header for shard in shards)),
            sites=tuple(
                SiteCount(
                    site,
                    tuple(sorted(layer for name, layer in rows if name == site)),
                    sum(count for (name, _), count in rows.items() if name == site),
                )
                for site in NAMES
                if any(name == site for name, _ in rows)
            ),
            tags=dict(Counter(line.tag for line in lines).most_common()),
            prompt_tokens=(min(lengths), median(lengths), max(lengths)) if lengths else None,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def plain_request(one: StoredRequest) -> dict[str, Any]:
    """One completion as JSON values, without its rows.

    Raises:
        StoreError: its index or metadata is damaged.
    """
    activations = one.activations()
    return {
        "request": one.request,
        "child": one.child,
        "tag": one.tag,
        "prompt_tokens": one.prompt_tokens,
        "shard": one.shard,
        "taps": [
            {
                "site": site,
                "layer": layer,
                "positions": activations.positions_of(site, layer).tolist(),
            }
            for site, layer in one.taps
        ],
        "metadata": one.metadata,
    }
