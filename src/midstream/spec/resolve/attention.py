"""Resolution of an `Attention`, and of a probe of attention, against a model and a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from midstream.errors import SpecError
from midstream.sites import Tap
from midstream.spec.attention import (
    MAX_FULL_KEYS,
    Attention,
    Entropy,
    Mass,
    Reduction,
    TopKeys,
)
from midstream.spec.heads import head_size
from midstream.spec.positions.position_set import Where
from midstream.spec.positions.ranges import Ranges
from midstream.spec.positions.select import PromptSelections
from midstream.spec.probe import Probe
from midstream.spec.resolve.resolved import (
    Pattern,
    PatternKind,
    ResolvedCapture,
    ResolvedProbe,
    SlottedPattern,
    Steps,
)
from midstream.spec.resolve.tap_lookup import find_layer
from midstream.spec.selection import Layers
from midstream.spec.shape import ModelShape
from midstream.validation import at

ATTENTION = "attention"
# Queries are read at the first of these that the engine taps.
QUERY_SITES = ("rot_q", "q")
# Rows of the whole pattern are as long as a multiple of this, so that few lengths occur.
_KEYS_STEP = 64


def resolve_attention(
    attention: Attention,
    source: int,
    where: Where,
    shape: ModelShape,
    selections: PromptSelections,
) -> ResolvedCapture:
    """Resolve an `Attention`.

    Args:
        source: its index in the plan.
        selections: those of the plan in its prompt.
    """
    layers = _layers(attention.layers, shape, "layers")
    with at("reduce"):
        reduced = _reduction(attention.reduce, where, selections)
    heads = tuple(sorted(attention.heads or ()))
    pattern = _pattern(layers, heads, reduced, shape, "layers", "heads")
    site = f"{ATTENTION}.{attention.name}" if attention.name else ATTENTION
    return ResolvedCapture(tuple((site, layer) for layer in layers), where, source, pattern)


def resolve_attention_probe(
    probe: Probe,
    slot: int,
    where: Where,
    shape: ModelShape,
    selections: PromptSelections,
) -> ResolvedProbe:
    """Resolve a probe of attention.

    Args:
        shape, selections: see `resolve_attention`.
    """
    assert probe.attention is not None
    layers = _layers(probe.layers, shape, "layer")
    with at("attention"):
        reduced = _reduction(probe.attention, where, selections)
    pattern = _pattern(layers, probe.heads, reduced, shape, "layer", "head")
    slotted = SlottedPattern(slot, pattern, shape.num_heads(pattern.reads[0]))
    return ResolvedProbe(probe.name, ATTENTION, layers[0], Steps(()), where, slotted)


def _pattern(
    layers: Sequence[int],
    heads: tuple[int, ...],
    reduced: tuple[PatternKind, int, Ranges],
    shape: ModelShape,
    layers_field: str,
    heads_field: str,
) -> Pattern:
    with at(layers_field):
        reads = tuple(_query_tap(layer, shape) for layer in layers)
    for tap in reads:
        if heads:
            head_size(heads, shape.size(tap), heads_field, f"{tap[0]} of layer {tap[1]}")
    counts = tuple(len(heads) or shape.num_heads(tap) for tap in reads)
    return Pattern(*reduced, heads, reads, counts)


def check_attention(captures: Sequence[ResolvedCapture]) -> None:
    """Check that no two captures return attention of one layer under one name."""
    seen: dict[Tap, int] = {}
    for capture in captures:
        for tap in capture.taps if capture.pattern is not None else ():
            other = seen.setdefault(tap, capture.source)
            if other != capture.source:
                raise SpecError(
                    f"capture[{capture.source}].name",
                    f"capture[{other}] also returns attention of layer {tap[1]} under this name; "
                    "give one of them another `name`",
                )


def _layers(selection: Layers, shape: ModelShape, field: str) -> list[int]:
    """Return the layers, ascending.

    Args:
        field: name of the field that names them, for messages.
    """
    indices = selection.indices
    if indices == "all":
        every = range(shape.num_layers)
        layers = [layer for layer in every if shape.reason((ATTENTION, layer)) is None]
        if not layers:
            raise SpecError(field, f"no layer's attention can be read: {_why(0, shape)}")
        return layers
    index_by_layer: dict[int, int] = {}
    for place, index in enumerate(indices):
        path = field if len(indices) == 1 else f"{field}[{place}]"
        with at(path):
            layer = find_layer(index, shape)
            if layer in index_by_layer:
                raise SpecError("", f"layer {index} is the same as layer {index_by_layer[layer]}")
            index_by_layer[layer] = index
            if shape.reason((ATTENTION, layer)) is not None:
                raise SpecError(
                    "", f"attention of layer {index} cannot be read: {_why(layer, shape)}"
                )
    return sorted(index_by_layer)


def _why(layer: int, shape: ModelShape) -> str:
    return shape.reason((ATTENTION, layer)) or ""


def _query_tap(layer: int, shape: ModelShape) -> Tap:
    for site in QUERY_SITES:
        if (site, layer) in shape.taps:
            return site, layer
    raise SpecError("", f"attention of layer {layer} cannot be read: {NO_QUERIES}")


NO_QUERIES = (
    'the engine does not tap its queries; add "rot_q" to midstream\'s setting `sites`, or "q" '
    "for a model without rotary embedding, as in "
    'LLM(…, midstream={"sites": ["resid_post", "rot_q"]})'
)


def _reduction(
    reduction: Reduction, where: Where, selections: PromptSelections
) -> tuple[PatternKind, int, Ranges]:
    """Return the kind of a reduction, its numbers for a head, and the keys of a mass."""
    match reduction:
        case TopKeys(k):
            return "top", 2 * k, ()
        case Entropy():
            return "entropy", 1, ()
        case Mass(positions=positions):
            keys = selections.select(positions)
            if keys.matches or keys.last_from is not None:
                raise SpecError(
                    "positions",
                    "the keys of a mass must be known before tokens are generated: ids of "
                    'generated tokens and "last" are unsupported; restrict them with '
                    'phase="prompt"',
                )
            return "mass", 1, keys.ranges
        case _:
            return reduction, _full_keys(reduction, where, selections), ()


def _full_keys(word: str, where: Where, selections: PromptSelections) -> int:
    """Return the number of keys that a query at the last of some positions may see, rounded up.

    Args:
        selections: those of the plan in its prompt.
    """
    last, max_tokens = where.possible[-1][1], selections.max_tokens
    length = None if max_tokens is None else selections.prompt.length + max_tokens - 1
    if last is None or (length is not None and length < last):
        last = length
    if last is None or last > MAX_FULL_KEYS:
        number = "any number of" if last is None else str(last)
        raise SpecError(
            "",
            f'a query may see {number} keys, and "{word}" returns at most {MAX_FULL_KEYS}; use '
            "TopKeys, Mass or Entropy, or earlier queries",
        )
    return -(-last // _KEYS_STEP) * _KEYS_STEP
