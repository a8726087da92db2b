"""Gates of a plan: the taps that they read, and what they read at others than their edit's."""

from __future__ import annotations

from dataclasses import replace

from midstream.errors import SpecError
from midstream.ops.layout import Flags, Op
from midstream.plan.instructions import Instruction
from midstream.plan.operation import refreshed
from midstream.plan.operations import Gate
from midstream.plan.resolved import Steps
from midstream.plan.selection import Layers
from midstream.plan.shape import ModelShape
from midstream.plan.tap_lookup import check_tapped, find_layer
from midstream.sites import Tap, order
from midstream.validation import at


def place_of(shape: ModelShape, tap: Tap, layers: Layers) -> int:
    """Return which of the listed layers a tap is of."""
    assert layers.indices != "all", "each layer has its own vector"
    return [find_layer(index, shape) for index in layers.indices].index(tap[1])


def row_of(shape: ModelShape, edit: Gate, tap: Tap) -> int:
    """Return which row of the gate's direction is for a tap that it reads."""
    layers = edit.probe.layers
    return place_of(shape, tap, Layers(layers)) if layers else 0


def gate_taps(shape: ModelShape, edit: Gate) -> list[Tap | None]:
    """Return the taps that a gate reads, in the order of a forward pass; [None]: it names none."""
    if edit.probe.tap is None:
        return [None]
    site, index = edit.probe.tap
    taps: list[Tap] = []
    with at("probe"):
        for layer in edit.probe.layers or (index,):
            with at("layer"):
                taps.append((site, find_layer(layer, shape)))
                if taps[-1] in taps[:-1]:
                    raise SpecError("", f"layer {layer} is listed twice")
            check_tapped(taps[-1], shape, "site", "layer")
    return [*sorted(taps, key=order)]


def check_order(taps: tuple[Tap, ...], read: Tap | None) -> None:
    """Check that a gate reads no tap that comes after one of its edit; None: it reads those."""
    late = [] if read is None else [tap for tap in taps if order(tap) < order(read)]
    if late and read is not None:
        raise SpecError(
            "probe.layer",
            f"the gate reads {read[0]} of layer {read[1]}, which is computed after "
            f"{late[0][0]} of layer {late[0][1]}, where its edit applies; read an earlier "
            "site, or the site of the edit",
        )


def gated_steps(
    steps: tuple[Instruction, ...], taps: tuple[Tap, ...], tap: Tap, slot: int | None, adds: bool
) -> list[Steps]:
    """Return the edit's instructions at each tap; at its own it adds to the score in the slot, if
    that has parts.
    """
    if slot is None:
        return [Steps(steps)] * len(taps)
    gate = steps[0]
    flags = Flags.FRESH | (Flags.ADDS if adds else Flags.NONE)
    score = Instruction(Op.PROBE, gate.read, a=gate.a, flags=flags, slot=slot)
    here = Steps((score, *steps))
    if adds:
        # The GATE comes first: the PROBE stores the whole score where the GATE finds a part of it.
        added = replace(gate, slot=slot, flags=gate.flags | Flags.ADDS)
        here = Steps((added, score, *steps[1:]))
    by_slot = replace(gate, read=None, a=0.0, slot=slot, flags=gate.flags & ~Flags.FRESH)
    # This gate does not read the stream, so the first instruction that does needs FRESH.
    later = Steps((by_slot, *refreshed(list(steps[1:]))))
    return [here if edited_tap == tap else later for edited_tap in taps]
