"""The rules of `inner_sites` on the sources of each release: what they find in every decoder layer
that can be tapped.

At run time conditions on a configuration are known; here both ways count, so a class with such a
condition may have more sites than its entry says. What is not in the tables is plain: all of
attention's sites, both halves and the neurons of an MLP, a router that its block calls.
"""

import ast
import functools
import re

import pytest
from contract import inner_sources
from contract.inner_sources import Owner
from support.sources import (
    class_node,
    class_texts,
    each_vllm_entry,
    file_of,
    is_in_this_release,
    vllm_root,
)
from support.syntax import tree_of

from midstream.runtime.models.forward_flow import NORMED_SPLIT
from midstream.runtime.models.inner_sites import (
    GATE_FIRST,
    GATE_SECOND,
    MLA,
    NO_ATTENTION,
    PERMUTED,
    UNPROVEN,
)

each_release = pytest.mark.usefixtures("release")

PLAIN = "q k v rot_q rot_k z"
NO_ROPE = "q k v z"
GATED = f"{PLAIN}(gated)"
# By attention class: what the rules find in it, where that is not PLAIN in every release.
ATTENTION: dict[str, set[str]] = {
    "AfmoeAttention": {GATED},
    "AXK1Attention": {""},  # MLA without its kernel
    "BloomAttention": {NO_ROPE},
    # Its layer calls another method than forward from 0.28 on: nothing is found there.
    "Cosmos3EdgeAttention": {PLAIN, NO_ROPE},
    "DeepseekV2Attention": {""},  # MLA without its kernel
    "FlintAttention": {"unreadable: its forward does not call its 'attn'"},
    # Shared keys and values, by layer.
    "Gemma3nAttention": {PLAIN, "q rot_q z by 2 calls"},
    # Likewise; before 0.28 …
    "Gemma4Attention": {"q rot_q z by 2 calls", "k v rot_k z"},
    "Glm4MoeLiteAttention": {""},
    "GPT2Attention": {NO_ROPE},
    # A kernel of its own, by configuration.
    "HYV3Attention": {UNPROVEN},
    "InternLM2Attention": {"z"},  # splits by groups of heads
    "JambaAttentionDecoderLayer": {NO_ROPE},
    "K2HorizonAttention": {GATED},
    "K2HorizonMoVAAttention": {"q k rot_q rot_k z(gated)"},  # experts make its values
    "LagunaAttention": {GATED},
    "MiMoV2Attention": {PLAIN, "z"},  # from 0.33 on its rows may come in chunks
    "MiniMaxM3Attention": {"z"},  # norms, rotary embedding and cache in one kernel
    "Moondream3Attention": {"k rot_k z"},  # q and v are scaled by what all three say
    "MPTAttention": {NO_ROPE},
    "MuseGlimmerAttention": {GATED},
    "NemotronHAttention": {NO_ROPE},
    "NemotronParseSelfAttention": {NO_ROPE},
    "OPTAttention": {NO_ROPE},
    "Qwen3NextAttention": {"z(gated)"},  # a gate lies between the heads of q
    "Step3p5Attention": {GATED},
    "Step5Attention": {UNPROVEN},
    "StepAttention": {NO_ROPE},  # ALiBi
}
# Layers without vLLM's attention by head.
LATENT = {
    "bailing_moe_linear.BailingMoeV25DecoderLayer",
    "bailing_moe_v3.BailingMoeV3DecoderLayer",
    "deepseek_v32.amd.model.DeepseekV32DecoderLayer",
    "hy_v4.amd.model.HYV4DecoderLayer",
    "hy_v4.nvidia.model.HYV4DecoderLayer",
    "kimi_k3.amd.linear.KimiDecoderLayer",
    "kimi_linear.KimiDecoderLayer",
    "longcat_flash.FlashDecoderLayer",
    "sarvam.SarvamMLABlock",
}
WITHOUT = {
    "deepseek_v32.nvidia.model.DeepseekV32DecoderLayer",  # MLA of its own
    "granitemoehybrid.GraniteMoeHybridMambaDecoderLayer",
    "jamba.JambaMambaDecoderLayer",
    "lfm2.Lfm2ShortConvDecoderLayer",
    "lfm2_moe.Lfm2MoeShortConvDecoderLayer",
    "mamba.MambaDecoderLayer",
    "mamba2.Mamba2DecoderLayer",
    "nemotron_h.NemotronHMLPDecoderLayer",
    "nemotron_h.NemotronHMambaDecoderLayer",
    "nemotron_h.NemotronHMoEDecoderLayer",
    "zamba2.Zamba2HybridLayer",  # a list of attentions, shared between layers
    "zamba2.Zamba2MambaDecoderLayer",
}
MLP: dict[str, set[str]] = {
    "Ernie4_5_VLMoeMLP": {"unreadable: its forward does not call its 'down_proj'"},
    "FalconH1MLP": {"mlp_act"},  # scales the gate in place
    "Gemma3nLaurelBlock": {"mlp_act"},  # no MLP, which the layer's convention tells
    "Lfm2BidirectionalShortConv": {"mlp_act"},  # no MLP, which the layer's convention tells
    "LagunaMLP": {"mlp_act"},  # gate and up are two matrices
    "MistralDecoderLayer": {UNPROVEN},  # a time condition, no MLP
}
ROUTER = {"router at ['gate'] ", "router at ['router'] "}
# Which routers are no matrix that the block calls itself.
INSIDE = re.compile(r"internal|\(gate given to the experts\)")
INTERNAL = {
    "AXK1MoE", "BailingMoeV25", "DbrxMoE", "DeepseekV2MoE", "ExaoneMoe", "FlintSparseMoeBlock",
    "FusedMoEBlock", "Gemma4DecoderLayer", "Gemma4MoE", "K2HorizonSparseMoeBlock", "LongcatMoe",
    "Param2MoEMoEBlock", "Qwen3MoeSparseMoeBlock", "Qwen3NextSparseMoeBlock",
}  # fmt: skip


