"""Where the sites inside attention and the MLP are, in one loaded decoder layer of vLLM.

| site | tensor | in TransformerLens |
|---|---|---|
| `q`, `k`, `v` | what the projections return, before norms and rotary embedding | `attn.hook_q` … |
| `rot_q`, `rot_k` | queries and keys as attention uses them, after both | `attn.hook_rot_q` … |
| `z` | what the output projection reads | `attn.hook_z` |
| `mlp_pre` | what the MLP's activation function reads; with a gate, the gate | `mlp.hook_pre` |
| `mlp_pre_linear` | what the gate is multiplied with | `mlp.hook_pre_linear` |
| `mlp_act` | what the MLP's last matrix reads: its neurons | `mlp.hook_post` |
| `router` | logits of the experts, before softmax or sigmoid | none |

Places are found by rules over the modules of the layer and the sources of their forwards (see
`forward_flow`), not by a table of classes: a piece of a projection's output is `q` because it is
what reaches the argument `query` of vLLM's attention and is as wide as that. What the rules cannot
prove is a `Lack`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from midstream.errors import UnsupportedError
from midstream.runtime.models import forward_source
from midstream.runtime.models.convention import Input, Lack, LayerConvention, Refusal
from midstream.runtime.models.expert_choice import SPLIT, internal_gate_lack, routing_of
from midstream.runtime.models.forward_flow import Flow, FlowCall, OutputPart, Trace, Value
from midstream.runtime.models.registry import lookup

Ranks = Literal["whole", "sliced", "replicated"]
_Split = tuple[Ranks, int]

ATTENTION = ("q", "k", "v", "rot_q", "rot_k", "z")
MLP = ("mlp_pre", "mlp_pre_linear", "mlp_act")
SITES: tuple[str, ...] = (*ATTENTION, *MLP, "router")


@dataclass(frozen=True, slots=True)
class InnerPlace:
    """Columns of a module's input or output in a decoder layer, on this rank, as [tokens, width] or
    [tokens, heads, head_dim]; maybe a view whose rows are not contiguous.
    """

    path: str  # the module within the layer, dotted; empty: the layer itself
    at: Literal["input", "output"]  # what it is called with, or (the first of) what it returns
    argument: str | None  # parameter of the module's forward; None: the first argument
    start: int
    width: int
    heads: int = 0  # on this rank, of `width // heads` columns each; 0: not by head
    # "whole": each rank has all of it; "sliced": each has its own part, in the order of the ranks;
    # "replicated": so has each group of `copies` ranks.
    ranks: Ranks = "sliced"
    copies: int = 1  # number of ranks with the same part
    routing: int | str = 0  # of a router, how many are chosen, or why others may be; 0: none
    streams: bool = False  # the tensor is [heads, tokens, width // heads]

    def parts(self, ranks: int) -> int:
        """Return the number of parts in which a group of ranks has the vectors."""
        return 1 if self.ranks == "whole" else ranks // self.copies


Found = InnerPlace | Lack

UNPROVEN = "midstream cannot tell where it is from this model's code"
BIAS = "its bias is added outside the module"
MLA = "multi-head latent attention has no per-head keys and values"
NO_ATTENTION = "this layer has no attention of its own"
NO_MLP = "this layer has no MLP of a form that midstream knows"
EXPERTS = "its experts run in one kernel"
NO_ROPE = "this layer has no rotary embedding; use {}"
SHARED = "this layer uses the keys and values of an earlier one"
BACKEND = "the Transformers backend calls attention outside of the layer"

# Attention whose q and k are loaded with the channels of each head in another order than the
# checkpoint's, always or if an attribute says so; a contract test looks for such loaders.
PERMUTED: dict[str, str | None] = {
    "Llama4Attention": None,
    "K2HorizonAttention": "fold_rope_weights",
    "K2HorizonMoVAAttention": "fold_rope_weights",
}
CHANNELS = "vLLM stores the channels of each head in another order than the checkpoint"

# Functions that keep the order of heads and columns: a contract test has their forms.
HEADWISE = frozenset(("_apply_qk_norm()", "apply_partial_rope()"))
# Functions of each number by itself.
ELEMENTWISE = frozenset(("sigmoid()", "silu()", "softplus()"))
ROTARY = frozenset(("apply_partial_rope()",))
# Activations that compute `f(x[:d]) * g(x[d:])`: the gate is the first half.
GATE_FIRST = frozenset(
    ("SiluAndMul", "SiluAndMulWithClamp", "GeluAndMul", "GeluAndMulSparse", "FatreluAndMul",
     "SwigluStepAndMul", "SituAndMul")
)  # fmt: skip
GATE_SECOND = frozenset(("MulAndSilu",))
FUSED_QUANT = "maybe_fused_act_quant()"


def find_streams(layer: nn.Module, convention: LayerConvention) -> dict[str, InnerPlace]:
    """Return where a layer with several streams takes and returns them."""
    if not convention.streams:
        return {}
    count = forward_source.number(layer, f"self.{convention.streams}")
    norm: Any = layer.get_submodule(convention.mid or "")
    width = int(norm.weight.shape[-1])
    assert count is not None
    place = InnerPlace("", "output", None, 0, count * width, count, "whole", streams=True)
    entry = replace(place, at="input", argument=convention.hidden)
    return {"resid_pre": entry, "resid_post": place}


def find_inner_sites(layer: nn.Module) -> dict[str, Found]:
    """Return where a layer has `SITES`, or why not. Call after LoRA's changes, before any tap."""
    types = forward_source.Types.of_vllm()
    convention = lookup(type(layer), layer)
    branches = {} if isinstance(convention, Refusal) else convention.branches
    places: dict[str, Found] = {}
    modules = dict(layer.named_modules())
    attention = [path for path, module in modules.items() if isinstance(module, types.attention)]
    experts = [path for path, module in modules.items() if isinstance(module, types.experts)]
    mixers = [path for path, module in modules.items() if isinstance(module, types.mixer)]
    for sites, rule in (
        (ATTENTION, lambda: _attention_sites(layer, modules, attention, mixers, types)),
        (MLP, lambda: _mlp_sites(layer, modules, [*attention, *mixers], experts, branches, types)),
        (("router",), lambda: _router_site(layer, modules, experts, types)),
    ):
        places.update(_guarded(sites, rule))
    return {site: places[site] for site in SITES}


