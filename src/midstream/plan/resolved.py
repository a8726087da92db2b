"""`ResolvedPlan`: a request's instructions and captures, at taps and positions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from midstream.ops.layout import Op
from midstream.plan.instructions import Instruction
from midstream.plan.positions.automaton import Automaton
from midstream.plan.positions.position_set import Where
from midstream.plan.positions.ranges import Ranges, clip, merge
from midstream.plan.scores.rule import PLAIN, ScoreRule
from midstream.plan.shape import ModelShape
from midstream.sites import BY_NAME, Tap
from midstream.validation import at

if TYPE_CHECKING:
    from midstream.plan.control.act import Act

# Reductions whose row is made of all selected rows.
REDUCING = ("mean", "max", "moments")
# The kind of rows that stay on the device. Of these, as of "norm", the length is returned.
ON_DEVICE = "device"
LENGTHS = ("norm", ON_DEVICE)

Final = tuple[tuple[int, int], ...]  # bounded ranges [start, stop) of positions
Measured = tuple[int, str, int]  # source, site and layer of an edit
T = TypeVar("T")
_SCORES = ("router", "logits")  # sites of numbers that are compared, whose length means nothing
# Most results that a plan remembers, and most rows of a request whose results it remembers.
_KNOWN, _SHORT = 32, 1024


def path_of(source: int) -> str:
    """Return the path of an edit: server-wide ones come first, and have negative indices."""
    return f"edits[{source}]" if source >= 0 else f"steering[{source}]"


def digest_steps(steps: tuple[Instruction, ...]) -> str:
    """Return the sha256 of the instructions' content, in hex."""
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
            *([] if step.mask is None else [step.mask.digest]),
            *([step.hold] if step.hold else []),
        ]
        for step in steps
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Steps:
    """The instructions of an edit or probe, with the sha256 of their content."""

    instructions: tuple[Instruction, ...]
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", digest_steps(self.instructions))


@dataclass(frozen=True, slots=True)
class ResolvedEdit:
    """One edit at one tap; its last instruction counts. `source` is negative if server-wide."""

    site: str
    layer: int
    steps: Steps
    where: Where
    source: int = 0


PatternKind = Literal[
    "top", "mass", "entropy", "full", "scores", "logits_top", "logits_of", "logits_all", "lens",
    "features", "norm", "device", "mean", "max", "moments",
]  # fmt: skip


class LensMap(NamedTuple):
    """An affine map of the stream: first elements in the workers' memory; −1: none."""

    matrix: int = -1
    bias: int = -1
    adds: bool = False


class SaeEncoder(NamedTuple):
    """The encoder of an SAE in the memory that the workers have for registered weights: float32.

    Attributes:
        matrix: number of the first element of W_enc, [width, features].
        bias, threshold: of what is added to x W_enc, and of what an activation must exceed.
        top_k: number of the largest activations that are kept; 0: all.
        normalize, centered: what is done to x before, see `SAE`; whether its mean is subtracted.
    """

    matrix: int
    features: int
    bias: int
    threshold: int
    top_k: int = 0
    normalize: str = "none"
    centered: bool = False


@dataclass(frozen=True, slots=True)
class Pattern:
    """What rows are made of vectors without being these: numbers of 4 bytes.

    Attributes:
        size: numbers of a head: of `top`, k positions as int32 and then k weights; of `full` and
            `scores`, those of so many keys; else 1. Of logits, all numbers: of `logits_top`, k
            token ids as int32 and k logits; the last is ln Σ exp(logit). Of `lens`, k ids and k
            logits, the logits of the tokens, their ranks as int32, and the same last. Of
            `features`, k ids as int32 and k activations, those of the chosen features, and the
            number of active ones as int32. Of reduced rows, of one part: the number of rows as
            int32 and the components; of `moments` the means and then the variances.
        keys: of `mass`, the positions of the keys; of `logits_of`, `lens` and `features`, each
            token or feature by itself, in the order of the request.
        heads: the query heads that are computed, ascending; empty: all.
        reads: for each tap of the capture, the tap whose vectors are read.
        counts: for each of these, the number of heads that are computed, over all ranks; of
            reduced rows, the number of parts in which the ranks have a row.
        maps: of a lens that was registered, the map of each of these; else empty.
    """

    kind: PatternKind
    size: int
    keys: Ranges
    heads: tuple[int, ...]
    reads: tuple[Tap, ...]
    counts: tuple[int, ...]
    maps: tuple[LensMap, ...] = ()
    encoder: SaeEncoder | None = None

    @property
    def of_logits(self) -> bool:
        """Whether the rows are those of a `Logits` or a `Lens`."""
        return self.kind == "lens" or self.kind.startswith("logits")

    @property
    def reduces(self) -> bool:
        """Whether a row is made of all selected rows."""
        return self.kind in REDUCING

    def width(self, place: int) -> int:
        """Return the numbers of a row of one tap, by its index in the capture."""
        return self.counts[place] * self.size