def layers() -> list[tuple[str, dict[str, Owner]]]:
    return _layers(vllm_root())


@functools.cache
def _layers(_: object) -> list[tuple[str, dict[str, Owner]]]:
    return list(inner_sources.each_layer())


@each_release
def test_attention_is_of_a_form_that_the_rules_prove() -> None:
    wrong = []
    for layer, owners in layers():
        for name, found in inner_sources.attention(owners).items():
            expected = ATTENTION.get(name, {PLAIN})
            if not name:
                expected = {MLA} if layer in LATENT else {NO_ATTENTION} & _none_of(layer)
            if found not in expected:
                wrong.append((layer, name, found))
    assert not wrong


def _none_of(layer: str) -> set[str]:
    return {NO_ATTENTION} if layer in WITHOUT else set()


@each_release
def test_an_mlp_is_of_a_form_that_the_rules_prove() -> None:
    wrong = [
        (layer, name, found)
        for layer, owners in layers()
        for name, found in inner_sources.mlps(owners).items()
        if found not in MLP.get(name, {"mlp_pre mlp_act"})
    ]
    assert not wrong


@each_release
def test_a_router_is_called_by_its_block_or_known_to_be_inside_the_experts() -> None:
    wrong = []
    for layer, owners in layers():
        for name, found in inner_sources.routers(owners).items():
            inside = INSIDE.search(found) is not None
            other = name in ("Ernie4_5_VLMoeMoE", "LagunaMoE")
            if (inside and name not in INTERNAL) or not (inside or other or found in ROUTER):
                wrong.append((layer, name, found))
    assert not wrong


CLASSES = {
    "attention/attention.py": ("Attention",),
    "attention/mla_attention.py": ("MLAAttention",),
    "attention_layer_base.py": ("AttentionLayerBase",),
    "linear.py": (
        "LinearBase",
        "ColumnParallelLinear",
        "RowParallelLinear",
        "QKVParallelLinear",
        "ReplicatedLinear",
    ),
    "rotary_embedding/base.py": ("RotaryEmbeddingBase",),
    "fused_moe/runner/moe_runner_interface.py": ("MoERunnerInterface",),
}