def _guarded(sites: tuple[str, ...], rule: Callable[[], Mapping[str, Found]]) -> dict[str, Found]:
    try:
        places = rule()
    except UnsupportedError as error:
        return dict.fromkeys(sites, Lack(f"midstream cannot read this model's code: {error}"))
    return {site: places.get(site, Lack(UNPROVEN)) for site in sites}


def _attention_sites(
    layer: nn.Module,
    modules: dict[str, nn.Module],
    attention: list[str],
    mixers: list[str],
    types: forward_source.Types,
) -> dict[str, Found]:
    if type(layer).__module__.startswith("transformers."):
        return dict.fromkeys(ATTENTION, Lack(BACKEND))
    if len(attention) != 1:
        reason = "it has several attentions" if attention else NO_ATTENTION
        if any(isinstance(modules[path], types.latent) for path in mixers):
            reason = MLA
        return dict.fromkeys(ATTENTION, Lack(reason))
    path = attention[0]
    module: Any = modules[path]
    if type(module).forward is not types.attention.forward or module.attn_type != "decoder":
        return dict.fromkeys(ATTENTION, Lack(f"its attention is a {type(module).__qualname__}"))
    forward_source.check_called(layer, path)
    owner_path, _, name = path.rpartition(".")
    owner = modules[owner_path]
    flow = forward_source.flow_of(owner, name, types)
    calls = flow.of(name)
    if len(calls) != 1 or "**" in calls[0].kwargs or name in flow.bypassed:
        return dict.fromkeys(ATTENTION, Lack(UNPROVEN))
    at = _Attention(owner, owner_path, path, module, flow, calls[0], types)
    return {
        "q": at.projected("query"),
        "k": at.projected("key"),
        "v": at.projected("value"),
        "rot_q": at.rotated("query"),
        "rot_k": at.rotated("key"),
        "z": at.mixed(),
    }


