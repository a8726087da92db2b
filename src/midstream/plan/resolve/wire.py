"""Resolved plans as bytes: one msgpack message, read strictly; equal parts occur once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Annotated, Literal, TypeVar

from msgspec import Meta, Struct
from msgspec.msgpack import Decoder, Encoder

from midstream.errors import SpecError
from midstream.ops.layout import HELD, Flags, Op
from midstream.plan.argument_names import read_each
from midstream.plan.instructions import Instruction
from midstream.plan.positions.automaton import Automaton
from midstream.plan.positions.position_set import Match, Where
from midstream.plan.positions.range_set import intersect
from midstream.plan.positions.ranges import Ranges, well_formed
from midstream.plan.resolved import (
    Pattern,
    ResolvedBias,
    ResolvedCapture,
    ResolvedEdit,
    ResolvedFunction,
    ResolvedPlan,
    ResolvedProbe,
    SaeEncoder,
    SlottedPattern,
    Steps,
)
from midstream.plan.vectors.device_row import DeviceRow
from midstream.plan.vectors.vector import Vector
from midstream.sites import NAMES
from midstream.validation import FLOAT32_MAX, INT_LIMIT, at, kind, read_message, read_word

_ALL_FLAGS = sum(int(flag) for flag in Flags)
_SITES = frozenset(NAMES)

_Natural = Annotated[int, Meta(ge=0, le=INT_LIMIT)]
_Integer = Annotated[int, Meta(ge=-INT_LIMIT, le=INT_LIMIT)]
_Float32 = Annotated[float, Meta(ge=-FLOAT32_MAX, le=FLOAT32_MAX)]

T = TypeVar("T")


class _Message(Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a plan's message."""


class NamedVectorMessage(_Message, frozen=True, array_like=True, tag=1):
    """A vector that the reader has."""

    digest: str


class DeviceRowMessage(_Message, frozen=True, array_like=True, tag=2):
    """A `DeviceRow`, which the reader has on its device."""

    source: str
    site: str
    layer: _Natural
    position: _Natural
    size: Annotated[int, Meta(ge=1, le=INT_LIMIT)]
    is_unit: bool


class InstructionMessage(_Message, frozen=True, array_like=True):
    """An `Instruction`; `read`, `write` and `mask` are indices of vectors."""

    op: Op
    read: _Natural | None
    write: tuple[_Natural, ...]
    a: _Float32
    b: _Float32
    c: _Float32
    d: _Float32
    flags: Annotated[int, Meta(ge=0, le=_ALL_FLAGS)]
    slot: _Natural | None
    first: _Natural
    mask: _Natural | None
    hold: Annotated[int, Meta(ge=0, le=HELD)]


class EditMessage(_Message, frozen=True):
    """A `ResolvedEdit`; `steps` is the index of its instructions."""

    site: str
    layer: _Natural
    steps: _Natural
    where: Where
    source: _Integer


class ProbeMessage(_Message, frozen=True):
    """A `ResolvedProbe`; `steps` is the index of its instructions, null for attention."""

    name: str
    site: str
    layer: _Natural
    steps: _Natural | None
    where: Where
    attention: SlottedPattern | None = None


class PlanMessage(_Message, frozen=True):
    """A `ResolvedPlan` and what its parts share."""

    format: Literal["midstream plan 13"]
    prompt_len: Annotated[int, Meta(ge=1, le=INT_LIMIT)]
    codec: str
    sharded: bool
    vectors: tuple[bytes | NamedVectorMessage | DeviceRowMessage, ...]
    steps: tuple[Annotated[tuple[InstructionMessage, ...], Meta(min_length=1)], ...]
    edits: tuple[EditMessage, ...]
    captures: tuple[ResolvedCapture, ...]
    probes: tuple[ProbeMessage, ...]
    biases: tuple[ResolvedBias, ...]
    functions: tuple[ResolvedFunction, ...] = ()
    followed: tuple[Automaton, ...] = ()


_ENCODER = Encoder()
_DECODER = Decoder(PlanMessage)


