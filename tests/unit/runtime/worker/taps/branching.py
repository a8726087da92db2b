"""Small layers in whose every form attention and MLP are added to the stream, each twice: with
modules, as a model has it, and as plain arithmetic that names its sites. And their taps.
"""

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from midstream.ops import layout
from midstream.ops.layout import Flags, Op
from midstream.runtime.models.convention import (
    PARALLEL,
    Half,
    Input,
    Lack,
    Output,
    Returns,
    dead,
    pair,
    single,
)
from midstream.runtime.models.decoder import DecoderLayer
from midstream.runtime.protocol.segments import Room
from midstream.runtime.worker.tables.device_buffers import Buffers, BufferSizes, code
from midstream.runtime.worker.taps.taps import tap_layer
from midstream.sites import OUTER, Tap

WIDTH, ROWS = 4, 3
At = Callable[[str, Tensor], Tensor]


class Norm(nn.Module):
    """vLLM's: with a residual it adds first, in place, and returns both."""

    def forward(self, x: Tensor, residual: Tensor | None = None):
        if residual is None:
            return x * 0.5
        residual.add_(x)
        x.copy_(residual * 0.5)
        return x, residual


class Mix(nn.Module):
    """One tensor in, one out, or a tuple that begins with it."""

    def __init__(self, extra: bool = False):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.extra = extra

    def forward(self, hidden_states: Tensor):
        out = self.linear(hidden_states)
        return (out, None) if self.extra else out


class Attention(Mix):
    """Called with more than the stream, which is not first."""

    def forward(self, positions: Tensor, hidden_states: Tensor):
        return super().forward(hidden_states)


class Layer(nn.Module):
    """`reference(at, *args)` says what `forward` must do if `at(site, x)` is x with its edit."""

    extra = False
    by_keyword = True

    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp = Attention(self.extra), Mix(self.extra)
        self.attn_norm, self.norm = Norm(), Norm()
        self.post_attn, self.post_mlp = Norm(), Norm()

    def _mlp(self, x: Tensor) -> Tensor:
        out = self.mlp(x)
        return out[0] if self.extra else out

    def _attn(self, x: Tensor) -> Tensor:
        where = torch.zeros(())
        if self.by_keyword:
            out = self.self_attn(positions=where, hidden_states=x)
        else:
            out = self.self_attn(where, x)
        return out[0] if self.extra else out

    def _attn_norm(self, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(what attention reads, the stream), as vLLM's layers that take two halves."""
        if residual is None:
            return self.attn_norm(hidden_states), hidden_states
        return self.attn_norm(hidden_states, residual)


class Pair(Layer):
    convention = pair("norm")

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None):
        hidden_states, residual = self._attn_norm(hidden_states, residual)
        hidden_states, residual = self.norm(self._attn(hidden_states), residual)
        return self._mlp(hidden_states), residual

    def reference(self, at: At, stream: Tensor) -> Tensor:
        stream = at("resid_pre", stream)
        attn = at("attn_out", self._attn(at("attn_in", stream * 0.5)))
        stream = at("resid_mid", stream + attn)
        return at("resid_post", stream + at("mlp_out", self._mlp(at("mlp_in", stream * 0.5))))


class Single(Layer):
    convention = single("norm")

    def forward(self, positions: Tensor, hidden_states: Tensor):
        hidden_states = hidden_states + self._attn(self.attn_norm(hidden_states))
        return hidden_states + self._mlp(self.norm(hidden_states))

    reference = Pair.reference


class SingleOfTuples(Single):
    """As on the Transformers backend: attention returns its weights too."""

    extra = True


class SingleByPosition(Single):
    """As DeepSeek's: attention is called without names."""

    by_keyword = False


class Dead(Single):
    convention = dead("norm")

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None = None):
        return super().forward(positions, hidden_states), torch.full_like(hidden_states, 99.0)


class BareNone(Single):
    convention = replace(single("norm"), returns=Returns.PAIR_NONE)

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: None = None):
        return super().forward(positions, hidden_states), None


class PostNorm(Layer):
    """As OLMo 2: attention and MLP are called with the stream itself."""

    convention = single("mlp", attn="post_attn", mlp=Input("mlp", shared=True), mlp_out="post_mlp")

    def forward(self, positions: Tensor, hidden_states: Tensor):
        hidden_states = hidden_states + self.post_attn(self._attn(hidden_states))
        return hidden_states + self.post_mlp(self._mlp(hidden_states))

    def reference(self, at: At, stream: Tensor) -> Tensor:
        stream = at("resid_pre", stream)
        attn = at("attn_out", 0.5 * self._attn(at("attn_in", stream)))
        stream = at("resid_mid", stream + attn)
        mlp = self._mlp(at("mlp_in", stream))
        return at("resid_post", stream + at("mlp_out", 0.5 * mlp))


