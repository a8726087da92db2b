"""Table of `llm.sites()`: which sites of a model are tapped, and why the others are not."""

from __future__ import annotations

import html
from dataclasses import dataclass

from midstream import sites
from midstream.console import format_ranges
from midstream.plan.selection import unknown_site
from midstream.plan.shape import ModelShape, unit_of

_ELSE = "not tapped; add it to midstream's settings `sites` and `layers`"


@dataclass(frozen=True, slots=True)
class SiteState:
    """One site of one layer.

    Attributes:
        layer: from 0; of a site without layers, that of the first or of the last layer.
        reason: why it is not tapped; empty if it is.
        width, heads: components of its vectors, and the heads that they are of; 0 if of none.
    """

    site: str
    layer: int
    tapped: bool
    reason: str = ""
    width: int = 0
    heads: int = 0

    @property
    def shape(self) -> str:
        """The width for display, such as `576` or `9 heads of 64`; empty if it is not tapped."""
        if self.heads:
            return f"{self.heads} {unit_of(self.site)} of {self.width // self.heads}"
        return str(self.width or "")


@dataclass(frozen=True, slots=True, repr=False)
class SiteTable:
    """Every site of every layer, in the order in which a forward pass reaches them."""

    states: tuple[SiteState, ...]

    @staticmethod
    def of(shape: ModelShape) -> SiteTable:
        """Create the table of one engine."""
        states = []
        for layer in range(shape.num_layers):
            for site in sites.NAMES:
                tap, heads = (site, layer), shape.num_heads((site, layer))
                if tap in shape.taps:
                    states.append(SiteState(*tap, True, "", shape.width(tap), heads))
                elif layer == sites.ENDS.get(site, layer) % shape.num_layers:
                    states.append(SiteState(*tap, False, shape.reason(tap) or _ELSE, 0, heads))
        return SiteTable(tuple(states))

    def __getitem__(self, key: tuple[str, int] | str) -> SiteState:
        """Return the state of a (site or alias, layer), or of a site without layers."""
        site, layer = (key, None) if isinstance(key, str) else key
        name = sites.canonical(site)
        for state in self.states:
            if state.site == name and (layer == state.layer or name in sites.ENDS):
                return state
        problem = f"; {unknown_site(site)}" if name is None else ""
        raise KeyError(f"there is no {site} at layer {layer}{problem}")

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return (site, layers, width, state) rows for display, with equal layers grouped."""
        rows = []
        for site in sites.NAMES:
            alike: dict[tuple[str, str], list[int]] = {}
            for state in self.states:
                if state.site == site:
                    shown = "tapped" if state.tapped else state.reason
                    alike.setdefault((state.shape, shown), []).append(state.layer)
            for (shape, shown), layers in alike.items():
                where = "–" if site in sites.ENDS else format_ranges(layers)
                rows.append((site, where, shape, shown))
        return rows

    def __str__(self) -> str:
        rows = [("site", "layers", "width", ""), *self.rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(
            "  ".join(
                [*(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)), row[-1]]
            ).rstrip()
            for row in rows
        )

    def __repr__(self) -> str:
        count = sum(state.tapped for state in self.states)
        return f"SiteTable({count} of {len(self.states)} sites tapped; print shows all)\n{self}"

    def _repr_html_(self) -> str:
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self.rows()
        )
        return f"<table><tr><th>site</th><th>layers</th><th>width</th><th></th></tr>{body}</table>"
