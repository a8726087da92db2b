"""Layers, attention, MLPs and mixtures as vLLM's, without numbers."""

from typing import Any

from torch import Tensor, nn

from midstream.runtime.models.forward_source import Types


class Linear(nn.Module):
    """A matrix as vLLM's, without numbers."""

    tp_size, skip_bias_add, input_is_parallel = 1, False, True
    num_kv_head_replicas = 1

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.input_size = self.input_size_per_partition = inputs
        self.output_size = self.output_size_per_partition = outputs
        self.bias: nn.Parameter | None = None


Column = type("Column", (Linear,), {})
QKV = type("QKV", (Column,), {})
Row = type("Row", (Linear,), {})


class Replicated(Linear):
    """Whole on each rank: it has no widths of one."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        del self.input_size_per_partition, self.output_size_per_partition


Latent, Rotary, SiluAndMul, MulAndSilu, SwigluOAIAndMul = (
    type(name, (nn.Module,), {})
    for name in ("Latent", "Rotary", "SiluAndMul", "MulAndSilu", "SwigluOAIAndMul")
)


class Attention(nn.Module):
    attn_type = "decoder"

    def __init__(self, heads: int = 4, kv_heads: int = 2, size: int = 8) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_size = heads, kv_heads, size
        self.head_size_v = size

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query


class OtherAttention(Attention):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return value


class Name:
    def __init__(self, value: str) -> None:
        self.value = value


class Experts(nn.Module):
    layer_name = "layers.1.mlp.experts"
    is_sequence_parallel = _fse_fuse_gate = False

    def __init__(self, gate: nn.Module | None = None) -> None:
        super().__init__()
        self.gate = gate
        self.moe_config = self

    def _encode_layer_name(self) -> Name | str:
        return Name(self.layer_name)

    def _forward_impl(self, hidden_states: Any) -> Any:
        router_logits, _ = self.gate(hidden_states)
        return router_logits


class Mixer:
    """The base of everything with a cache."""


class Mamba(nn.Module, Mixer):
    pass


FAKE = Types(
    attention=Attention,
    latent=Latent,
    mixer=(Attention, Latent, Mixer),  # type: ignore[arg-type]
    linear=Linear,
    column=Column,
    row=Row,
    qkv=QKV,
    replicated=Replicated,
    rotary=Rotary,
    experts=Experts,
)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_size, self.kv_size = 32, 16
        self.qkv_proj = QKV(64, 64)
        self.rotary_emb = Rotary()
        self.attn = Attention()
        self.o_proj = Row(32, 64)

    def forward(self, positions: Any, hidden_states: Any) -> Any:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        attn_output = self.attn(q, k, v)
        output, _ = self.o_proj(attn_output)
        return output


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = Column(64, 192)
        self.act_fn: nn.Module = SiluAndMul()
        self.down_proj = Row(96, 64)

    def forward(self, x: Any) -> Any:
        gate_up, _ = self.gate_up_proj(x)
        x = self.act_fn(gate_up)
        x, _ = self.down_proj(x)
        return x


class Layer(nn.Module):
    def __init__(self, attention: nn.Module | None = None, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.self_attn = attention or SelfAttention()
        self.mlp = mlp or MLP()

    def forward(self, positions: Any, hidden_states: Any) -> Any:
        hidden_states = self.self_attn(positions, hidden_states)
        return self.mlp(hidden_states)


class Mixture(nn.Module):
    """As vLLM's, whose releases before 0.28 ask the experts who calls the router."""

    is_sequence_parallel = False

    def __init__(
        self,
        experts: type[Experts] = Experts,
        gate: Linear | None = None,
        is_inside: bool = True,
        **has: Any,
    ) -> None:
        super().__init__()
        self.gate = gate or Replicated(64, 8)
        self.experts = experts(self.gate if is_inside else None)
        self.is_internal_router = is_inside
        for name, value in has.items():
            setattr(self.experts, name, value)

    def forward(self, hidden_states: Any) -> Any:
        if self.is_sequence_parallel:
            hidden_states = sequence_parallel_chunk(hidden_states)  # noqa: F821
        if self.is_internal_router:
            return self.experts(hidden_states, router_logits=hidden_states)
        router_logits, _ = self.gate(hidden_states)
        return self.experts(hidden_states=hidden_states, router_logits=router_logits)
