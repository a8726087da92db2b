"""Resolution of a probe of attention against a model and a prompt."""

from __future__ import annotations

from midstream.plan.positions.position_set import Where
from midstream.plan.positions.select import PromptSelections
from midstream.plan.probe import Probe
from midstream.plan.readouts.attention import ATTENTION, layers_of, pattern_of, reduction_of
from midstream.plan.resolved import ResolvedProbe, SlottedPattern, Steps
from midstream.plan.shape import ModelShape
from midstream.validation import at


def resolve_attention_probe(
    probe: Probe,
    slot: int,
    where: Where,
    shape: ModelShape,
    selections: PromptSelections,
) -> ResolvedProbe:
    """Resolve a probe of attention."""
    assert probe.attention is not None
    layers = layers_of(probe.layers, shape, "layer")
    with at("attention"):
        reduced = reduction_of(probe.attention, where, selections)
    pattern = pattern_of(layers, probe.heads, reduced, shape, ("layer", "head"))
    slotted = SlottedPattern(slot, pattern, shape.num_heads(pattern.reads[0]))
    return ResolvedProbe(probe.name, ATTENTION, layers[0], Steps(()), where, slotted)