@each_release
def test_vllm_has_the_classes_by_which_modules_are_recognised() -> None:
    layers_folder = vllm_root() / "model_executor" / "layers"
    for file, names in CLASSES.items():
        assert set(names) <= class_texts(layers_folder / file).keys(), file
    exported = (layers_folder / "attention" / "__init__.py").read_text()
    assert "import Attention\n" in exported
    assert "import MLAAttention\n" in exported
    mla = class_node(layers_folder / "attention" / "mla_attention.py", "MLAAttention")
    assert mla
    assert "AttentionLayerBase" in [ast.unparse(base) for base in mla.bases]
    mamba = class_texts(layers_folder / "mamba" / "abstract.py")["MambaBase"]
    assert "class MambaBase(AttentionLayerBase)" in mamba


@each_release
def test_attention_has_the_parameters_and_the_shapes_that_the_rules_read() -> None:
    source = vllm_root() / "model_executor" / "layers" / "attention" / "attention.py"
    attention = next(
        item
        for item in tree_of(source).body
        if isinstance(item, ast.ClassDef) and item.name == "Attention"
    )
    text = ast.unparse(attention)
    assert "def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor," in text
    assert "self.num_heads * self.head_size_v" in text
    for name in ("num_heads", "num_kv_heads", "head_size", "head_size_v", "attn_type"):
        assert f"self.{name} = " in text


@each_release
def test_qkv_is_loaded_as_queries_keys_and_values_in_this_order() -> None:
    text = (vllm_root() / "model_executor" / "layers" / "linear.py").read_text()
    assert '"k": self.num_heads * self.head_size,' in text
    assert '"v": (self.num_heads + self.num_kv_heads) * self.head_size,' in text
    assert "self.num_kv_head_replicas = divide(tp_size, self.total_num_kv_heads)" in text


@each_release
def test_the_first_half_of_a_gated_activation_is_the_gate() -> None:
    tree = tree_of(vllm_root() / "model_executor" / "layers" / "activation.py")
    classes = {item.name: ast.unparse(item) for item in tree.body if isinstance(item, ast.ClassDef)}
    gated = {name for name in classes if "AndMul" in name or name.startswith("MulAnd")}
    assert gated - {"SwigluOAIAndMul"} <= GATE_FIRST | GATE_SECOND
    second = re.compile(r"x\[\.\.\., :d\] \* F\.silu\(x\[\.\.\., d:\]\)")
    assert {name for name in gated if second.search(classes[name])} == GATE_SECOND


@each_release
def test_functions_that_the_rules_trust_keep_the_order_of_vectors() -> None:
    for layer, owners in layers():
        for owner in owners.values():
            for item in owner.node.body:
                if isinstance(item, ast.FunctionDef) and item.name == "_apply_qk_norm":
                    assert [one.arg for one in item.args.args] == ["self", "q", "k"], layer
                    assert ast.unparse(item.body[-1]) == "return (q, k)", layer
    split = NORMED_SPLIT.partition(".")[2]
    paths = list((vllm_root() / "model_executor" / "layers").rglob("*.py"))
    found = [path for path in paths if f"def {split}(" in path.read_text()]
    assert len(found) == 1
    text = found[0].read_text()
    assert "q, k, v = qkv.split([q_size, kv_size, kv_size], dim=-1)" in text


@each_release
def test_loaders_that_reorder_channels_are_known() -> None:
    # Mistral's own checkpoints are brought into the order of transformers'.
    fine = {"mistral", "gpt_oss", "mimo_v2", "muse_glimmer"}
    wrong = []
    for key, name in each_vllm_entry():
        module = key[0].rpartition(".")[2]
        if not is_in_this_release(name) or not key[0].startswith("model_executor"):
            continue
        text = file_of(key).read_text()
        loads = re.search(r"def \w*perm\w*\(|permute_qk|_perm\b", text)
        known = any(f"class {owner}(" in text for owner in PERMUTED)
        if loads and not known and module not in fine:
            wrong.append((name, loads[0]))
    assert not wrong