def to_bytes(plan: ResolvedPlan, named: Collection[Vector] = ()) -> bytes:
    """Pack a plan; of its vectors in `named`, which the reader has, as digests."""
    shared = _Shared()
    edits = [
        EditMessage(edit.site, edit.layer, shared.place(edit.steps), edit.where, edit.source)
        for edit in plan.edits
    ]
    probes = [
        ProbeMessage(
            probe.name,
            probe.site,
            probe.layer,
            shared.place(probe.steps) if probe.attention is None else None,
            probe.where,
            probe.attention,
        )
        for probe in plan.probes
    ]
    vectors = [_vector_message(vector, named) for vector in shared.vectors]
    message = PlanMessage(
        format="midstream plan 13",
        prompt_len=plan.prompt_len,
        codec=plan.codec,
        sharded=plan.sharded,
        vectors=tuple(vectors),
        steps=tuple(shared.steps),
        edits=tuple(edits),
        captures=plan.captures,
        probes=tuple(probes),
        biases=plan.biases,
        functions=plan.functions,
        followed=plan.followed,
    )
    return _ENCODER.encode(message)


def _vector_message(
    vector: Vector, named: Collection[Vector]
) -> bytes | NamedVectorMessage | DeviceRowMessage:
    if isinstance(vector, DeviceRow):
        place = vector.source, *vector.tap, vector.position
        return DeviceRowMessage(*place, vector.size, vector.is_unit)
    return NamedVectorMessage(vector.digest) if vector in named else vector.data


class _Shared:
    """Vectors and lists of instructions, each distinct one once, in order of first use."""

    def __init__(self) -> None:
        self.vectors: dict[Vector, int] = {}
        self.steps: list[tuple[InstructionMessage, ...]] = []
        self._places: dict[str, int] = {}

    def place(self, steps: Steps) -> int:
        """Return the index of a list of instructions."""
        index = self._places.setdefault(steps.digest, len(self.steps))
        if index == len(self.steps):
            self.steps.append(tuple([self._instruction(step) for step in steps.instructions]))
        return index

    def _instruction(self, step: Instruction) -> InstructionMessage:
        return InstructionMessage(
            op=step.op,
            read=None if step.read is None else self._vector(step.read),
            write=tuple([self._vector(vector) for vector in step.write]),
            a=step.a,
            b=step.b,
            c=step.c,
            d=step.d,
            flags=int(step.flags),
            slot=step.slot,
            first=step.first,
            mask=None if step.mask is None else self._vector(step.mask),
            hold=step.hold,
        )

    def _vector(self, vector: Vector) -> int:
        return self.vectors.setdefault(vector, len(self.vectors))


def from_bytes(data: bytes, known: Mapping[str, Vector] | None = None) -> ResolvedPlan:
    """Read a plan that `to_bytes` packed, with the vectors that it names by digest."""
    if not isinstance(data, bytes):
        raise SpecError("", f"expected `bytes`, got {kind(data)}")
    message = read_message(_DECODER.decode, data)
    vectors = read_each("vectors", message.vectors, partial(_read_vector, known=known or {}))
    steps = read_each("steps", message.steps, partial(_read_steps, vectors=vectors))
    edits = read_each("edits", message.edits, partial(_read_edit, steps=steps))
    read_each("captures", message.captures, _check_capture)
    probes = read_each("probes", message.probes, partial(_read_probe, steps=steps))
    read_each("biases", message.biases, _check_bias)
    read_each("functions", message.functions, _check_function)
    read_each("followed", message.followed, _check_automaton)
    return ResolvedPlan(
        message.prompt_len,
        edits,
        message.captures,
        probes,
        message.codec,
        message.sharded,
        message.biases,
        message.functions,
        message.followed,
    )


def _read_vector(
    message: bytes | NamedVectorMessage | DeviceRowMessage, known: Mapping[str, Vector]
) -> Vector:
    if isinstance(message, bytes):
        return Vector(message)
    if isinstance(message, DeviceRowMessage):
        _check_tap(message.site, message.layer)
        place = message.source, (message.site, message.layer), message.position
        return DeviceRow(*place, message.size, is_unit=message.is_unit)
    vector = known.get(message.digest)
    if vector is None:
        raise SpecError("", f"there is no vector with the digest {message.digest!r} here")
    return vector


