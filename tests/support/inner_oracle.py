"""The reference for sites inside attention and the MLP: transformers in float32, plain hooks.

Nothing is asked of midstream: what an edit does is `support.formulas.apply`, on the columns of its
heads.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from midstream import Gate
from midstream.sites import Tap
from support.formulas import apply, read_score
from support.oracle_edits import PLACES, At, EditOracle, Places, Seen, listed_rows

BY_HEAD = ("q", "k", "v", "rot_q", "rot_k", "z")
QKV = ("q", "k", "v")
HALVES = ("mlp_pre", "mlp_pre_linear")


@dataclass(frozen=True)
class Inner:
    """Where transformers has a layer's inner sites. Empty: it has no such place."""

    # The projections whose outputs these are; one name for all: its columns.
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    z: str = "self_attn.o_proj"  # the module that reads it
    # The modules that return `mlp_pre` and `mlp_pre_linear`; one name: its halves.
    pre: str = "mlp.gate_proj"
    linear: str = "mlp.up_proj"
    act: str = "mlp.down_proj"  # the module that reads the neurons
    router: str = ""  # the module that returns the experts' logits
    rotary: bool = True  # whether there are `rot_q` and `rot_k`
    outer: Places = PLACES["llama"]  # where the sites of the residual stream and the branches are

    def sites(self) -> tuple[str, ...]:
        """The inner sites of this architecture, in the order of a forward pass."""
        found = [*QKV, *(("rot_q", "rot_k") if self.rotary else ()), "z"]
        found += ["router"] if self.router else []
        found += ["mlp_pre"] if self.pre else []
        found += ["mlp_pre_linear"] if self.linear else []
        return (*found, *(["mlp_act"] if self.act else []))


_C_ATTN, _QKV = "attn.c_attn", "self_attn.qkv_proj"
INNER: dict[str, Inner] = {
    "llama": Inner(),
    "qwen3": Inner(),
    "gemma2": Inner(outer=PLACES["gemma3"]),
    "gemma3": Inner(outer=PLACES["gemma3"]),
    "mixtral": Inner(pre="", linear="", act="", router="mlp.gate"),
    "qwen3_moe": Inner(pre="", linear="", act="", router="mlp.gate"),
    "gpt2": Inner(
        _C_ATTN, _C_ATTN, _C_ATTN, "attn.c_proj", "mlp.c_fc", "", "mlp.c_proj", rotary=False,
        outer=PLACES["gpt2"],
    ),
    "opt": Inner(
        z="self_attn.out_proj", pre="fc1", linear="", act="fc2", rotary=False,
        outer=Places("model.decoder.layers", "self_attn", ">final_layer_norm", ">fc1", "fc2"),
    ),
    "phi3": Inner(_QKV, _QKV, _QKV, pre="mlp.gate_up_proj", linear="mlp.gate_up_proj"),
}  # fmt: skip


