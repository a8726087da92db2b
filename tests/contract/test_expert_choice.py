"""What `expert_choice` reads of vLLM's modules, in the sources of each release."""

from __future__ import annotations

import pytest
from support.sources import class_texts, vllm_root

from midstream.runtime.models.expert_choice import TOP_K_ROUTERS

each_release = pytest.mark.usefixtures("release")
READ = (
    "top_k",
    "use_grouped_topk",
    "custom_routing_function",
    "e_score_correction_bias",
    "scoring_func",
)


def text_of(file: str, name: str) -> str:
    folder = vllm_root() / "model_executor" / "layers" / "fused_moe"
    return class_texts(folder / file)[name]


@each_release
def test_experts_say_how_they_are_chosen() -> None:
    experts = text_of("routed_experts.py", "RoutedExperts")
    for name in READ:
        assert f"self.{name} = " in experts, name
    runner = text_of("runner/moe_runner.py", "MoERunner")
    assert "self.routed_experts = routed_experts" in runner
    assert "self.router = router" in runner


@each_release
def test_routers_of_the_largest_logits_have_no_correction_but_that_of_the_experts() -> None:
    folder = vllm_root() / "model_executor" / "layers" / "fused_moe" / "router"
    found = {name for file in folder.glob("*.py") for name in class_texts(file)}
    assert "FusedTopKRouter" in TOP_K_ROUTERS & found
    plain = text_of("router/fused_topk_router.py", "FusedTopKRouter")
    assert "fused_topk(" in plain
    assert "e_score_correction_bias" not in plain
    if "CPURouter" in found:
        # One class for all: its choice is told by what the experts have, which is the same.
        router = text_of("router/cpu_router.py", "CPURouter")
        assert "if self.use_grouped_topk:" in router
        assert "elif self.custom_routing_function is None:" in router


@each_release
def test_logits_fused_with_those_of_shared_experts_are_of_a_gate_that_the_runner_holds() -> None:
    """Such a model lacks the site: a runner with a gate computes the logits itself."""
    runner = text_of("runner/moe_runner.py", "MoERunner")
    assert "self.gate = gate" in runner
    assert "self._fse_fuse_gate = gate is not None and shared_expert_gate is not None" in runner
    head, _, _ = runner.partition("self._combined_gate_weight, None")
    assert "if self.gate is not None:\n            if self._fse_fuse_gate:" in head
