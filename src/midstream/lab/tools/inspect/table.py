"""Terminal tables of a store and of one of its requests."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from midstream.console import format_ranges, visible
from midstream.lab.tools.inspect.overview import Overview
from midstream.store import StoredRequest

_MOST_TAGS = 20


def render(overview: Overview) -> RenderableType:
    parts: list[RenderableType] = [Text(_title(overview), style="bold")]
    for header in overview.headers:
        revision = f" at {header.revision}" if header.revision else ""
        about = (
            f"{header.model}{revision}: {header.hidden_size} wide, {header.dtype}, codec "
            f"{header.codec}; vLLM {header.vllm}, midstream {header.midstream}"
        )
        parts.append(Text(visible(about)))
    if overview.prompt_tokens:
        least, middle, most = overview.prompt_tokens
        parts.append(Text(f"prompts of {least} to {most} tokens, median {middle:g}"))
    if overview.sites:
        sites = Table("site", "layers", "rows")
        differ = len({width for site in overview.sites for width in site.widths}) > 1
        if differ:
            sites.add_column("width")
        for site_overview in overview.sites:
            cells = [
                site_overview.site,
                format_ranges(site_overview.layers),
                f"{site_overview.rows:,}",
            ]
            sites.add_row(*cells, *([", ".join(map(str, site_overview.widths))] if differ else []))
        parts.append(sites)
    if set(overview.tags) - {""}:
        parts.append(_tags(overview))
    return Group(*parts)


def render_request(requests: Sequence[StoredRequest]) -> RenderableType:
    return Group(*(part for stored_request in requests for part in _completion(stored_request)))


def _title(overview: Overview) -> str:
    return (
        f"{overview.root}: {overview.requests:,} requests, {overview.rows:,} rows, "
        f"{overview.nbytes / 1e6:,.1f} MB in {overview.shards:,} shards"
    )


def _tags(overview: Overview) -> Table:
    table = Table("tag", "requests")
    for tag, count in list(overview.tags.items())[:_MOST_TAGS]:
        table.add_row(Text(visible(tag) or "(none)"), f"{count:,}")
    others = len(overview.tags) - _MOST_TAGS
    if others > 0:
        table.add_row(f"{others:,} others", "")
    return table


def _completion(req: StoredRequest) -> list[RenderableType]:
    tag = f", tag {req.tag}" if req.tag else ""
    title = (
        f"{req.request}, completion {req.child}{tag}: {req.prompt_tokens} prompt tokens; in "
        f"{req.shard}"
    )
    activations = req.activations()
    table = Table("site", "layers", "rows", "positions")
    alike: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for site, layer in req.taps:
        positions = tuple(activations.positions_of(site, layer).tolist())
        alike.setdefault((site, positions), []).append(layer)
    for (site, positions), layers in alike.items():
        table.add_row(
            site,
            format_ranges(layers),
            f"{len(positions) * len(layers):,}",
            format_ranges(positions),
        )
    metadata = json.dumps(req.metadata, indent=2, ensure_ascii=False)
    return [Text(visible(title), style="bold"), table, Text(visible(metadata))]