class PostNormAlone(PostNorm):
    """The MLP is the place of three sites: no norm follows it."""

    convention = single("mlp", attn="post_attn", mlp=Input("mlp", shared=True))

    def forward(self, positions: Tensor, hidden_states: Tensor):
        hidden_states = hidden_states + self.post_attn(self._attn(hidden_states))
        return hidden_states + self._mlp(hidden_states)

    def reference(self, at: At, stream: Tensor) -> Tensor:
        stream = at("resid_pre", stream)
        attn = at("attn_out", 0.5 * self._attn(at("attn_in", stream)))
        stream = at("resid_mid", stream + attn)
        return at("resid_post", stream + at("mlp_out", self._mlp(at("mlp_in", stream))))


class Parallel(Layer):
    """As Phi: attention reads the very tensor that the MLP reads, here after it."""

    convention = single(no_mid=PARALLEL, mlp=Input("mlp", shared=True))

    def forward(self, positions: Tensor, hidden_states: Tensor):
        normed = self.norm(hidden_states)
        mlp = self._mlp(normed)
        return hidden_states + self._attn(normed) + mlp

    def reference(self, at: At, stream: Tensor) -> Tensor:
        stream = at("resid_pre", stream)
        normed = stream * 0.5
        mlp = at("mlp_out", self._mlp(at("mlp_in", normed)))
        attn = at("attn_out", self._attn(at("attn_in", normed)))
        return at("resid_post", stream + attn + mlp)


class TwoReaders(Layer):
    """As Granite's hybrids: experts and a shared MLP are called with what the norm returned."""

    convention = pair("norm", mlp=Output("norm"))

    def __init__(self):
        super().__init__()
        self.experts = Mix()

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None):
        hidden_states, residual = self._attn_norm(hidden_states, residual)
        hidden_states, residual = self.norm(self._attn(hidden_states), residual)
        return self.experts(hidden_states) + self._mlp(hidden_states), residual

    def reference(self, at: At, stream: Tensor) -> Tensor:
        stream = at("resid_pre", stream)
        attn = at("attn_out", self._attn(at("attn_in", stream * 0.5)))
        stream = at("resid_mid", stream + attn)
        x = at("mlp_in", stream * 0.5)
        return at("resid_post", stream + at("mlp_out", self.experts(x) + self._mlp(x)))


class LoneAttention(Layer):
    """As Nemotron-H's attention layers: the branch is the first half of what is returned."""

    convention = pair(no_mid="alone", attn=Half.AT_EXIT, mlp=Lack("it has no MLP"))

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None):
        hidden_states, residual = self._attn_norm(hidden_states, residual)
        return self._attn(hidden_states), residual

    def reference(self, at: At, stream: Tensor) -> Tensor:
        stream = at("resid_pre", stream)
        attn = at("attn_out", self._attn(at("attn_in", stream * 0.5)))
        return at("resid_post", stream + attn)


class AttentionInside(LoneAttention):
    """As Jamba's attention layers: attention is a method, so what it reads is the norm's output."""

    convention = pair(
        no_mid="alone", attention=Output("attn_norm"), attn=Half.AT_EXIT, mlp=Lack("it has no MLP")
    )

    def _attn(self, x: Tensor) -> Tensor:
        return self.self_attn.linear(x)


KINDS = [
    Pair, Single, SingleOfTuples, SingleByPosition, Dead, BareNone, PostNorm,
    PostNormAlone, Parallel, TwoReaders, LoneAttention, AttentionInside,
]  # fmt: skip


