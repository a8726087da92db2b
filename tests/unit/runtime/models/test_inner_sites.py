"""Places of the sites inside attention and the MLP: the rules, on modules made here."""

from typing import Any

import pytest
import torch
from torch import nn
from unit.runtime.models.inner_modules import (
    FAKE,
    MLP,
    Attention,
    Column,
    Latent,
    Layer,
    Linear,
    Mamba,
    Mixture,
    MulAndSilu,
    OtherAttention,
    Replicated,
    SelfAttention,
    SiluAndMul,
    SwigluOAIAndMul,
)

from midstream.runtime.models.convention import Lack
from midstream.runtime.models.forward_source import Types
from midstream.runtime.models.inner_sites import (
    BIAS,
    EXPERTS,
    MLA,
    NO_ATTENTION,
    SHARED,
    UNPROVEN,
    Found,
    InnerPlace,
    find_inner_sites,
)


@pytest.fixture(autouse=True)
def _fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Types, "of_vllm", staticmethod(lambda: FAKE))


def reasons(found: dict[str, Found]) -> dict[str, str]:
    return {site: place.reason for site, place in found.items() if isinstance(place, Lack)}


def attention_reason(attention: nn.Module) -> str | None:
    return reasons(find_inner_sites(Layer(attention))).get("q")


def test_a_plain_layer_has_all_but_a_router():
    found = find_inner_sites(Layer())
    assert set(reasons(found)) == {"router"}
    qkv, attn = "self_attn.qkv_proj", "self_attn.attn"
    assert found["q"] == InnerPlace(qkv, "output", None, 0, 32, 4, "whole")
    assert found["k"] == InnerPlace(qkv, "output", None, 32, 16, 2, "whole")
    assert found["v"] == InnerPlace(qkv, "output", None, 48, 16, 2, "whole")
    assert found["rot_k"] == InnerPlace(attn, "input", "key", 0, 16, 2, "whole")
    assert found["z"] == InnerPlace(attn, "output", None, 0, 32, 4, "whole")
    assert found["mlp_pre_linear"] == InnerPlace(
        "mlp.gate_up_proj", "output", None, 96, 96, 0, "whole"
    )
    assert found["mlp_act"] == InnerPlace("mlp.down_proj", "input", None, 0, 96, 0, "whole")


@pytest.mark.parametrize(("replicas", "ranks"), [(1, "sliced"), (2, "replicated")])
def test_heads_are_split_over_the_ranks(replicas, ranks):
    layer = Layer()
    for module in layer.modules():
        if isinstance(module, Linear):
            module.tp_size, module.num_kv_head_replicas = 4, replicas
    found = {site: one for site, one in find_inner_sites(layer).items() if site != "router"}
    places = {site: one for site, one in found.items() if isinstance(one, InnerPlace)}
    for site in ("k", "v", "rot_k"):
        assert (places[site].ranks, places[site].copies) == (ranks, replicas)
    assert {places[site].ranks for site in ("q", "rot_q", "z", "mlp_pre", "mlp_act")} == {"sliced"}


def _with(forward: Any, **attributes: Any) -> nn.Module:
    of_class = {name: value for name, value in attributes.items() if isinstance(value, property)}
    made = type("SelfAttention", (SelfAttention,), {"forward": forward, **of_class})()
    for name in attributes.keys() - of_class.keys():
        setattr(made, name, attributes[name])
    return made


def _bypassing(self: Any, positions: Any, hidden_states: Any) -> Any:
    qkv = torch.nn.functional.linear(hidden_states, self.qkv_proj.weight)
    q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
    return self.o_proj(self.attn(q, k, v))[0]


def _transposing(self: Any, positions: Any, hidden_states: Any) -> Any:
    qkv, _ = self.qkv_proj(hidden_states)
    q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
    q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
    return self.o_proj(self.attn(q, k, v))[0]


def _by_impl(self: Any, positions: Any, hidden_states: Any) -> Any:
    qkv, _ = self.qkv_proj(hidden_states)
    q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
    if positions is None:
        return self.attn(q, k, v)
    return self.o_proj(self.attn.impl.forward(q, k, v))[0]


def _twice(self: Any, positions: Any, hidden_states: Any) -> Any:
    qkv, _ = self.qkv_proj(hidden_states)
    q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
    return self.o_proj(self.attn(q, k, v) + self.attn(k, k, v))[0]


def _looping(self: Any, positions: Any, hidden_states: Any) -> Any:
    for _ in range(2):
        hidden_states = self.attn(hidden_states, hidden_states, hidden_states)
    return hidden_states


