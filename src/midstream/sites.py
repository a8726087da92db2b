"""Hook points of a layer; every other list of sites derives from this table.

For the last layer, transformers applies the final norm to its output; `resid_post` does not.
`attn_out` and `mlp_out` are what is added to the stream: the output of a post-norm, if there is
one. Values inside attention and the MLP have widths of their own. The ends of the model have no
layer: requests and results name the site alone; inside, they are at the first and at the last
layer. Names are TransformerLens's; `attn_in` is its `attn.hook_in`, `mlp_in` its `mlp.hook_in` of
version 3.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NewType

Tap = tuple[str, int]  # (canonical site, layer from 0)
# The names and aliases of `SITES`, for type checkers and editors.
SiteName = Literal[
    "embed",
    "resid_pre",
    "attn_in",
    "q",
    "k",
    "v",
    "rot_q",
    "rot_k",
    "z",
    "attn_out",
    "resid_mid",
    "mlp_in",
    "router",
    "mlp_pre",
    "mlp_pre_linear",
    "mlp_act",
    "mlp_out",
    "resid_post",
    "final_norm",
    "logits",
    "pre_attn",
    "post_attn",
    "post_block",
    "post_mlp",
]
# A name of another tool, such as `blocks.10.hook_resid_post`, for type checkers; see `parse`.
HookName = NewType("HookName", str)


@dataclass(frozen=True, slots=True)
class Site:
    """One hook point of a layer."""

    name: str
    aliases: tuple[str, ...]
    order: int  # rank in the order in which a layer reaches its sites
    meaning: str
    inner: bool = False  # inside attention or the MLP; others are as wide as the stream
    layer: int | None = None  # number inside of a site that has no layer: 0 or −1


SITES: tuple[Site, ...] = (
    Site("embed", (), -1, "the token's embedding, before learned positions", layer=0),
    Site("resid_pre", ("pre_attn",), 0, "the residual stream entering the layer"),
    Site("attn_in", (), 1, "what attention reads, normalised"),
    Site("q", (), 2, "the queries of all heads, before norms and RoPE", inner=True),
    Site("k", (), 3, "the keys of all heads, before norms and RoPE", inner=True),
    Site("v", (), 4, "the values of all heads", inner=True),
    Site("rot_q", (), 5, "the queries of all heads, after norms and RoPE", inner=True),
    Site("rot_k", (), 6, "the keys of all heads, after norms and RoPE", inner=True),
    Site("z", (), 7, "what the heads return and the output projection reads", inner=True),
    Site("attn_out", (), 8, "what attention adds to the residual stream"),
    Site("resid_mid", ("post_attn",), 9, "the residual stream after attention is added"),
    Site("mlp_in", (), 10, "what the MLP reads, normalised"),
    Site("router", (), 11, "the router's logits of the experts", inner=True),
    Site("mlp_pre", (), 12, "what the MLP's activation function reads", inner=True),
    Site("mlp_pre_linear", (), 13, "what the activated gate is multiplied with", inner=True),
    Site("mlp_act", (), 14, "the MLP's neurons, which its last matrix reads", inner=True),
    Site("mlp_out", (), 15, "what the MLP adds to the residual stream"),
    Site(
        "resid_post", ("post_block", "post_mlp"), 16, "the residual stream after the MLP is added"
    ),
    Site("final_norm", (), 17, "what the final norm returns and the head reads", layer=-1),
    Site("logits", (), 18, "the logits of the next token; edited by `Bias` alone", layer=-1),
)

NAMES: tuple[str, ...] = tuple(site.name for site in SITES)
# The sites of each layer whose vectors are as wide as the residual stream, and the others.
OUTER: tuple[str, ...] = tuple(site.name for site in SITES if not site.inner and site.layer is None)
INNER: tuple[str, ...] = tuple(site.name for site in SITES if site.inner)
IN_LAYERS: tuple[str, ...] = tuple(site.name for site in SITES if site.layer is None)
# The sites without a layer, and the layer, 0 or −1, whose number each has inside.
ENDS: dict[str, int] = {site.name: site.layer for site in SITES if site.layer is not None}
BY_NAME: dict[str, Site] = {name: site for site in SITES for name in (site.name, *site.aliases)}


# What other tools call the sites: TransformerLens's hooks, and module paths of transformers and
# nnsight, each after the path of a layer; `attn` and `mlp` stand for the names that models give
# these modules.
_OTHERS: dict[str, str] = {
    "hook_resid_pre": "resid_pre",
    "hook_resid_mid": "resid_mid",
    "hook_resid_post": "resid_post",
    "hook_attn_out": "attn_out",
    "hook_mlp_out": "mlp_out",
    "hook_in": "resid_pre",
    "hook_out": "resid_post",
    "attn.hook_in": "attn_in",
    "attn.hook_out": "attn_out",
    "mlp.hook_in": "mlp_in",
    "mlp.hook_out": "mlp_out",
    "": "resid_post",
    "input": "resid_pre",
    "output": "resid_post",
    "attn": "attn_out",
    "attn.input": "attn_in",
    "attn.output": "attn_out",
    "attn.q_proj.output": "q",
    "attn.k_proj.output": "k",
    "attn.v_proj.output": "v",
    "attn.o_proj.input": "z",
    "mlp": "mlp_out",
    "mlp.input": "mlp_in",
    "mlp.output": "mlp_out",
    "mlp.gate.output": "router",
    "mlp.gate_proj.output": "mlp_pre",
    "mlp.up_proj.output": "mlp_pre_linear",
    "mlp.down_proj.input": "mlp_act",
}
# TransformerLens's names of sites that are not `hook_` and the site. It has none of the router.
_HOOKS = {
    "attn_in": "attn.hook_in",
    "mlp_in": "mlp.hook_in",
    **{site: f"attn.hook_{site}" for site in ("q", "k", "v", "rot_q", "rot_k", "z")},
    "router": "mlp.hook_router",
    "mlp_pre": "mlp.hook_pre",
    "mlp_pre_linear": "mlp.hook_pre_linear",
    "mlp_act": "mlp.hook_post",
}
_OTHERS |= {name: site for site, name in _HOOKS.items()}
# What other tools call the sites without a layer. TransformerLens's `ln_final.hook_normalized` is
# before the norm's weight; modules of embeddings return vectors that some models scale afterwards.
_END_NAMES = {
    "hook_embed": "embed",
    "embed.hook_out": "embed",
    "ln_final.hook_out": "final_norm",
    "model.norm": "final_norm",
    "model.norm.output": "final_norm",
    "transformer.ln_f": "final_norm",
    "transformer.ln_f.output": "final_norm",
}
_END_HOOKS = {"embed": "hook_embed", "final_norm": "ln_final.hook_out", "logits": "logits"}
# nnterp's accessors, `layers_output[10]`.
_ACCESSORS = {
    "layers_input": "resid_pre",
    "layers_output": "resid_post",
    "attentions_input": "attn_in",
    "attentions_output": "attn_out",
    "mlps_input": "mlp_in",
    "mlps_output": "mlp_out",
}
_MODULES = {
    **dict.fromkeys(("self_attn", "attention", "self_attention"), "attn"),
    **dict.fromkeys(("feed_forward", "ffn", "block_sparse_moe"), "mlp"),
}
# `model.layers.10.mlp.output`, `transformer.h[10].output[0]`, `blocks.10.hook_resid_post`.
_PATH = re.compile(
    r"(?:[a-z_]+\.)*(?:layers|layer|blocks|block|h)(?:\.([0-9]{1,6})|\[(-?[0-9]{1,6})\])"
    r"(?:\.([a-z0-9_.]*[a-z0-9_]))?(?:\[0\])?"
)
_ACCESSOR = re.compile(r"([a-z]+_(?:input|output))(?:\[(-?[0-9]{1,6})\])?")
# `resid_post.10`, interp-engine's addresses and the names of tensors in saved files.
_ADDRESS = re.compile(r"([a-z_]+)\.(-?[0-9]{1,6})")
_OUTSIDE = re.compile(
    r"(hook_|ln_final|embed|token_embeddings|pos_embed|unembed|lm_head|logits|model\.(norm|embed_tokens)|"
    r"transformer\.(wte|wpe|ln_f))|.*\.hook_"
)


def parse(name: str) -> tuple[str, int | None] | None:
    """Return (canonical site, layer) of a name in any of its spellings; None for an unknown name.

    These are the name or alias of a site; TransformerLens's `blocks.10.hook_resid_post`, or
    `hook_resid_post`; a module path of transformers or nnsight, `model.layers.10.output`;
    nnterp's `layers_output[10]`; interp-engine's `resid_post.10`. The layer is None where the name
    has none. The path of a layer alone means its output. `attn_out` and `mlp_out` are what is added
    to the stream: in a model with a norm after attention or the MLP, its output.
    """
    if name in BY_NAME:
        return BY_NAME[name].name, None
    if name in _END_NAMES:
        return _END_NAMES[name], None
    address = _ADDRESS.fullmatch(name)
    if address and address[1] in BY_NAME and BY_NAME[address[1]].layer is None:
        return BY_NAME[address[1]].name, int(address[2])
    accessor = _ACCESSOR.fullmatch(name)
    if accessor and accessor[1] in _ACCESSORS:
        return _ACCESSORS[accessor[1]], int(accessor[2]) if accessor[2] else None
    path = _PATH.fullmatch(name)
    if path:
        site = _OTHERS.get(_plain(path[3] or ""))
        return None if site is None else (site, int(path[1] or path[2]))
    if name.startswith("hook_resid_") or name in ("hook_attn_out", "hook_mlp_out"):
        site = _OTHERS.get(name)
        return None if site is None else (site, None)
    return None


def is_elsewhere(name: str) -> bool:
    """Return whether a name that `parse` does not know is one of other tools, without a site."""
    return bool(_PATH.fullmatch(name) or _OUTSIDE.match(name))


def transformer_lens_name(tap: Tap) -> str:
    """Return TransformerLens's name of a tap, such as `blocks.10.hook_resid_post`."""
    site, layer = tap
    if site in ENDS:
        return _END_HOOKS[site]
    return f"blocks.{layer}." + _HOOKS.get(site, f"hook_{site}")


def canonical(name: str) -> str | None:
    """Return the canonical form of a site's name; None for an unknown name, or with a layer."""
    parsed = parse(name)
    return parsed[0] if parsed and parsed[1] is None else None


def _plain(suffix: str) -> str:
    """Return the path within a layer with its first module named `attn` or `mlp`."""
    module, dot, rest = suffix.partition(".")
    return _MODULES.get(module, module) + dot + rest


def show_tap(tap: Tap) -> str:
    """Return a tap for messages, `z at layer 3`; a site without a layer alone."""
    site, layer = tap
    return site if site in ENDS else f"{site} at layer {layer}"


def order(tap: Tap) -> tuple[int, int]:
    """Return the sort key of a (canonical site, layer) for the order of a forward pass."""
    return tap[1], BY_NAME[tap[0]].order