class SlottedPattern(NamedTuple):
    """Attention of one tap, a number a head, whose mean is the score in a column of its own."""

    slot: int
    pattern: Pattern
    num_heads: int


@dataclass(frozen=True, slots=True)
class ResolvedProbe:
    """The numbers of one probe at one tap. Workers do not have what follows `attention`.

    Attributes:
        name: key of the score in the output; empty: only gates read the score.
        site, layer: the tap; of attention the site "attention", which is no tap of the engine.
        steps: a PROBE instruction for each number, in slots that follow each other; or one after
            UNITs, or for gates with memory a SCAN; none for attention. Slots are unique in the
            plan, but for the parts of one score, which is the sum of what they read at one tap
            each.
        attention: what is read after the forward pass; None: see `steps`.
        rule: how scores are made of the numbers.
        outputs: names of the classes of a score; empty: they have none, or it is one number.
        source: index of the plan's probe; negative: of the server-wide edits and probes.
        part_of: of a score of several layers, the name of the probe that reads its last part; else
            empty.
    """

    name: str
    site: str
    layer: int
    steps: Steps
    where: Where
    attention: SlottedPattern | None = None
    act: Act | None = field(default=None, compare=False)  # its `output` is an index
    rule: ScoreRule = field(default=PLAIN, compare=False)
    outputs: tuple[str, ...] = field(default=(), compare=False)
    source: int = field(default=0, compare=False)
    part_of: str = field(default="", compare=False)

    @property
    def act_rule(self) -> ScoreRule:
        """How the scores are made that its act reads: one number for each token."""
        output = None if self.act is None else self.act.output
        assert not isinstance(output, str), "names are resolved"
        return replace(self.rule, output=output)

    @property
    def slots(self) -> range:
        """Columns of its numbers."""
        return range(self.slot + 1 - self.rule.columns, self.slot + 1)

    @property
    def slot(self) -> int:
        """The last column of its numbers."""
        if self.attention is not None:
            return self.attention.slot
        slot = self.steps.instructions[-1].slot
        assert slot is not None
        return slot

    @property
    def is_scan(self) -> bool:
        """Whether the score of a token depends on the tokens before it."""
        return any(step.op is Op.SCAN for step in self.steps.instructions)

    @property
    def tap(self) -> Tap:
        """The engine's tap whose vectors are read."""
        return (
            (self.site, self.layer) if self.attention is None else self.attention.pattern.reads[0]
        )


@dataclass(frozen=True, slots=True)
class ResolvedCapture:
    """One capture: its taps and positions.

    Attributes:
        taps: in the order of a forward pass. With a `pattern`, none of the engine's: the site is
            the kind of read-out, or the reduction and the site, as `mean.resid_post`.
        source: index of the plan's capture; negative: of the server-wide ones, whose last is −1.
        pattern: what rows are made of; None: the vectors themselves.
        selected: with `max_rows`, all selected positions, for the receipt. Workers do not have it.
    """

    taps: tuple[Tap, ...]
    where: Where
    source: int = 0
    pattern: Pattern | None = None
    selected: Where | None = field(default=None, compare=False)

    @property
    def kind(self) -> str:
        """What its taps are called: the first part of their site."""
        return self.taps[0][0].partition(".")[0]

    @property
    def returned(self) -> Ranges:
        """Every position of which a row may be returned; of reduced rows, the last selected."""
        if self.pattern is None or not self.pattern.reduces:
            return self.where.possible
        stop = self.where.ranges[-1][1]
        assert stop is not None
        return ((stop - 1, stop),)

    def of_all_heads(self, shape: ModelShape) -> ResolvedCapture:
        """Return the capture with rows of attention of all heads."""
        pattern = self.pattern
        if pattern is None or not pattern.heads:
            return self
        counts = tuple(shape.num_heads(tap) for tap in pattern.reads)
        return replace(self, pattern=replace(pattern, heads=(), counts=counts))