def _swapped(self: Any, positions: Any, hidden_states: Any) -> Any:
    qkv, _ = self.qkv_proj(hidden_states)
    k, v, q = qkv.split([self.kv_size, self.kv_size, self.q_size], dim=-1)
    return self.o_proj(self.attn(q, key=k, value=v))[0]


def _separate(self: Any, positions: Any, hidden_states: Any) -> Any:
    q, _ = self.q_proj(hidden_states)
    k, _ = self.k_proj(hidden_states)
    v, _ = self.v_proj(hidden_states)
    return self.o_proj(self.attn(q, k, v))[0]


def _gated(self: Any, positions: Any, hidden_states: Any) -> Any:
    q, gate, k, v = self.split(self.qkv_proj(hidden_states)[0])
    attn_output = self.attn(q, k, v)
    attn_output = attn_output * torch.sigmoid(gate)
    return self.o_proj(attn_output)[0]


def _sharing(self: Any, positions: Any, hidden_states: Any) -> Any:
    qkv, _ = self.qkv_proj(hidden_states)
    q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
    attn_output = self.attn(q, None, None) if self.is_shared else self.attn(q, k, v)
    return self.o_proj(attn_output)[0]


def _asking(self: Any, positions: Any, hidden_states: Any) -> Any:
    qkv, _ = self.qkv_proj(hidden_states)
    q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
    if self.not_now:
        q = self.rotary_emb(q)
    return self.o_proj(self.attn(q, k, v))[0]


def _without_a_value(self: Any) -> bool:
    raise AssertionError("not now")


def of_qkv(start: int, width: int, heads: int) -> InnerPlace:
    return InnerPlace("self_attn.qkv_proj", "output", None, start, width, heads, "whole")


KEY_OF_ITS_OWN = InnerPlace("self_attn.k_proj", "output", None, 0, 16, 2, "whole")
BEHIND_A_GATE = InnerPlace("self_attn.o_proj", "input", None, 0, 32, 4, "whole")
Q, K, V = of_qkv(0, 32, 4), of_qkv(32, 16, 2), of_qkv(48, 16, 2)
MATRICES = {"q_proj": Column(64, 32), "k_proj": Column(64, 16), "v_proj": Column(64, 16)}


@pytest.mark.parametrize(
    ("forward", "has", "expected"),
    [
        (_swapped, {}, {"q": of_qkv(32, 32, 4), "k": of_qkv(0, 16, 2), "v": of_qkv(16, 16, 2)}),
        (_swapped, {}, {"rot_q": Lack("this layer has no rotary embedding; use q")}),
        (_separate, MATRICES, {"k": KEY_OF_ITS_OWN}),
        (_gated, {"split": lambda qkv: qkv}, {"z": BEHIND_A_GATE}),
        (_gated, {"split": lambda qkv: qkv}, dict.fromkeys("qkv", Lack(UNPROVEN))),
        (_sharing, {"is_shared": True}, {"q": Q, "k": Lack(SHARED), "rot_k": Lack(SHARED)}),
        (_asking, {"not_now": property(_without_a_value)}, {"k": K, "v": V}),
        (_bypassing, {}, {"q": Lack(UNPROVEN)}),
        (_transposing, {}, {"q": Lack(UNPROVEN)}),
        (_twice, {}, {"q": Lack(UNPROVEN)}),
    ],
)
def test_places_are_what_the_code_proves(forward, has, expected):
    places = find_inner_sites(Layer(_with(forward, **has)))
    assert {site: places[site] for site in expected} == expected


def test_code_that_cannot_be_read_gives_no_place():
    for_ = "midstream cannot read this model's code: its forward has a for statement"
    assert attention_reason(_with(_looping)) == for_
    assert "does not just call its 'attn'" in (attention_reason(_with(_by_impl)) or "")
    replaced = SelfAttention()
    replaced.forward = lambda *args: args  # type: ignore[method-assign, assignment]
    assert "its forward was replaced" in (attention_reason(replaced) or "")


def test_sizes_that_are_not_attentions_give_no_place():
    attention = SelfAttention()
    attention.q_size, attention.kv_size = 16, 24
    assert attention_reason(attention) == UNPROVEN
    attention = SelfAttention()
    attention.qkv_proj.output_size_per_partition = 80
    assert attention_reason(attention) == UNPROVEN


