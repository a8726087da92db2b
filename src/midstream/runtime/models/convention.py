"""The vocabulary for calling conventions of decoder layers, which needs neither vLLM nor torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any


class Returns(Enum):
    """What a layer's `__call__` returns, and where the residual stream is in it."""

    PAIR = "(hidden, residual); the stream is hidden + residual"
    PAIR_DEAD = "(hidden, residual), that residual is unused; the stream is hidden"
    PAIR_NONE = "(hidden, None); the stream is hidden"
    SINGLE = "one tensor, the stream"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A layer that cannot be tapped; the reason is a clause that can follow "because"."""

    reason: str

    def resolve(self, layer: object) -> Refusal:
        return self


class Half(Enum):
    """The first half of a pair whose second half is the stream: a branch's output by itself."""

    AT_MID = "what `mid` is called with first"
    AT_EXIT = "what the layer returns first"


@dataclass(frozen=True, slots=True)
class Input:
    """The input of a sub-module."""

    path: str
    shared: bool = False  # used elsewhere too: the module needs a copy to be edited alone
    parameter: str | None = None  # of the forward; None: the tensor is the first argument


@dataclass(frozen=True, slots=True)
class Output:
    """The output of a sub-module, or its first item; `partial`: not yet reduced over the ranks."""

    path: str
    partial: bool = False


@dataclass(frozen=True, slots=True)
class Lack:
    """A site that a layer does not have; the reason is a clause that can follow a colon."""

    reason: str


UNKNOWN = Lack("midstream does not know where that is in this class of layer")


@dataclass(frozen=True, slots=True)
class LayerConvention:
    """What one class of decoder layer takes and returns. Where the stream is one tensor, it is the
    object kept for the skip connection, so both branches see an in-place edit; else no `mid`.
    """

    returns: Returns  # a PAIR's residual may still be None in the first layers (`nemotron_nas`)
    hidden: str = "hidden_states"  # forward's parameter with the stream, or with its first half
    residual: str | None = None  # that with the second half, which is None in the first layer
    # Dotted path of the sub-module that is called with the stream after attention, or the mixer,
    # was added and before the MLP, as `(hidden, residual)` or `(stream)`; usually the MLP's norm.
    mid: str | None = None
    no_mid: str = ""  # why there is no `mid`; empty unless it is None
    no_pre: str = ""  # why attention would not see an edit at the entry
    # What attention and the MLP read, or a norm's output if they are not called with it alone; and
    # what they add to the stream, unscaled.
    attn_in: Input | Output | Lack = UNKNOWN
    attn_out: Half | Output | Lack = UNKNOWN
    mlp_in: Input | Output | Lack = UNKNOWN
    mlp_out: Half | Output | Lack = UNKNOWN
    tp_partial: bool = False  # the hidden half, at the exit or `mid`, is not reduced over ranks yet
    float16_scaled: bool = False  # both halves are scaled down in float16: they are not the stream
    # Sites whose stream is not that of the site before it plus the branch between them: resid_mid,
    # resid_post, or resid_pre, which means that of the next layer.
    unsummed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert (self.mid is None) == bool(self.no_mid), "one of mid and no_mid, not both"
        assert self.residual is None or self.returns is Returns.PAIR
        halves = self.attn_out, self.mlp_out
        assert self.returns is Returns.PAIR or not any(isinstance(half, Half) for half in halves)
        assert Half.AT_MID not in halves or self.mid
        if isinstance(self.mlp_in, Input) and self.mlp_in.path == self.mid:
            assert self.mlp_in.shared, "what mid is called with is the stream"
        assert self.mlp_out is not Half.AT_MID
        assert self.attn_out is not Half.AT_EXIT or self.mlp_out is not Half.AT_EXIT

    @property
    def branches(self) -> dict[str, Half | Input | Output | Lack]:
        """Places of the sites that are not on the stream, by site."""
        sites = "attn_in", "attn_out", "mlp_in", "mlp_out"
        return {site: getattr(self, site) for site in sites}

    def lack(self, site: str, tensor_parallel: bool = False) -> str | None:
        """Return why the layer has no such site; None if it has the site."""
        place = self.branches.get(site)
        if isinstance(place, Lack):
            return place.reason
        if isinstance(place, Output) and place.partial and tensor_parallel:
            return (
                "it is a partial sum under tensor parallelism, which midstream cannot read or "
                "edit yet; use tensor_parallel_size=1"
            )
        return {"resid_pre": self.no_pre, "resid_mid": self.no_mid}.get(site) or None

    def resolve(self, layer: object) -> LayerConvention:
        return self