def limited(capture: ResolvedCapture, most: int | None) -> ResolvedCapture:
    """Return a capture of the first `most` of its positions; None: of all."""
    if most is None:
        return capture
    with at("max_rows"):
        return replace(capture, where=capture.where.first(most), selected=capture.where)


@dataclass(frozen=True, slots=True)
class ResolvedBias:
    """What one bias adds to logits; the nth of a plan has the nth switch of a token."""

    tokens: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ResolvedFunction:
    """One `Local` at one tap, beside its edit, which counts the tokens."""

    site: str
    layer: int
    key: str
    path: str
    name: str
    where: Where
    source: int


class Alike(NamedTuple):
    """Taps that are selected by the same captures, by index; in the order of a forward pass."""

    captures: tuple[int, ...]
    taps: tuple[Tap, ...]


@dataclass(frozen=True, slots=True)
class ResolvedPlan:
    """A plan for one model and one prompt.

    In the methods, `length` is the number of rows of the request, P + G − 1 when it has ended,
    and `tokens` the token id of each row (only those of generated tokens are read).

    Attributes:
        prompt_len: P, in tokens.
        edits: edits of one token at one tap apply in this order.
        captures: where captures overlap, a row is captured once.
        probes: each reads the vector after the edits at its tap.
        sharded: whether all ranks of a tensor-parallel group transfer captured vectors; otherwise
            the first rank transfers all.
        functions: Python functions that the worker calls, before the edits at the same tap.
        followed: automata that read the tokens for other versions of the plan.
        taps: all captured taps, in the order of a forward pass.
        pattern_widths: numbers of a row of each tap of a capture with a pattern.
        reduced: taps whose row is made of all selected rows.
        alike: `taps` grouped by the captures that select them; taps of a group have equal rows.
        reads_tokens: whether some positions are selected by generated tokens.
        measured: the edits whose doses are measured, by (source, site, layer), and their columns.
        automata: `followed`, and those that select tokens to edit, by their bits; run by workers.
    """

    prompt_len: int
    edits: tuple[ResolvedEdit, ...]
    captures: tuple[ResolvedCapture, ...]
    probes: tuple[ResolvedProbe, ...] = ()
    codec: str = "raw"
    sharded: bool = False
    biases: tuple[ResolvedBias, ...] = ()
    functions: tuple[ResolvedFunction, ...] = ()
    followed: tuple[Automaton, ...] = ()
    # Computed once, because many requests share a plan.
    taps: tuple[Tap, ...] = field(init=False, compare=False, repr=False)
    pattern_widths: dict[Tap, int] = field(init=False, compare=False, repr=False)
    reduced: frozenset[Tap] = field(init=False, compare=False, repr=False)
    ops: frozenset[Op] = field(init=False, compare=False, repr=False)
    alike: tuple[Alike, ...] = field(init=False, compare=False, repr=False)
    reads_tokens: bool = field(init=False, compare=False, repr=False)
    measured: dict[Measured, int] = field(init=False, compare=False, repr=False)
    automata: tuple[Automaton, ...] = field(init=False, compare=False, repr=False)
    _known: dict[Hashable, Any] = field(init=False, compare=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        captures_of: dict[Tap, list[int]] = {}
        for index, capture in enumerate(self.captures):
            for tap in capture.taps:
                captures_of.setdefault(tap, []).append(index)
        taps = tuple(sorted(captures_of, key=_order))
        widths: dict[Tap, int] = {}
        reduced: list[Tap] = []
        for capture in self.captures:
            if capture.pattern is not None:
                for place, tap in enumerate(capture.taps):
                    widths[tap] = capture.pattern.width(place)
                reduced += capture.taps if capture.pattern.reduces else ()
        alike: dict[tuple[int, ...], list[Tap]] = {}
        for tap in taps:
            alike.setdefault(tuple(captures_of[tap]), []).append(tap)
        selections = [edit.where for edit in self.edits]
        selections += [capture.where for capture in self.captures]
        selections += [probe.where for probe in self.probes]
        edited = [edit.where for edit in self.edits]
        edited += [probe.where for probe in self.probes if probe.is_scan]
        automata = [automaton for where in edited for automaton in where.automata]
        for name, value in {
            "taps": taps,
            "pattern_widths": widths,
            "reduced": frozenset(reduced),
            "ops": frozenset(step.op for edit in self.edits for step in edit.steps.instructions),
            "alike": tuple(Alike(captures, tuple(same)) for captures, same in alike.items()),
            "reads_tokens": any(where.matches for where in selections),
            "measured": _measured(self.edits, self.functions),
            "automata": tuple(dict.fromkeys((*self.followed, *automata))),
        }.items():
            object.__setattr__(self, name, value)

    @property
    def read_taps(self) -> tuple[Tap, ...]:
        """All taps of the engine whose vectors are copied into the staging ring, each once."""
        taps = dict.fromkeys(tap for tap in self.taps if tap not in self.pattern_widths)
        for capture in self.captures:
            if capture.pattern is not None:
                taps.update(dict.fromkeys(capture.pattern.reads))
        taps.update(dict.fromkeys(probe.tap for probe in self.probes if probe.attention))
        return tuple(taps)

    def remember(self, what: Hashable, length: int, make: Callable[[], T]) -> T:
        """Return what the plan and the number of rows determine; made once for short requests."""
        if self.reads_tokens or length > _SHORT:
            return make()
        key = (what, length)
        try:
            value: T = self._known[key]
        except KeyError:
            value = make()
            if len(self._known) >= _KNOWN:
                self._known.clear()
            self._known[key] = value
        return value

    def only(self, captures: tuple[int, ...]) -> ResolvedPlan:
        """Return the plan with these of its captures alone, by index."""
        return replace(self, captures=tuple(self.captures[index] for index in captures))

    def ranges_of(self, captures: tuple[int, ...], length: int, tokens: Sequence[int]) -> Final:
        """Return the positions selected by any of these captures."""

        def make() -> Final:
            finals = [self.captures[index].where.final(length, tokens) for index in captures]
            return clip(merge([span for final in finals for span in final]), length)

        return self.remember(("ranges", captures), length, make)

    def expected_rows(self, length: int, tokens: Sequence[int]) -> dict[Tap, int]:
        """Return the number of captured rows of each tap; of reduced ones, before."""

        def make() -> dict[Tap, int]:
            counts = dict.fromkeys(self.taps, 0)
            for captures, taps in self.alike:
                ranges = self.ranges_of(captures, length, tokens)
                counts.update(dict.fromkeys(taps, sum(stop - start for start, stop in ranges)))
            return counts

        return dict(self.remember("rows", length, make))

    @property
    def slots(self) -> int:
        """Number of score columns that the plan needs per token."""
        steps = [step for edit in self.edits for step in edit.steps.instructions]
        slots = [step.slot for step in steps if step.slot is not None]
        return 1 + max([*slots, *(probe.slot for probe in self.probes)], default=-1)


def _measured(
    edits: Sequence[ResolvedEdit], functions: Sequence[ResolvedFunction]
) -> dict[Measured, int]:
    """Return the column of the dose of each edit of a vector of the model, but for functions."""
    called = {(function.source, function.site, function.layer) for function in functions}
    keys = dict.fromkeys(
        (edit.source, edit.site, edit.layer)
        for edit in edits
        if edit.site not in _SCORES and edit.steps.instructions[-1].op < Op.GATE
    )
    return {key: column for column, key in enumerate(key for key in keys if key not in called)}


def _order(tap: Tap) -> tuple[int, int, str]:
    """Return the sort key of a tap: the order of a forward pass, attention before `z`."""
    site = BY_NAME.get(tap[0], BY_NAME["z"])
    return tap[1], site.order, tap[0]