def _read_steps(message: tuple[InstructionMessage, ...], vectors: Sequence[Vector]) -> Steps:
    return Steps(tuple([_read_instruction(instruction, vectors) for instruction in message]))


def _read_instruction(message: InstructionMessage, vectors: Sequence[Vector]) -> Instruction:
    return Instruction(
        op=message.op,
        read=None if message.read is None else _choose("vector", message.read, vectors),
        write=tuple([_choose("vector", index, vectors) for index in message.write]),
        a=message.a,
        b=message.b,
        c=message.c,
        d=message.d,
        flags=Flags(message.flags),
        slot=message.slot,
        first=message.first,
        mask=None if message.mask is None else _choose("vector", message.mask, vectors),
        hold=message.hold,
    )


def _read_edit(message: EditMessage, steps: Sequence[Steps]) -> ResolvedEdit:
    _check_tap(message.site, message.layer)
    _check_where(message.where)
    if message.where.last_from is not None:
        raise SpecError("where", "the last row cannot be edited")
    edit_steps = _choose("steps", message.steps, steps)
    return ResolvedEdit(message.site, message.layer, edit_steps, message.where, message.source)


def _read_probe(message: ProbeMessage, steps: Sequence[Steps]) -> ResolvedProbe:
    _check_where(message.where)
    if message.attention is not None:
        with at("attention"):
            return _read_slotted(message, message.attention)
    _check_tap(message.site, message.layer)
    if message.steps is None:
        raise SpecError("steps", "missing")
    probe_steps = _choose("steps", message.steps, steps)
    *before, last = probe_steps.instructions
    ops = {step.op for step in before}
    if last.op not in (Op.PROBE, Op.SCAN) or len(ops) > 1 or ops - {Op.UNIT, Op.PROBE}:
        raise SpecError("steps", "expected PROBEs, one after UNITs, or one SCAN")
    if (Op.UNIT in ops) != (Flags.UNITS in last.flags):
        raise SpecError("steps", "expected UNITs and a PROBE that reads them")
    if last.slot is None:
        raise SpecError("steps", "expected a PROBE or SCAN with a slot")
    if Op.PROBE in ops:
        slots = [step.slot for step in before]
        wanted = list(range(last.slot - len(before), last.slot))
        if last.op is not Op.PROBE or slots != wanted or wanted[0] < 0:
            raise SpecError("steps", "expected PROBEs in slots that follow each other")
    if last.op is Op.SCAN and message.name:
        raise SpecError("name", "expected none: a SCAN is read by gates only")
    return ResolvedProbe(message.name, message.site, message.layer, probe_steps, message.where)


def _read_slotted(message: ProbeMessage, attention: SlottedPattern) -> ResolvedProbe:
    slot, pattern, num_heads = attention
    _check_pattern(pattern, 1)
    _check_int("num_heads", num_heads, max((1, *(head + 1 for head in pattern.heads))))
    for site, layer in pattern.reads:
        _check_tap(site, layer)
    _check_int("slot", slot)
    _check_int("layer", message.layer)
    if pattern.kind not in ("mass", "entropy") or pattern.size != 1 or message.steps is not None:
        raise SpecError("", "expected a mass or an entropy, and no instruction")
    return ResolvedProbe(
        message.name, message.site, message.layer, Steps(()), message.where, attention
    )


def _check_capture(capture: ResolvedCapture) -> None:
    pattern = capture.pattern
    for index, (site, layer) in enumerate(capture.taps if pattern is None else pattern.reads):
        with at(f"taps[{index}]"):
            _check_tap(site, layer)
    if pattern is not None:
        _check_pattern(pattern, len(capture.taps))
    if not capture.taps or len(set(capture.taps)) < len(capture.taps):
        raise SpecError("taps", "expected at least one tap, and each once")
    _check_where(capture.where)
    _check_int("source", capture.source, -INT_LIMIT)


