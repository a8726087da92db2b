"""Hook points of a layer; every other list of sites derives from this table.

Layer `i`'s sites, in the order in which one forward pass reaches them:

| site | the residual stream … | in transformers |
|---|---|---|
| `resid_pre` | entering layer i | `output_hidden_states[i]` |
| `resid_mid` | after attention is added | the input of the norm that feeds the MLP |
| `resid_post` | after the MLP is added | `output_hidden_states[i + 1]` |

and the branches that are added to it:

| site | the vector … | in transformers |
|---|---|---|
| `attn_out` | that attention adds to the stream | attention's output, or its post-norm's |
| `mlp_in` | that the MLP reads: the stream after its norm | the MLP's input |
| `mlp_out` | that the MLP adds to the stream | the MLP's output, or its post-norm's |

For the last layer, transformers applies the final norm to its output; `resid_post` does not. The
names are TransformerLens's; `mlp_in` is its `mlp.hook_in` (before version 3, its `hook_mlp_in` was
in front of the norm).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tap = tuple[str, int]  # (canonical site, layer from 0)
# The names and aliases of `SITES`, for type checkers and editors.
SiteName = Literal[
    "resid_pre",
    "attn_out",
    "resid_mid",
    "mlp_in",
    "mlp_out",
    "resid_post",
    "pre_attn",
    "post_attn",
    "post_block",
]


@dataclass(frozen=True, slots=True)
class Site:
    """One hook point of a layer.

    Attributes:
        name: canonical name.
        aliases: other accepted names.
        order: rank in the order in which a layer reaches its sites.
        meaning: one phrase for tables and messages.
    """

    name: str
    aliases: tuple[str, ...]
    order: int
    meaning: str


SITES: tuple[Site, ...] = (
    Site("resid_pre", ("pre_attn",), 0, "the residual stream entering the layer"),
    Site("attn_out", (), 1, "what attention adds to the residual stream"),
    Site("resid_mid", ("post_attn",), 2, "the residual stream after attention is added"),
    Site("mlp_in", (), 3, "what the MLP reads, normalised"),
    Site("mlp_out", (), 4, "what the MLP adds to the residual stream"),
    Site("resid_post", ("post_block",), 5, "the residual stream after the MLP is added"),
)

NAMES: tuple[str, ...] = tuple(site.name for site in SITES)
BY_NAME: dict[str, Site] = {name: site for site in SITES for name in (site.name, *site.aliases)}


def canonical(name: str) -> str | None:
    """Return the canonical form of a site's name or alias; None for an unknown name."""
    site = BY_NAME.get(name)
    return site.name if site else None


def order(tap: Tap) -> tuple[int, int]:
    """Return the sort key of a (canonical site, layer) for the order of a forward pass."""
    return tap[1], BY_NAME[tap[0]].order
