"""What the gates of conversations left at the end of a completion, from the scores of SCANs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from midstream.ops.layout import OPEN
from midstream.results.receipt import Carried
from midstream.runtime.frontend.conversations import Recollection
from midstream.runtime.frontend.results.actions import Sent
from midstream.runtime.protocol.rank_parts import scores_of
from midstream.spec import ResolvedPlan, ResolvedProbe
from midstream.spec.operations.gate_memory import ScanStart, State
from midstream.spec.resolve.gates import gate_key


@dataclass(frozen=True, slots=True)
class LeftStates:
    """The states of a completion's gates of conversations.

    Attributes:
        entries: for the receipt.
        states: see `Recollection.keep`.
        problems: states that are unknown.
    """

    entries: tuple[Carried, ...] = ()
    states: tuple[tuple[str, str, ScanStart, State], ...] = ()
    problems: tuple[str, ...] = ()


NOTHING_LEFT = LeftStates()


def left_states(
    plan: ResolvedPlan, recalled: Recollection | None, sent: Sent, tokens: Sequence[int]
) -> LeftStates:
    """Return what the gates of conversations left.

    Args:
        plan: the plan with which the request was sent; later versions have the same gates.
        recalled: what they started from; None: there are none.
        sent: the scores of the completion.
        tokens: token id of each row, prompt first.
    """
    if recalled is None:
        return NOTHING_LEFT
    entries, states, problems = [], [], []
    for probe in plan.probes:
        if probe.start is None:
            continue
        key = gate_key(probe)
        missing, last = _last_state(probe, probe.start, sent, tokens)
        if missing:
            problems.append(
                f"{missing} scores of the gate of conversation {probe.conversation} at "
                f"{probe.site} of layer {probe.layer} did not come"
            )
        is_new = recalled.is_new(probe.conversation, key)
        position = None if is_new else probe.start.position
        entries.append(Carried(probe.conversation, probe.site, probe.layer, position, last == OPEN))
        states.append((probe.conversation, key, probe.start, last))
    return LeftStates(tuple(entries), tuple(states), tuple(problems))


def _last_state(
    probe: ResolvedProbe, start: ScanStart, sent: Sent, tokens: Sequence[int]
) -> tuple[int, State]:
    """Return how many scores are missing, and the state after the last row."""
    found = scores_of(probe, sent)
    known = np.concatenate([np.zeros(0, np.int64), *(positions for positions, _ in found)])
    wanted = probe.where.final(len(tokens), tokens)
    missing = 0
    for begin, stop in wanted:
        there = np.unique(known[(known >= begin) & (known < stop)])
        missing += stop - begin - there.size
    if missing or not wanted or wanted[-1][1] <= start.position:
        return missing, start.after
    scores = np.concatenate([values for _, values in found])
    (place,) = np.flatnonzero(known == wanted[-1][1] - 1)[-1:]
    return 0, float(scores[place])