def test_a_replicated_matrix_has_the_places_of_one_whose_only_rank_is_this():
    attention, sliced = SelfAttention(), find_inner_sites(Layer())
    attention.qkv_proj = Replicated(64, 64)  # type: ignore[assignment]
    attention.o_proj = Replicated(32, 64)  # type: ignore[assignment]
    found = find_inner_sites(Layer(attention))
    sites = ("q", "k", "v", "rot_q", "rot_k", "z")
    assert [found[site] for site in sites] == [sliced[site] for site in sites]


def test_a_bias_outside_the_module_gives_no_place():
    layer = Layer()
    for linear in (layer.self_attn.qkv_proj, layer.mlp.gate_up_proj):
        linear.skip_bias_add = True  # type: ignore[union-attr, assignment]
        linear.bias = nn.Parameter(torch.zeros(1))  # type: ignore[union-attr]
    found = reasons(find_inner_sites(layer))
    assert {found[site] for site in ("q", "k", "v", "mlp_pre", "mlp_pre_linear")} == {BIAS}


def test_an_attention_of_another_kind_gives_no_place():
    attention = SelfAttention()
    attention.attn = OtherAttention()
    assert attention_reason(attention) == "its attention is a OtherAttention"
    attention.attn = Attention()
    attention.attn.attn_type = "encoder_only"
    assert attention_reason(attention) == "its attention is a Attention"
    attention.attn = Latent()  # type: ignore[assignment]
    assert attention_reason(attention) == MLA
    attention.attn = Mamba()  # type: ignore[assignment]
    assert attention_reason(attention) == NO_ATTENTION
    attention.attn, attention.other = Attention(), Attention()  # type: ignore[assignment]
    assert attention_reason(attention) == "it has several attentions"


def test_a_layer_that_calls_a_method_of_its_attention_gives_no_place():
    class Calling(Layer):
        def forward(self, positions: Any, hidden_states: Any) -> Any:
            return self.mlp(self.self_attn.run(positions, hidden_states))

    found = reasons(find_inner_sites(Calling()))
    assert found["q"].endswith("Calling does not just call its 'self_attn'")


def test_attention_may_be_called_by_a_method_of_the_layer():
    class Own(SelfAttention):
        def forward(self, positions: Any, hidden_states: Any) -> Any:
            return self.attend(positions, hidden_states)

        def attend(self, positions: Any, hidden_states: Any) -> Any:
            qkv, _ = self.qkv_proj(hidden_states)
            q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
            return self.o_proj(self.attn(q, k, v))[0]

    assert getattr(find_inner_sites(Own())["q"], "path", None) == "qkv_proj"


def test_a_lora_layer_keeps_its_path():
    class WithLoRA(nn.Module):
        def __init__(self, base_layer: nn.Module) -> None:
            super().__init__()
            self.base_layer = base_layer

    layer = Layer()
    plain = find_inner_sites(layer)
    for owner in (layer.self_attn, layer.mlp):
        for name, module in list(owner.named_children()):
            if isinstance(module, Linear):
                setattr(owner, name, WithLoRA(module))
    assert find_inner_sites(layer) == plain


def test_channels_in_another_order_than_the_checkpoints_give_no_place():
    llama4 = type("Llama4Attention", (SelfAttention,), {})()
    found = reasons(find_inner_sites(Layer(llama4)))
    assert found.keys() == {"q", "k", "rot_q", "rot_k", "router"}
    assert (
        found["q"] == "vLLM stores the channels of each head in another order than the checkpoint"
    )


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        (SiluAndMul, (0, 96)),
        (MulAndSilu, (96, 0)),
        (SwigluOAIAndMul, ("its activation is SwigluOAIAndMul",) * 2),
    ],
)
def test_the_activation_tells_the_gate(activation, expected):
    layer = Layer()
    layer.mlp.act_fn = activation()
    places = find_inner_sites(layer)
    halves = [places[site] for site in ("mlp_pre", "mlp_pre_linear")]
    told = [half.reason if isinstance(half, Lack) else half.start for half in halves]
    assert tuple(told) == expected
    assert isinstance(places["mlp_act"], InnerPlace)


def test_two_mlps_give_no_place():
    layer = Layer()
    layer.other = MLP()
    found = reasons(find_inner_sites(layer))
    assert found["mlp_act"] == "this layer has no MLP of a form that midstream knows"


def test_a_mixture_has_no_neurons():
    lacking = reasons(find_inner_sites(Layer(mlp=Mixture(is_inside=False))))
    assert {lacking[site] for site in ("mlp_pre", "mlp_pre_linear", "mlp_act")} == {EXPERTS}