def make_buffers(taps) -> Buffers:
    """Small buffers on the CPU, float32."""
    return Buffers.allocate(
        dict.fromkeys(taps, WIDTH),
        BufferSizes(
            max_tokens=16, hidden_size=WIDTH, ring_rows=256,
            room=Room(bank_rows=16, programs=16, max_edits=16, token_ids=1, probes=1),
        ),
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip


def arm(buffers: Buffers, rows: int, num_taps: int, edits: dict[int, float] | None = None) -> None:
    """Every row captured at every tap, and a constant added at some of them, by index."""
    buffers.table[:, 2].zero_()
    for nth, (tap, value) in enumerate((edits or {}).items()):
        buffers.bank[nth] = value
        buffers.instructions[nth, layout.OP] = Op.ADD
        buffers.instructions[nth, layout.WRITE] = nth
        buffers.instructions[nth, layout.FLAGS] = Flags.FRESH | Flags.COUNTED
        buffers.params[nth, layout.A] = 1.0
        buffers.table[tap, 2, layout.EDIT_START] = nth
        buffers.table[tap, 2, layout.EDIT_COUNT] = 1
    buffers.table[:, 1, layout.PLACE] = torch.arange(1, num_taps + 1, dtype=torch.int32)
    buffers.tokens[:rows, layout.PROGRAM] = 2
    buffers.tokens[:rows, layout.GROUP] = 1
    buffers.tokens[:rows, layout.RECORD] = 1 + num_taps * torch.arange(rows, dtype=torch.int32)
    buffers.tally.zero_()


def read(buffers: Buffers, rows: int, num_taps: int) -> Tensor:
    """[rows, taps, width] as captured."""
    return buffers.ring[: rows * num_taps].view(rows, num_taps, WIDTH).clone()


def tapped(kind, sites: tuple[Tap, ...]):
    """(a layer, the same layer tapped, the buffers) of a class that has a `convention`."""
    torch.manual_seed(3)
    plain = kind()
    layer = copy.deepcopy(plain)
    buffers = make_buffers(sites)
    taps = {tap: n for n, tap in enumerate(sites)}
    tap_layer(DecoderLayer(0, layer, kind.convention), taps, buffers)
    return plain, layer, buffers


def assert_same_out(found, wanted):
    """Equal as a layer's return values, to rounding."""
    found = found if isinstance(found, tuple) else (found,)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        if other is None:
            assert one is None
        else:
            torch.testing.assert_close(one, other)


def has(kind) -> tuple[str, ...]:
    """The sites of a kind of layer."""
    return tuple(name for name in OUTER if kind.convention.lack(name) is None)


def stream_of(kind, out) -> Tensor:
    """The stream in what a layer returned, [T, width]."""
    hidden, residual = out if isinstance(out, tuple) else (out, None)
    if residual is not None and kind.convention.returns is Returns.PAIR:
        hidden = hidden + residual
    return hidden.reshape(-1, WIDTH)


def inputs(kind, shape=(ROWS, WIDTH)) -> tuple[Tensor, ...]:
    """(positions, stream), or the stream's two halves where the layer takes two."""
    torch.manual_seed(4)
    one, two = torch.randn(shape), torch.randn(shape)
    is_pair = kind.convention.returns is Returns.PAIR
    return (torch.arange(ROWS), one, two) if is_pair else (torch.arange(ROWS), one)


def expect(kind, layer: Layer, args, edits: dict[str, float]) -> tuple[Tensor, Tensor]:
    """([T, width], [T, sites, width]): the stream at the exit and at every site, by arithmetic."""
    seen = {}

    def at(site: str, x: Tensor) -> Tensor:
        seen[site] = x + edits.get(site, 0.0)
        return seen[site]

    with torch.no_grad():
        out = layer.reference(at, sum(args[1:]).reshape(-1, WIDTH))
    assert set(seen) == set(has(kind)), "the reference and the convention name other sites"
    return out, torch.stack([seen[site] for site in has(kind)], dim=1)


def check(kind, edits: dict[str, float], shape=(ROWS, WIDTH), function=None) -> None:
    """A tapped layer does and reads what the arithmetic says."""
    sites = has(kind)
    plain, layer, buffers = tapped(kind, tuple((site, 0) for site in sites))
    args = inputs(kind, shape)
    arm(buffers, ROWS, len(sites), {sites.index(site): value for site, value in edits.items()})
    with torch.no_grad():
        out = (function or (lambda f: f))(layer)(*(arg.clone() for arg in args))
    wanted, seen = expect(kind, plain, args, edits)
    torch.testing.assert_close(stream_of(kind, out), wanted)
    torch.testing.assert_close(read(buffers, ROWS, len(sites)), seen)
    signature = sum(code((site, 0)) for site in sites)
    wrapped = (signature + 2**31) % 2**32 - 2**31
    assert buffers.tally[:ROWS, layout.SIGNATURE].tolist() == [wrapped] * ROWS
    assert buffers.tally[:ROWS, layout.EDITS].tolist() == [len(edits)] * ROWS