@dataclass(frozen=True, slots=True)
class Choice:
    """A convention that depends on the truth of a dotted attribute, or on its being `equals`. With
    a trailing `?` it may be missing, which is false; without, that is a refusal.
    """

    attribute: str
    true: Entry
    false: Entry
    equals: str | None = None

    def resolve(self, layer: object) -> LayerConvention | Refusal:
        path = self.attribute.removesuffix("?")
        value = layer
        for name in path.split("."):
            if not hasattr(value, name):
                if path == self.attribute:
                    return Refusal(f"it has no {path!r}, which decides what it returns")
                value = False
                break
            value = getattr(value, name)
        if self.equals is not None:
            value = value == self.equals
        return (self.true if value else self.false).resolve(layer)


Entry = LayerConvention | Choice | Refusal
Key = tuple[str, str]


def pair(
    mid: str | None = None,
    no_mid: str = "",
    *,
    # `attn_in`; a path means a module's `hidden_states`, which others read too if the MLP's input.
    attention: Input | Output | Lack | str = "self_attn",
    # `attn_out`; a path means the module's output. By default the first half at `mid`.
    attn: Half | Output | Lack | str | None = None,
    mlp: Input | Output | Lack | str = "mlp",  # `mlp_in`; a path means the module's input
    mlp_out: Half | Output | Lack | str | None = None,  # by default the first half at the exit
    **rest: Any,
) -> LayerConvention:
    """Return the convention of a layer with vLLM's fused add and norm: pairs in and out."""
    if attn is None:
        assert mid or isinstance(attention, Lack), "say where attention is added"
        attn = attention if isinstance(attention, Lack) else Half.AT_MID
    if mlp_out is None:
        mlp_out = mlp if isinstance(mlp, Lack) else Half.AT_EXIT
    return LayerConvention(
        Returns.PAIR,
        residual="residual",
        mid=mid,
        no_mid=no_mid,
        attn_in=_attn_in(attention, mlp),
        attn_out=Output(attn) if isinstance(attn, str) else attn,
        mlp_in=Input(mlp) if isinstance(mlp, str) else mlp,
        mlp_out=Output(mlp_out) if isinstance(mlp_out, str) else mlp_out,
        **rest,
    )


def single(
    mid: str | None = None,
    no_mid: str = "",
    *,
    attention: Input | Output | Lack | str = "self_attn",
    attn: Output | Lack | str | None = None,
    mlp: Input | Output | Lack | str = "mlp",
    mlp_out: Output | Lack | str | None = None,
    **rest: Any,
) -> LayerConvention:
    """Return the convention of a layer that takes and returns the stream; see `pair`."""
    mlp = Input(mlp) if isinstance(mlp, str) else mlp
    if attn is None:
        assert not isinstance(attention, Output), "say which module returns what attention adds"
        attn = attention.path if isinstance(attention, Input) else attention
    if mlp_out is None:
        assert not isinstance(mlp, Output), "say which module returns what the MLP adds"
        mlp_out = mlp if isinstance(mlp, Lack) else mlp.path
    return LayerConvention(
        Returns.SINGLE,
        mid=mid,
        no_mid=no_mid,
        attn_in=_attn_in(attention, mlp),
        attn_out=Output(attn) if isinstance(attn, str) else attn,
        mlp_in=mlp,
        mlp_out=Output(mlp_out) if isinstance(mlp_out, str) else mlp_out,
        **rest,
    )


def _attn_in(
    attention: Input | Output | Lack | str, mlp: Input | Output | Lack | str
) -> Input | Output | Lack:
    if not isinstance(attention, str):
        return attention
    # The tensor is the stream, or the MLP's input too.
    shared = isinstance(mlp, Input) and mlp.shared
    return Input(attention, shared, parameter="hidden_states")


def dead(mid: str | None = None, no_mid: str = "", **rest: Any) -> LayerConvention:
    """Return the convention of a layer with an unused residual; other arguments as in `single`."""
    return replace(single(mid, no_mid, **rest), returns=Returns.PAIR_DEAD)


def without_attention(convention: LayerConvention, reason: str) -> LayerConvention:
    """Return the convention of the same layer with a mixer that is no attention."""
    return replace(convention, attn_in=Lack(reason), attn_out=Lack(reason))


def hybrid(
    attribute: str, convention: LayerConvention, reason: str, equals: str | None = None
) -> Choice:
    """Return a choice: the mixer is no attention if the attribute is true, or equals `equals`."""
    return Choice(attribute, without_attention(convention, reason), convention, equals)


PARALLEL = "attention and MLP run in parallel from the same input"
LONE_MIXER = "the layer is one mixer (attention, Mamba, MLP or experts), not two in a row"
SCALED = Lack("it is scaled where it is added to the stream, outside any module")
LINEAR = "a linear-attention layer has no attention"
CONV = "a short-convolution layer has no attention"
MAMBA = "a Mamba layer has no attention"
