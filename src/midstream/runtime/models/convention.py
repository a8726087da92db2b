"""The vocabulary for calling conventions of decoder layers, which needs neither vLLM nor torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from midstream.errors import SpecError


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
    """The input of a sub-module.

    Attributes:
        path: dotted attribute of the layer.
        shared: whether the same tensor is used elsewhere (it is the stream, or attention and MLP
            both read it), so that the module needs a copy to be edited alone.
        parameter: the forward's parameter that gets the tensor; None: the first argument.
    """

    path: str
    shared: bool = False
    parameter: str | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """The output of a sub-module: one tensor, or the first item of a tuple.

    Attributes:
        path: dotted attribute of the layer.
        partial: whether it is not yet reduced over the ranks under tensor parallelism.
    """

    path: str
    partial: bool = False


@dataclass(frozen=True, slots=True)
class Lack:
    """A site that a layer does not have.

    Attributes:
        reason: a clause that can follow a colon; a request for the site gets it.
    """

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
    # Attribute with the number of streams where there are several: the layer takes and returns
    # [streams, T, H], and `resid_pre` and `resid_post` are all of them, side by side as heads are.
    streams: str = ""
    float16_scaled: bool = False  # both halves are scaled down in float16: they are not the stream
    # Sites whose stream is not that of the site before it plus the branch between them: resid_mid,
    # resid_post, or resid_pre, which means that of the next layer.
    unsummed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        halves = self.attn_out, self.mlp_out
        _require((self.mid is None) == bool(self.no_mid), "give mid or no_mid, not both")
        if self.returns is not Returns.PAIR:
            _require(self.residual is None, "only a pair has a residual")
            _require(not any(isinstance(half, Half) for half in halves), "only a pair has halves")
        _require(Half.AT_MID not in halves or bool(self.mid), "no half is at a mid that is None")
        if isinstance(self.mlp_in, Input) and self.mlp_in.path == self.mid:
            _require(self.mlp_in.shared, "what mid is called with is the stream: shared=True")
        _require(self.mlp_out is not Half.AT_MID, "at mid the MLP's output is not there yet")
        _require(halves != (Half.AT_EXIT, Half.AT_EXIT), "two branches in one half")

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


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise SpecError("convention", message)


Entry = LayerConvention | Choice | Refusal
Key = tuple[str, str]


def pair(
    mid: str | None = None,
    no_mid: str = "",
    *,
    attention: Input | Output | Lack | str = "self_attn",
    attn: Half | Output | Lack | str | None = None,
    mlp: Input | Output | Lack | str = "mlp",
    mlp_out: Half | Output | Lack | str | None = None,
    **rest: Any,
) -> LayerConvention:
    """A layer that takes and returns `(hidden_states, residual)`, whose sum is the stream, as most
    of vLLM's layers do.

    Args:
        mid: dotted attribute of the sub-module that is called with the stream after attention was
            added and before the MLP, as `(hidden, residual)`; usually the norm before the MLP.
        no_mid: why there is none; then `mid` is None.
        attention: place of `attn_in`; a path means that module's `hidden_states`. `Lack`: there is
            no attention.
        attn: place of `attn_out`; a path means that module's output. By default what `mid` is
            called with first.
        mlp: place of `mlp_in`; a path means that module's input. `Lack`: there is no MLP.
        mlp_out: place of `mlp_out`; by default what the layer returns first.
        **rest: `hidden`, the name of forward's parameter with the stream, if it is not
            `hidden_states`; `unsummed`, those of `resid_mid`, `resid_post` and (of the next layer)
            `resid_pre` that are not the sum of what comes before; `tp_partial`, whether what the
            layer returns first is not yet reduced over the ranks.

    Raises:
        SpecError: the places contradict each other.
    """
    if attn is None:
        _require(bool(mid) or isinstance(attention, Lack), "attn: say where attention is added")
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
    """A layer that takes the stream and returns it, one tensor.

    Args:
        mid: as in `pair`, but that sub-module is called with one tensor.
        no_mid: as in `pair`.
        attention: as in `pair`.
        attn: as in `pair`; by default the output of the module that `attention` names.
        mlp: as in `pair`.
        mlp_out: as in `pair`; by default the output of the module that `mlp` names.
        **rest: as in `pair`.

    Raises:
        SpecError: the places contradict each other.
    """
    mlp = Input(mlp) if isinstance(mlp, str) else mlp
    if attn is None:
        if isinstance(attention, Output):
            raise SpecError("attn", "say which module returns what attention adds")
        attn = attention.path if isinstance(attention, Input) else attention
    if mlp_out is None:
        if isinstance(mlp, Output):
            raise SpecError("mlp_out", "say which module returns what the MLP adds")
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
