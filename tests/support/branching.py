"""Small layers in whose every form attention and MLP are added to the stream, each twice: as a
model has it, with modules and in place where they are, and as plain arithmetic that names its
sites.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from midstream.runtime.models.convention import PARALLEL, dead, pair, single
from midstream.runtime.models.registry import Half, Input, Lack, Output, Returns
from support.tapping import WIDTH

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
        out = torch.tanh(self.linear(hidden_states))
        return (out, None) if self.extra else out


class Layer(nn.Module):
    """`reference(at, *args)` says what `forward` must do if `at(site, x)` is x with its edit."""

    extra = False

    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp = Mix(self.extra), Mix(self.extra)
        self.norm, self.post_attn, self.post_mlp = Norm(), Norm(), Norm()

    def _mlp(self, x: Tensor) -> Tensor:
        out = self.mlp(x)
        return out[0] if self.extra else out

    def _attn(self, x: Tensor) -> Tensor:
        out = self.self_attn(hidden_states=x)
        return out[0] if self.extra else out


class Pair(Layer):
    convention = pair("norm")

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None):
        if residual is None:
            residual = hidden_states
            hidden_states = hidden_states * 1
        else:
            residual = hidden_states + residual
        hidden_states = self._attn(residual)
        hidden_states, residual = self.norm(hidden_states, residual)
        return self._mlp(hidden_states), residual

    def reference(self, at: At, stream: Tensor) -> Tensor:
        stream = at("resid_pre", stream)
        stream = at("resid_mid", stream + at("attn_out", self._attn(stream)))
        return at("resid_post", stream + at("mlp_out", self._mlp(at("mlp_in", stream * 0.5))))


class Single(Layer):
    convention = single("norm")

    def forward(self, positions: Tensor, hidden_states: Tensor):
        hidden_states = hidden_states + self._attn(hidden_states)
        return hidden_states + self._mlp(self.norm(hidden_states))

    reference = Pair.reference


class SingleOfTuples(Single):
    """As on the Transformers backend: attention returns its weights too."""

    extra = True


class Dead(Single):
    convention = dead("norm")

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None = None):
        return super().forward(positions, hidden_states), torch.full_like(hidden_states, 99.0)


class BareNone(Single):
    convention = single("norm", returns=Returns.PAIR_NONE)

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: None = None):
        return super().forward(positions, hidden_states), None


class Sandwich(Layer):
    """As Gemma: what attention and MLP return is normed."""

    convention = single("norm", attn="post_attn", mlp_out="post_mlp")

    def forward(self, positions: Tensor, hidden_states: Tensor):
        hidden_states = hidden_states + self.post_attn(self._attn(hidden_states))
        return hidden_states + self.post_mlp(self._mlp(self.norm(hidden_states)))

    def reference(self, at: At, stream: Tensor) -> Tensor:
        stream = at("resid_pre", stream)
        stream = at("resid_mid", stream + at("attn_out", 0.5 * self._attn(stream)))
        mlp = self._mlp(at("mlp_in", stream * 0.5))
        return at("resid_post", stream + at("mlp_out", 0.5 * mlp))


class PostNorm(Layer):
    """As OLMo 2: the MLP is called with the stream itself."""

    convention = single("mlp", attn="post_attn", mlp=Input("mlp", shared=True), mlp_out="post_mlp")

    def forward(self, positions: Tensor, hidden_states: Tensor):
        hidden_states = hidden_states + self.post_attn(self._attn(hidden_states))
        return hidden_states + self.post_mlp(self._mlp(hidden_states))

    def reference(self, at: At, stream: Tensor) -> Tensor:
        stream = at("resid_pre", stream)
        stream = at("resid_mid", stream + at("attn_out", 0.5 * self._attn(stream)))
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
        stream = at("resid_mid", stream + at("attn_out", 0.5 * self._attn(stream)))
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
        return at("resid_post", stream + at("attn_out", self._attn(normed)) + mlp)


class TwoReaders(Layer):
    """As Granite's hybrids: experts and a shared MLP are called with what the norm returned."""

    convention = pair("norm", mlp=Output("norm"))

    def __init__(self):
        super().__init__()
        self.experts = Mix()

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None):
        residual = hidden_states.clone() if residual is None else hidden_states + residual
        hidden_states, residual = self.norm(self._attn(residual), residual)
        return self.experts(hidden_states) + self._mlp(hidden_states), residual

    def reference(self, at: At, stream: Tensor) -> Tensor:
        stream = at("resid_pre", stream)
        stream = at("resid_mid", stream + at("attn_out", self._attn(stream)))
        x = at("mlp_in", stream * 0.5)
        return at("resid_post", stream + at("mlp_out", self.experts(x) + self._mlp(x)))


class LoneAttention(Layer):
    """As Nemotron-H's attention layers: the branch is the first half of what is returned."""

    convention = pair(no_mid="alone", attn=Half.AT_EXIT, mlp=Lack("it has no MLP"))

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None):
        residual = hidden_states.clone() if residual is None else hidden_states + residual
        return self._attn(residual), residual

    def reference(self, at: At, stream: Tensor) -> Tensor:
        stream = at("resid_pre", stream)
        return at("resid_post", stream + at("attn_out", self._attn(stream)))


KINDS = [
    Pair, Single, SingleOfTuples, Dead, BareNone, Sandwich, PostNorm, PostNormAlone, Parallel,
    TwoReaders, LoneAttention,
]  # fmt: skip