def _check_pattern(pattern: Pattern, taps: int) -> None:
    with at("pattern"):
        if len(pattern.reads) != taps or len(pattern.counts) != taps:
            raise SpecError("", f"expected the queries and heads of {taps} taps")
        # Of these, each token or feature is a range, in the order of the request.
        is_each = pattern.kind in ("lens", "logits_of", "features")
        for ranges in [(key,) for key in pattern.keys] if is_each else [pattern.keys]:
            _check_ranges(ranges)
        if (pattern.encoder is None) == (pattern.kind == "features"):
            raise SpecError("encoder", "expected one of features, and of nothing else")
        if pattern.encoder is not None:
            _check_encoder(pattern.encoder, pattern)
        if pattern.maps and len(pattern.maps) != taps:
            raise SpecError("maps", f"expected the maps of {taps} taps")
        for tap_map in pattern.maps:
            _check_int("maps", tap_map.matrix, -1)
            _check_int("maps", tap_map.bias, -1)
        for number in (pattern.size, *pattern.counts):
            _check_int("size", number, 1)
        for head in pattern.heads:
            _check_int("heads", head)


def _check_encoder(encoder: SaeEncoder, pattern: Pattern) -> None:
    _check_int("encoder", encoder.features, 1)
    for number in (encoder.matrix, encoder.bias, encoder.threshold, encoder.top_k):
        _check_int("encoder", number)
    chosen = len(pattern.keys)
    if (pattern.size - 1 - chosen) % 2 or (pattern.size - 1 - chosen) // 2 > encoder.features:
        raise SpecError("size", "expected at most as many features as the SAE has")
    if any(first >= encoder.features for first, _ in pattern.keys):
        raise SpecError("keys", "expected features of the SAE")


def _check_bias(bias: ResolvedBias) -> None:
    if not bias.tokens or len(bias.tokens) != len(bias.values):
        raise SpecError("", "expected at least one token, and a value for each")
    _check_int("tokens", min(bias.tokens))
    _check_int("tokens", max(bias.tokens))
    if not all(abs(value) <= FLOAT32_MAX for value in bias.values):
        raise SpecError("values", "expected float32 numbers")


def _check_function(function: ResolvedFunction) -> None:
    _check_tap(function.site, function.layer)
    _check_where(function.where)
    if function.where.matches or function.where.last_from is not None:
        raise SpecError("where", "expected positions that do not depend on what is generated")
    if not function.key:
        raise SpecError("key", "missing")


def _check_tap(site: str, layer: int) -> None:
    if site not in _SITES:
        with at("site"):
            read_word(site, NAMES)
    _check_int("layer", layer)


def _check_where(where: Where) -> None:
    with at("where"):
        parts = [where.ranges, *(match.ranges for match in where.matches)]
        for ranges in parts:
            _check_ranges(ranges)
        for index, match in enumerate(where.matches):
            with at(f"matches[{index}]"):
                _check_match(match)
        if where.last_from is not None:
            _check_int("last_from", where.last_from)
        elif not where.ranges and not where.matches:
            raise SpecError("", "nothing is selected")
        if any(intersect(part, other) for part, other in combinations(parts, 2)):
            raise SpecError("", "expected ranges and matches that have no position in common")


def _check_match(match: Match) -> None:
    ids = match.ids
    if match.automaton is not None:
        if not match.ranges or ids or match.others:
            raise SpecError("", "expected at least one range, and no ids beside an automaton")
        with at("automaton"):
            _check_automaton(match.automaton)
        return
    # Without ids every token would match, and without ranges none.
    if not match.ranges or not ids or list(ids) != sorted(set(ids)):
        raise SpecError("", "expected at least one range, and at least one id, ascending")
    _check_int("ids", ids[0])
    _check_int("ids", ids[-1])


def _check_automaton(automaton: Automaton) -> None:
    automaton.check()
    numbers = (automaton.start, *automaton.ids)
    _check_int("", min(numbers))
    _check_int("", max(numbers))


def _check_ranges(ranges: Ranges) -> None:
    if not well_formed(ranges):
        raise SpecError("", "expected ranges that are not empty, sorted, and do not touch")
    if ranges:
        start, stop = ranges[-1]
        _check_int("", start if stop is None else stop)


def _check_int(path: str, value: int, least: int = 0) -> None:
    if not least <= value <= INT_LIMIT:
        raise SpecError(path, f"expected an `int` from {least} to 2**31, got {value}")


def _choose(what: str, index: int, known: Sequence[T]) -> T:
    if index >= len(known):
        raise SpecError("", f"there is no {what} {index}, of {len(known)}")
    return known[index]
