"""Summary of a store's contents."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from midstream.sites import NAMES
from midstream.store import Header, Store, StoredRequest


@dataclass(frozen=True, slots=True)
class SiteCount:
    """Number of rows of one site."""

    site: str
    layers: tuple[int, ...]
    rows: int  # of all these layers
    widths: tuple[int, ...]  # distinct ones before encoding, ascending


@dataclass(frozen=True, slots=True)
class Overview:
    """Summary of a store."""

    root: str
    shards: int
    requests: int  # number of completions
    rows: int
    nbytes: int  # on disk
    headers: tuple[Header, ...]  # distinct, without `widths`; usually one
    sites: tuple[SiteCount, ...]  # in the order of the forward pass
    tags: dict[str, int]  # number of completions by tag; "": without a tag
    prompt_tokens: tuple[int, float, int] | None  # minimum, median, maximum

    @staticmethod
    def of(store: Store) -> Overview:
        """Summarise a store without reading rows."""
        shards = store.shards
        lines = [line for shard in shards for line in shard.lines]
        rows: Counter[tuple[str, int]] = Counter()
        widths: dict[str, set[int]] = {}
        for shard in shards:
            for group in shard.groups:
                for tap in group.taps:
                    rows[tap] += group.rows
                    widths.setdefault(tap[0], set()).add(shard.header.width(tap))
        lengths = [line.prompt_tokens for line in lines]
        return Overview(
            root=store.root,
            shards=len(shards),
            requests=len(lines),
            rows=rows.total(),
            nbytes=store.nbytes,
            headers=tuple(dict.fromkeys(replace(shard.header, widths=()) for shard in shards)),
            sites=tuple(
                SiteCount(
                    site,
                    tuple(sorted(layer for name, layer in rows if name == site)),
                    sum(count for (name, _), count in rows.items() if name == site),
                    tuple(sorted(widths[site])),
                )
                for site in NAMES
                if any(name == site for name, _ in rows)
            ),
            tags=dict(Counter(line.tag for line in lines).most_common()),
            prompt_tokens=(min(lengths), median(lengths), max(lengths)) if lengths else None,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"headers": [header.to_dict() for header in self.headers]}


def plain_request(stored_request: StoredRequest) -> dict[str, Any]:
    activations = stored_request.activations()
    return {
        "request": stored_request.request,
        "child": stored_request.child,
        "tag": stored_request.tag,
        "prompt_tokens": stored_request.prompt_tokens,
        "shard": stored_request.shard,
        "taps": [
            {
                "site": site,
                "layer": layer,
                "positions": activations.positions_of(site, layer).tolist(),
            }
            for site, layer in stored_request.taps
        ],
        "metadata": stored_request.metadata,
    }