@dataclass(frozen=True, slots=True)
class _Attention:
    """Attention of one layer; `path` is that of vLLM's `Attention`."""

    owner: nn.Module
    owner_path: str
    path: str
    module: Any
    flow: Flow
    call: FlowCall
    types: forward_source.Types

    def _given(self, argument: str) -> Value | None:
        return self.call.argument(("query", "key", "value").index(argument), argument)

    def _shape(self, argument: str) -> tuple[int, int]:
        """(heads, width of one) of an argument of attention on this rank."""
        if argument == "query":
            return self.module.num_heads, self.module.head_size
        size = self.module.head_size if argument == "key" else self.module.head_size_v
        return self.module.num_kv_heads, size

    def _unknown(self, value: Value) -> set[str]:
        """What a value went through that may have changed the order of heads or columns."""
        return {name for name in value.through if name.endswith("()") and name not in HEADWISE}

    def projected(self, argument: str) -> Found:
        value = self._given(argument)
        if value is None:
            return Lack(SHARED)
        parts = list(value.parts)
        if len(parts) != 1 or self._unknown(value):
            return Lack(UNPROVEN)
        part = parts[0]
        linear = forward_source.linear_at(self.owner, part.path, self.types)
        if linear is None or part.path in self.flow.bypassed:
            return Lack(UNPROVEN)
        if _adds_bias_outside(linear):
            return Lack(BIAS)
        if argument != "value" and self._is_permuted():
            return Lack(CHANNELS)
        heads, size = self._shape(argument)
        sizes = _sizes(self.owner, part, linear)
        if sizes is None or sizes[part.index or 0] != heads * size:
            return Lack(UNPROVEN)
        split = _split_of(linear, argument, self.types)
        if split is None:
            return Lack(UNPROVEN)
        path = _joined(self.owner_path, part.path)
        start = sum(sizes[: part.index or 0])
        return InnerPlace(path, "output", None, start, heads * size, heads, *split)

    def rotated(self, argument: str) -> Found:
        value = self._given(argument)
        if value is None:
            return Lack(SHARED)
        if self._unknown(value) or not value.parts:
            return Lack(UNPROVEN)
        projected = self.projected(argument)
        if isinstance(projected, Lack):
            return projected
        if not any(self._is_rotary(name) for name in value.through):
            between = "".join(f" and then {name}" for name in sorted(value.through))
            return Lack(NO_ROPE.format("q" if argument == "query" else "k") + between)
        return replace(projected, path=self.path, at="input", argument=argument, start=0)

    def _is_permuted(self) -> bool:
        name = type(self.owner).__name__
        if name not in PERMUTED:
            return False
        attribute = PERMUTED[name]
        return attribute is None or bool(getattr(self.owner, attribute))

    def _is_rotary(self, name: str) -> bool:
        if name in ROTARY:
            return True
        return isinstance(forward_source.attribute(self.owner, name), self.types.rotary)

    def mixed(self) -> Found:
        heads, size = self.module.num_heads, self.module.head_size_v
        name = self.path.rpartition(".")[2]
        readers = [
            (call.path, linear, value)
            for call in self.flow.calls
            if (linear := forward_source.linear_at(self.owner, call.path, self.types)) is not None
            for value in (call.argument(0, "input_"),)
            if value is not None and any(part.path == name for part in value.parts)
        ]
        if len(readers) != 1:
            return Lack(UNPROVEN)
        reader, linear, value = readers[0]
        ranks = _ranks(linear)
        if value == Value(frozenset({Trace(OutputPart(name))})):
            return InnerPlace(self.path, "output", None, 0, heads * size, heads, ranks)
        # A gate or a norm is between: what the projection reads is its own input.
        unknown = self._unknown(value.of(name)) - ELEMENTWISE
        if unknown or reader in self.flow.bypassed:
            return Lack(UNPROVEN)
        if getattr(linear, "input_size_per_partition", linear.input_size) != heads * size:
            return Lack(UNPROVEN)
        path = _joined(self.owner_path, reader)
        return InnerPlace(path, "input", None, 0, heads * size, heads, ranks)