class InnerOracle(EditOracle):
    """Any edits, at any of the sites, inner ones included, without a KV cache."""

    def __init__(self, path: Path, inner: Inner, device: str = "cpu"):
        super().__init__(path, inner.outer, device)
        config = self.model.config
        self.sites = inner.sites()
        self.num_heads = int(config.num_attention_heads)
        self.num_kv_heads = int(getattr(config, "num_key_value_heads", self.num_heads))
        stated = getattr(config, "head_dim", None)
        self.head_dim = int(stated or self.width // self.num_heads)
        self._rotary = inner.rotary
        self._change: tuple[Tap, Callable[[Tensor], Any]] | None = None
        layers: Any = self.model
        for name in inner.outer.layers.split("."):
            layers = getattr(layers, name)
        self._index: dict[nn.Module, int] = {}
        for index, layer in enumerate(layers):
            self._index[_at(layer, inner.z.rpartition(".")[0])] = index
            self._projections(layer, inner, index)
            self._reads(_at(layer, inner.z), ("z", index))
            self._halves(layer, inner, index)
            if inner.act:
                self._reads(_at(layer, inner.act), ("mlp_act", index))
            if inner.router:
                self._routes(_at(layer, inner.router), ("router", index))
        self._modeling = sys.modules[type(_at(layers[0], inner.z.rpartition(".")[0])).__module__]

    # ------------------------------------------------------------ where

    def _projections(self, layer: nn.Module, inner: Inner, index: int) -> None:
        widths = [self.head_dim * heads for heads in self.heads_of_qkv()]
        for site, name, start, width in zip(
            QKV, (inner.q, inner.k, inner.v), np.cumsum([0, *widths[:2]]), widths, strict=True
        ):
            self._returns(_at(layer, name), (site, index), int(start), width, inner.q == inner.k)

    def _halves(self, layer: nn.Module, inner: Inner, index: int) -> None:
        for nth, (site, name) in enumerate(zip(HALVES, (inner.pre, inner.linear), strict=True)):
            if name:
                module = _at(layer, name)
                merged = inner.pre == inner.linear
                whole = module.nf if hasattr(module, "nf") else module.out_features
                width = whole // 2 if merged else whole
                self._returns(module, (site, index), nth * width, width, merged)

    def _returns(self, module: nn.Module, tap: Tap, start: int, width: int, merged: bool) -> None:
        def after(_module: nn.Module, _args: tuple, out: Tensor) -> None:
            assert merged or out.shape[-1] == width, f"{tap}: {tuple(out.shape)}, not {width}"
            self._reach(tap, out[..., start : start + width] if merged else out)

        module.register_forward_hook(after)

    def _reads(self, module: nn.Module, tap: Tap) -> None:
        def before(_module: nn.Module, args: tuple) -> None:
            self._reach(tap, args[0])

        module.register_forward_pre_hook(before)

    def _routes(self, module: Any, tap: Tap) -> None:
        """The choice of experts is made anew of the logits, as in the module itself."""

        def after(_module: nn.Module, _args: tuple, out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            logits = out[0].clone()
            self._reach(tap, logits)
            weights, chosen = logits.float().softmax(dim=-1).topk(module.top_k, dim=-1)
            if getattr(module, "norm_topk_prob", True):
                weights = weights / weights.sum(dim=-1, keepdim=True)
            if torch.equal(logits, out[0]):
                torch.testing.assert_close((weights, chosen), out[1:])
            return logits, weights.to(out[1].dtype), chosen

        module.register_forward_hook(after)

    @contextmanager
    def _attention(self) -> Iterator[None]:
        """`rot_q` and `rot_k` are what the modeling file's attention function is called with."""
        plain = self._modeling.eager_attention_forward

        def attend(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **more: Any) -> Any:
            given = []
            for site, states in (("rot_q", query), ("rot_k", key)):
                rows = states.transpose(1, 2).flatten(2).contiguous()
                self._reach((site, self._index[module]), rows)
                heads = rows.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                assert heads.shape == states.shape
                given.append(heads.contiguous())
            return plain(module, *given, *args, **more)

        if self._rotary:
            self._modeling.eager_attention_forward = attend
        try:
            yield
        finally:
            self._modeling.eager_attention_forward = plain

    def heads_of_qkv(self) -> tuple[int, int, int]:
        return self.num_heads, self.num_kv_heads, self.num_kv_heads

    def heads(self, site: str) -> int:
        """The number of heads of a site; 0: it is not by head."""
        if site not in BY_HEAD:
            return 0
        return self.num_kv_heads if site in ("k", "v", "rot_k") else self.num_heads

    # ------------------------------------------------------------ what

    def run(self, tokens: Sequence[int], edits: Sequence[At] = ()) -> Seen:
        with self._attention():
            return super().run(tokens, edits)

    def _apply(self, one: At, tap: Tap, h: np.ndarray) -> np.ndarray:
        chosen = [position for position in range(len(h)) if one.where(position)]
        if not chosen:
            return h
        gate = one.edit if isinstance(one.edit, Gate) else None
        inner = one.edit if gate is None else gate.edit
        edit, score = one.edit, None
        if gate is not None and gate.memory:
            edit, score = self._opened(gate, tap, chosen)
        elif gate is not None:
            score = self._read_gate(gate, tap, h)[chosen]
        rows = listed_rows(inner, chosen) if len(getattr(inner, "rows", ())) > 1 else None
        out = h.copy()
        size = self.head_dim if inner.heads else h.shape[1]
        for head in inner.heads or (0,):
            columns = np.arange(head * size, (head + 1) * size)
            now = out[np.ix_(chosen, columns)]
            new = apply(edit, now, score, rows)
            # Outside of `dims`, what was there stays.
            dims = list(getattr(inner, "dims", ())) or slice(None)
            now[:, dims] = new[:, dims]
            out[np.ix_(chosen, columns)] = now
        return out

    def _read_gate(self, gate: Gate, tap: Tap, h: np.ndarray) -> np.ndarray:
        """Without a head of its own a gate reads the whole vector, though its edit be of a head."""
        where, head = gate.probe.tap, gate.probe.head
        read = tap if where is None else (where[0], where[1] % self.num_layers)
        given = h if read == tap else self._numbers(read)
        if head is not None:
            given = given[:, head * self.head_dim : (head + 1) * self.head_dim]
        return read_score(gate.probe, given)

    def _numbers(self, tap: Tap) -> np.ndarray:
        return self._seen.values[tap].double().numpy()

    def scores(self, probe: Any, seen: Seen) -> np.ndarray:
        tap = (probe.sites.names[0], probe.layers.indices[0] % self.num_layers)
        h = seen.values[tap].double().numpy()
        if probe.heads:
            (head,) = probe.heads
            h = h[:, head * self.head_dim : (head + 1) * self.head_dim]
        return read_score(probe, h)

    def changed(self, tokens: Sequence[int], tap: Tap, change: Callable[[Tensor], Any]) -> Seen:
        """One forward in which a function changes a tap's rows, [T, width], in place."""
        self._change = tap, change
        try:
            return self.run(tokens)
        finally:
            self._change = None

    def _reach(self, tap: Tap, hidden: Tensor) -> None:
        if self._change is not None and self._change[0] == tap:
            self._change[1](hidden.view(-1, hidden.shape[-1]))
        super()._reach(tap, hidden)


def rows_of(value: Tensor) -> Tensor:
    """Captured rows as [rows, width], whether they are by head or not."""
    return value.reshape(len(value), -1)


def largest_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference of a number, by the largest number of its row, of all rows."""
    a, b = rows_of(found).double(), expected.double()
    assert a.shape == b.shape, f"{tuple(a.shape)} against {tuple(b.shape)}"
    if not len(b):
        return 0.0
    return float(((a - b).abs().amax(-1) / b.abs().amax(-1).clamp_min(1e-6)).max())


def _at(layer: nn.Module, path: str) -> Any:
    return layer.get_submodule(path)
