"""How a mixture chooses its experts by the router's logits, as vLLM's modules say."""

from __future__ import annotations

from typing import Any

# Routers that choose the experts with the largest logits, unless the experts say otherwise.
TOP_K_ROUTERS = frozenset(("FusedTopKRouter", "CPURouter", "AiterSharedRoutedFusedMoERouter"))
UNKNOWN = "midstream cannot tell how its experts are chosen"


def routing_of(runner: Any) -> int | str:
    """Return how many experts with the largest logits are chosen, or why others may be.

    Args:
        runner: the module with the experts, which vLLM calls with the logits.
    """
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
