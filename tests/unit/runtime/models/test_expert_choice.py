"""How experts are chosen, by what vLLM's modules say of it."""

from types import SimpleNamespace
from typing import Any

import pytest

from midstream.runtime.models.expert_choice import TOP_K_ROUTERS, UNKNOWN, routing_of

PLAIN = {
    "top_k": 2,
    "use_grouped_topk": False,
    "custom_routing_function": None,
    "e_score_correction_bias": None,
    "scoring_func": "softmax",
}


def runner(router: str = "FusedTopKRouter", **changed: Any) -> Any:
    experts = SimpleNamespace(**{**PLAIN, **changed})
    return SimpleNamespace(router=type(router, (), {})(), routed_experts=experts)


@pytest.mark.parametrize("router", sorted(TOP_K_ROUTERS))
def test_the_largest_logits_are_chosen(router: str) -> None:
    assert routing_of(runner(router)) == 2


@pytest.mark.parametrize(
    ("runner", "reason"),
    [
        (runner(use_grouped_topk=True), "chosen in groups"),
        (runner(custom_routing_function=print), "by a function of the model"),
        (runner(e_score_correction_bias=0.5), "a correction bias is added"),
        (runner(scoring_func="sigmoid"), "a sigmoid of the logits"),
        (runner("RoutingSimulatorRouter"), "by a RoutingSimulatorRouter"),
        (SimpleNamespace(), UNKNOWN),
    ],
)
def test_any_other_choice_is_named(runner: Any, reason: str) -> None:
    found = routing_of(runner)
    assert isinstance(found, str)
    assert reason in found
