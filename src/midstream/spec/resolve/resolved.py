"""What one request asks for, made concrete: instructions and captures, at taps, at positions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from midstream.sites import Tap, order
from midstream.spec.instructions import Instruction
from midstream.spec.positions.position_set import Where
from midstream.spec.positions.ranges import clip, merge

Final = tuple[tuple[int, int], ...]


def digest_steps(steps: tuple[Instruction, ...]) -> str:
    """sha256 of all that some instructions do, in hex."""
    content = [
        [
            int(step.op),
            None if step.read is None else step.read.digest,
            [vector.digest for vector in step.write],
            step.a,
            step.b,
            step.c,
            step.d,
            int(step.flags),
            step.slot,
            step.first,
        ]
        for step in steps
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Steps:
    """The instructions of an edit or probe, which several taps may share.

    Attributes:
        instructions: in order.
        digest: of their content.
    """

    instructions: tuple[Instruction, ...]
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", digest_steps(self.instructions))


@dataclass(frozen=True, slots=True)
class ResolvedEdit:
    """One edit at one tap.

    Attributes:
        site, layer: the tap.
        steps: the instructions, of which the last counts as one edit.
        where: at which positions.
        source: which of the plan's edits it comes from; negative: of the edits before those, the
            last of which is −1.
    """

    site: str
    layer: int
    steps: Steps
    where: Where
    source: int = 0


@dataclass(frozen=True, slots=True)
class ResolvedProbe:
    """One score at one tap.

    Attributes:
        name: under which the caller gets it; empty: only gates read it.
        site, layer: the tap.
        steps: one PROBE instruction, whose slot no other probe of the plan has.
        where: at which positions.
    """

    name: str
    site: str
    layer: int
    steps: Steps
    where: Where

    @property
    def slot(self) -> int:
        """Column of the scores."""
        slot = self.steps.instructions[0].slot
        assert slot is not None
        return slot


@dataclass(frozen=True, slots=True)
class ResolvedCapture:
    """Read some taps, for the tokens at some positions.

    Attributes:
        taps: in the order in which a forward pass reaches them.
        where: at which positions.
        source: which of the plan's captures it comes from; negative: of those of every request,
            the last of which is −1.
    """

    taps: tuple[Tap, ...]
    where: Where
    source: int = 0


class Alike(NamedTuple):
    """Taps that the same captures name.

    Attributes:
        captures: which of the plan's.
        taps: in the order in which a forward pass reaches them.
    """

    captures: tuple[int, ...]
    taps: tuple[Tap, ...]


@dataclass(frozen=True, slots=True)
class ResolvedPlan:
    """A plan for one model and one prompt.

    `length` in the methods is the number of rows of the request, P + G − 1 when it has ended, and
    `tokens` the id of each of them (only generated ones are looked at).

    Attributes:
        prompt_len: P, in tokens.
        edits: edits of one token at one tap apply in this order.
        captures: where two overlap, a row is captured once.
        probes: each sees the vector after the edits at its tap.
        codec: how captured vectors leave the device.
        sharded: whether the ranks of a tensor-parallel group share that; otherwise the first of
            them moves all.
        taps: all that are captured, in the order in which a forward pass reaches them.
        alike: the same, those together that the same captures name: they have the same rows.
    """

    prompt_len: int
    edits: tuple[ResolvedEdit, ...]
    captures: tuple[ResolvedCapture, ...]
    probes: tuple[ResolvedProbe, ...] = ()
    codec: str = "raw"
    sharded: bool = False
    # Many requests share a plan: what they all need is worked out once.
    taps: tuple[Tap, ...] = field(init=False, compare=False, repr=False)
    alike: tuple[Alike, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        naming: dict[Tap, list[int]] = {}
        for index, capture in enumerate(self.captures):
            for tap in capture.taps:
                naming.setdefault(tap, []).append(index)
        taps = tuple(sorted(naming, key=order))
        alike: dict[tuple[int, ...], list[Tap]] = {}
        for tap in taps:
            alike.setdefault(tuple(naming[tap]), []).append(tap)
        found = tuple(Alike(captures, tuple(each)) for captures, each in alike.items())
        object.__setattr__(self, "taps", taps)
        object.__setattr__(self, "alike", found)

    def ranges_of(self, captures: tuple[int, ...], length: int, tokens: Sequence[int]) -> Final:
        """The positions that any of these captures has."""
        found = [
            each for index in captures for each in self.captures[index].where.final(length, tokens)
        ]
        return clip(merge(found), length)

    def expected_rows(self, length: int, tokens: Sequence[int]) -> dict[Tap, int]:
        """How many rows each tap's capture has, for every tap that a capture names."""
        found = dict.fromkeys(self.taps, 0)
        for captures, taps in self.alike:
            ranges = self.ranges_of(captures, length, tokens)
            found.update(dict.fromkeys(taps, sum(stop - start for start, stop in ranges)))
        return found

    @property
    def slots(self) -> int:
        """How many scores a token may have."""
        steps = [probe.steps for probe in self.probes] + [edit.steps for edit in self.edits]
        slots = [one.slot for each in steps for one in each.instructions if one.slot is not None]
        return 1 + max(slots, default=-1)

    def to_bytes(self) -> bytes:
        """The form in which a plan travels to the workers; see `wire`."""
        from midstream.spec.resolve.wire import to_bytes

        return to_bytes(self)

    @staticmethod
    def from_bytes(data: bytes) -> ResolvedPlan:
        """The plan that `to_bytes` wrote.

        Raises:
            SpecError: anything else.
        """
        from midstream.spec.resolve.wire import from_bytes

        return from_bytes(data)