def _sizes(owner: nn.Module, part: OutputPart, linear: Any) -> list[int] | None:
    """Return the widths of the pieces of a matrix's output, which must be all of it."""
    # A replicated matrix has no width of this rank.
    width = getattr(linear, "output_size_per_partition", linear.output_size)
    if part.sizes is None:
        return [width]
    if isinstance(part.sizes, int):
        return [width // part.sizes] * part.sizes if width % part.sizes == 0 else None
    numbers = [forward_source.number(owner, text) for text in part.sizes]
    sizes = [size for size in numbers if size is not None]
    return sizes if len(sizes) == len(numbers) and sum(sizes) == width else None


def _split_of(linear: Any, argument: str, types: forward_source.Types) -> _Split | None:
    """Return how the heads of a projection are split over the ranks; None if that is not known."""
    if linear.tp_size == 1:
        return "whole", 1
    if argument == "query" and isinstance(linear, types.column):
        return "sliced", 1
    if not isinstance(linear, types.qkv):
        return None
    copies: int = forward_source.attribute(linear, "num_kv_head_replicas")
    return ("replicated", copies) if copies > 1 else ("sliced", 1)


def _ranks(linear: Any) -> Ranks:
    return "whole" if linear.tp_size == 1 else "sliced"


def _mlp_sites(
    layer: nn.Module,
    modules: dict[str, nn.Module],
    mixers: list[str],
    experts: list[str],
    branches: Mapping[str, object],
    types: forward_source.Types,
) -> dict[str, Found]:
    entry, leaving = branches.get("mlp_in"), branches.get("mlp_out")
    if isinstance(entry, Lack) and isinstance(leaving, Lack):
        return dict.fromkeys(MLP, entry)
    if experts:
        return dict.fromkeys(MLP, Lack(EXPERTS))
    # Attention and other mixers end with such a matrix too: nothing beside or below them counts.
    beside = {path.split(".")[0] for path in mixers if "." in path}
    owners: dict[str, list[str]] = {}
    for path in modules:
        above, _, last = path.rpartition(".")
        counts = path and last != "base_layer" and above.split(".")[0] not in beside
        if isinstance(entry, Input):
            counts = counts and _is_within(above, entry.path)
        if counts and _is_row(modules[above], last, types):
            owners.setdefault(above, []).append(last)
    if len(owners) != 1 or len(next(iter(owners.values()))) != 1:
        return dict.fromkeys(MLP, Lack(NO_MLP))
    owner_path, (name,) = next(iter(owners.items()))
    owner = modules[owner_path]
    if owner_path:
        forward_source.check_called(layer, owner_path)
    flow = forward_source.flow_of(owner, name, types)
    calls = flow.of(name)
    if len(calls) != 1:
        return dict.fromkeys(MLP, Lack(UNPROVEN))
    value = calls[0].argument(0, "input_")
    down = forward_source.linear_at(owner, name, types)
    if value is None or not value.parts or down is None:
        return dict.fromkeys(MLP, Lack(UNPROVEN))
    return {
        "mlp_act": _neurons(owner, owner_path, name, flow, value, down),
        **_halves(owner, owner_path, flow, value, down, types),
    }


def _neurons(
    owner: nn.Module, owner_path: str, name: str, flow: Flow, value: Value, down: Any
) -> Found:
    if FUSED_QUANT in value.through:
        if forward_source.reads_quantised(owner, name):
            return Lack("the activation is quantised in the same kernel")
    elif name in flow.bypassed:
        return Lack(UNPROVEN)
    path = _joined(owner_path, name)
    return InnerPlace(path, "input", None, 0, down.input_size_per_partition, 0, _ranks(down))


def _halves(
    owner: nn.Module,
    owner_path: str,
    flow: Flow,
    value: Value,
    down: Any,
    types: forward_source.Types,
) -> dict[str, Found]:
    both = "mlp_pre", "mlp_pre_linear"
    parts = list(value.parts)
    functions = [name for name in value.through if name != FUSED_QUANT]
    if len(parts) != 1 or parts[0].index is not None or len(functions) != 1:
        return dict.fromkeys(both, Lack(UNPROVEN))
    up: Any = forward_source.linear_at(owner, parts[0].path, types)
    if not isinstance(up, types.column) or parts[0].path in flow.bypassed:
        return dict.fromkeys(both, Lack(UNPROVEN))
    if _adds_bias_outside(up):
        return dict.fromkeys(both, Lack(BIAS))
    width = down.input_size_per_partition
    path = _joined(owner_path, parts[0].path)
    activation = functions[0]
    if not activation.endswith("()"):
        activation = type(forward_source.attribute(owner, activation)).__name__
    if up.output_size_per_partition == width and activation not in GATE_FIRST | GATE_SECOND:
        pre = InnerPlace(path, "output", None, 0, width, 0, _ranks(up))
        return {"mlp_pre": pre, "mlp_pre_linear": Lack("this MLP has no gate")}
    if up.output_size_per_partition != 2 * width or activation not in GATE_FIRST | GATE_SECOND:
        return dict.fromkeys(both, Lack(f"its activation is {activation}"))
    starts = (0, width) if activation in GATE_FIRST else (width, 0)
    return {
        site: InnerPlace(path, "output", None, start, width, 0, _ranks(up))
        for site, start in zip(both, starts, strict=True)
    }


def _router_site(
    layer: nn.Module,
    modules: dict[str, nn.Module],
    experts: list[str],
    types: forward_source.Types,
) -> dict[str, Found]:
    if len(experts) != 1:
        several = "it has several groups of experts" if experts else "this layer has no experts"
        return {"router": Lack(several)}
    path = experts[0]
    module: Any = modules[path]
    owner_path, _, name = path.rpartition(".")
    owner = modules[owner_path]
    if not owner_path:
        return {"router": Lack(UNPROVEN)}
    if getattr(module, "gate", None) is not None:
        lack = internal_gate_lack(module, owner, name, types)
        if lack is not None:
            return {"router": Lack(lack)}
        gate_path = f"{path}.gate"
    else:
        forward_source.check_called(layer, owner_path)
        flow = forward_source.flow_of(owner, name, types)
        calls = flow.of(name)
        value = calls[0].argument(1, "router_logits") if len(calls) == 1 else None
        if value is None or len(value.parts) != 1:
            return {"router": Lack(UNPROVEN)}
        if "sequence_parallel_chunk" in flow.functions:
            return {"router": Lack(SPLIT)}
        (part,) = value.parts
        if part.index is not None or value.through or part.path in flow.bypassed:
            return {"router": Lack(UNPROVEN)}
        gate_path = _joined(owner_path, part.path)
    gate: Any = forward_source.linear_at(layer, gate_path, types)
    is_whole = isinstance(gate, types.replicated)
    if not is_whole or _adds_bias_outside(gate):
        return {"router": Lack(BIAS if is_whole else UNPROVEN)}
    routing = routing_of(module)
    place = InnerPlace(gate_path, "output", None, 0, gate.output_size, 0, "whole", 1, routing)
    return {"router": place}


def _is_row(owner: nn.Module, name: str, types: forward_source.Types) -> bool:
    linear = forward_source.linear_at(owner, name, types)
    return isinstance(linear, types.row) and bool(linear.input_is_parallel)


def _adds_bias_outside(linear: Any) -> bool:
    return bool(linear.skip_bias_add) and linear.bias is not None


def _is_within(owner: str, mlp: str) -> bool:
    """Return whether the last matrix's owner is the convention's MLP, in it, or has both."""
    return owner == mlp or owner.startswith(f"{mlp}.") or owner == mlp.rpartition(".")[0]


def _joined(owner: str, path: str) -> str:
    return f"{owner}.{path}" if owner else path
