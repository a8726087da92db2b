"""The words in which a decoder layer's calling convention is written down.

Pure data: neither vLLM nor torch is imported. The tables are `conventions_vllm` and
`conventions_hf`; what others use is `conventions`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Returns(Enum):
    """What a layer's `__call__` returns, and where the stream is at its exit."""

    PAIR = "(hidden, residual); the stream is hidden + residual"
    PAIR_DEAD = "(hidden, residual), nobody reads that residual; the stream is hidden"
    PAIR_NONE = "(hidden, None); the stream is hidden"
    SINGLE = "one tensor, the stream"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A layer that cannot be tapped, and why, as a clause that can follow "because"."""

    reason: str

    def resolve(self, layer: object) -> Refusal:
        """Itself: refused whatever the layer's settings."""
        return self


@dataclass(frozen=True, slots=True)
class LayerConvention:
    """What one class of decoder layer takes and returns.

    Wherever the stream is one tensor (at the entry of a layer whose residual is None or
    absent, at a `mid` called with one tensor), that very tensor object is the one kept for
    the skip connection, so an in-place edit is seen by both branches. Layers where it is a
    copy have no `mid`, or are refused.

    Attributes:
        returns: what `__call__` returns. Under `PAIR` the residual may still be None at run
            time (`nemotron_nas` layers without attention, before the first one that has it).
        hidden: name of forward's parameter that carries the stream, or its first half.
        residual: name of the parameter that carries the second half, None at run time in the
            first layer. None: the layer takes no such thing, or what it is given is dead.
        mid: dotted attribute (an index is an attribute of a ModuleList) of the sub-module
            which is called where the stream stands after attention, or the mixer, was added
            and before the MLP: positionally, with `(hidden, residual)` or with `(stream)`,
            maybe with further keywords. Usually the norm that feeds the MLP.
        no_mid: why there is none; empty unless `mid` is None.
        no_pre: why an edit at the layer's entry would be missed by its attention; empty
            where it is seen, which is nearly everywhere.
        tp_partial: with tensor parallelism the hidden half, at the exit or at `mid`, is a
            sum that was not yet reduced over the ranks.
        float16_scaled: in float16 (only) both halves are scaled down by a constant, so
            what is read is not the stream.
    """

    returns: Returns
    hidden: str = "hidden_states"
    residual: str | None = None
    mid: str | None = None
    no_mid: str = ""
    no_pre: str = ""
    tp_partial: bool = False
    float16_scaled: bool = False

    def __post_init__(self) -> None:
        assert (self.mid is None) == bool(self.no_mid), "one of mid and no_mid, not both"
        assert self.residual is None or self.returns is Returns.PAIR

    def resolve(self, layer: object) -> LayerConvention:
        """Itself: nothing depends on the layer's settings."""
        return self


@dataclass(frozen=True, slots=True)
class Choice:
    """A convention that depends on how the layer was built.

    Attributes:
        attribute: dotted attribute of the layer whose truth decides. With a trailing `?` it
            may be missing, which counts as false; without, a missing one is a refusal.
        true: what holds when it is true.
        false: what holds when it is false.
    """

    attribute: str
    true: Entry
    false: Entry

    def resolve(self, layer: object) -> LayerConvention | Refusal:
        """What holds for this very layer."""
        path = self.attribute.removesuffix("?")
        value = layer
        for name in path.split("."):
            if not hasattr(value, name):
                if path == self.attribute:
                    return Refusal(f"it has no {path!r}, which decides what it returns")
                value = False
                break
            value = getattr(value, name)
        return (self.true if value else self.false).resolve(layer)


Entry = LayerConvention | Choice | Refusal
Key = tuple[str, str]


def pair(mid: str | None = None, no_mid: str = "", **rest: object) -> LayerConvention:
    """A layer with vLLM's fused add and norm: `(hidden, residual)` in and out."""
    return LayerConvention(
        Returns.PAIR,
        residual="residual",
        mid=mid,
        no_mid=no_mid,
        **rest,  # type: ignore[arg-type]
    )


def single(mid: str | None = None, no_mid: str = "", **rest: object) -> LayerConvention:
    """A layer that takes the stream and returns the stream."""
    return LayerConvention(Returns.SINGLE, mid=mid, no_mid=no_mid, **rest)  # type: ignore[arg-type]


def dead(mid: str | None = None, no_mid: str = "") -> LayerConvention:
    """A layer that takes and returns a residual which nobody reads."""
    return LayerConvention(Returns.PAIR_DEAD, mid=mid, no_mid=no_mid)


PARALLEL = "attention and MLP run in parallel from the same input"
LONE_MIXER = "the layer is one mixer (attention, Mamba, MLP or experts), not two in a row"
