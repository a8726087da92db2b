"""What `expert_choice` reads of vLLM's modules, in the sources of each release."""

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
def test_a_runner_that_holds_its_router_calls_it_once_if_its_weights_are_not_fused() -> None:
    runner = text_of("runner/moe_runner.py", "MoERunner")
    assert "self.gate = gate" in runner
    assert "self._fse_fuse_gate = gate is not None and shared_expert_gate is not None" in runner
    assert runner.count("self.gate(") == 1
    head, _, tail = runner.partition("router_logits, _ = self.gate(hidden_states)")
    assert "if self.gate is not None:\n            if self._fse_fuse_gate:" in head
    assert "    def _forward_impl(" in head
    assert "\n    def " not in head.rpartition("    def _forward_impl(")[2]
    assert "self._apply_quant_method(" in tail
    assert "router_logits=router_logits" in tail


@each_release
def test_the_op_for_experts_finds_their_runner_by_its_name() -> None:
    folder = vllm_root() / "model_executor" / "layers" / "fused_moe"
    text = (folder / "runner" / "moe_runner.py").read_text()
    op = text.partition("def _moe_forward(")[2].partition("\ndef ")[0]
    assert "layer = get_layer_from_name(_resolve_layer_name(layer_name))" in op
    assert "layer._forward_impl(" in op
    assert "layer = forward_context.no_compile_layers[layer_name]" in text
    assert "compilation_config.static_forward_context[prefix] = layer" in text
    assert "self.layer_name = layer_name" in text
    context = (vllm_root() / "forward_context.py").read_text()
    assert "no_compile_layers=vllm_config.compilation_config.static_forward_context" in context
    encode = text.partition("def _encode_layer_name(self)")[2]
    named = "if _USE_LAYERNAME:\n            return LayerName(self.layer_name)"
    assert named in encode.partition("\n    def ")[0]
