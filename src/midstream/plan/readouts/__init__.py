"""Read-outs: what a request returns of some positions. A file for each kind."""

from __future__ import annotations

from collections.abc import Mapping

from midstream.plan.readouts.attention import Attention
from midstream.plan.readouts.base import ReadOut
from midstream.plan.readouts.capture import Capture
from midstream.plan.readouts.features import Features
from midstream.plan.readouts.lens import Lens
from midstream.plan.readouts.logits import Logits
from midstream.plan.readouts.norms import Norms

__all__ = [
    "KINDS",
    "Attention",
    "Capture",
    "Features",
    "Lens",
    "Logits",
    "Norms",
    "ReadOut",
    "parse_readout",
]

# The kinds but `Capture`, by the kind of their resolved form, in the order in which a dict is read
# as one of them.
KINDS: dict[str, type[ReadOut]] = {
    readout.key: readout for readout in (Norms, Attention, Features, Lens, Logits)
}


def parse_readout(value: object) -> ReadOut:
    """Read a Capture or another read-out, or the dict of one."""
    for readout in KINDS.values():
        if isinstance(value, readout) or (isinstance(value, Mapping) and readout.is_form(value)):
            return readout.parse(value)
    return Capture.parse(value)
