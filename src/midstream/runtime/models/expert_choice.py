"""How a mixture chooses experts by the router's logits, and if it calls the router as known."""

from __future__ import annotations

from typing import Any

from torch import nn

from midstream.runtime.models import forward_source

# Routers that choose the experts with the largest logits, unless the experts say otherwise.
TOP_K_ROUTERS = frozenset(("FusedTopKRouter", "CPURouter", "AiterSharedRoutedFusedMoERouter"))
UNKNOWN = "midstream cannot tell how its experts are chosen"

INTERNAL_GATE = "the router runs inside the experts' module"
BY_ORDER = f"{INTERNAL_GATE}, which vLLM finds by its place among the layers"
FUSED_GATE = "the router's weights are fused with those of the gate of the shared experts"
TWICE = "the router is called outside of the experts' module too"
SPLIT = "its tokens are split over the ranks (sequence-parallel MoE)"


def routing_of(runner: Any) -> int | str:
    """Return how many experts with the largest logits are chosen, or why others may be."""
    experts: Any = getattr(runner, "routed_experts", None)
    router = type(getattr(runner, "router", None)).__name__
    if experts is None:
        return UNKNOWN
    if experts.use_grouped_topk:
        return "its experts are chosen in groups"
    if experts.custom_routing_function is not None:
        return "its experts are chosen by a function of the model"
    if experts.e_score_correction_bias is not None:
        return "a correction bias is added to the scores of its experts before they are chosen"
    if experts.scoring_func != "softmax":
        return f"the scores of its experts are a {experts.scoring_func} of the logits"
    if router not in TOP_K_ROUTERS:
        return f"its experts are chosen by a {router}"
    return int(experts.top_k)


def internal_gate_lack(
    runner: Any, owner: nn.Module, name: str, types: forward_source.Types
) -> str | None:
    """Return why a router called by the experts' module cannot be tapped, or None. vLLM's op finds
    the runner by `layer_name`: a copy needs its own, which a vLLM that goes by order lacks.
    """
    forward: Any = getattr(type(runner), "_forward_impl", None)
    encode: Any = getattr(runner, "_encode_layer_name", None)
    fused = getattr(runner, "_fse_fuse_gate", None)
    split = forward_source.attribute(runner, "moe_config.is_sequence_parallel")
    if None in (forward, encode, fused, split) or not forward_source.calls(forward, "gate"):
        return INTERNAL_GATE
    if getattr(encode(), "value", None) != forward_source.attribute(runner, "layer_name"):
        return BY_ORDER
    if fused or split:
        return FUSED_GATE if fused else SPLIT
    gates = [child for child, module in owner.named_children() if module is runner.gate]
    replaced = vars(owner).get("forward")
    if replaced is not None:  # as vLLM's Transformers backend does
        function = getattr(replaced, "__func__", replaced)
        return TWICE if any(forward_source.calls(function, gate) for gate in gates) else None
    flow = forward_source.flow_of(owner, name, types)
    return TWICE if any(flow.of(gate) for gate in gates) else None
