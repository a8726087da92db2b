"""One request for each operation at each site, with the expected results."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from midstream import (
    Ablate,
    Affine,
    Capture,
    Clamp,
    Feature,
    Gate,
    LoReFT,
    Probe,
    Replace,
    Scale,
    Steer,
)
from support.engines import generated, greedy, tokens
from support.oracle_edits import BRANCHES, EVERY_SITE, At, EditOracle, Seen, Tap, row_error

MAX_TOKENS = 4
# Below this an edit would be lost in what the comparison allows for; most are far above.
LEAST_EFFECT = 4e-3


@dataclass(frozen=True)
class Case:
    """One request: a prompt, edits, and probes on the way."""

    name: str
    prompt: list[int]
    edits: list[At]
    probes: list[Probe] = field(default_factory=list)
    tap: Tap | None = None  # that of the edits, which must move it; None: nothing is said of that
    partial: bool = False  # whether they must leave some tokens alone there, and not all


class Maker:
    """Edits of one tap that do something to what is there, sized by a plain run."""

    def __init__(self, tap: Tap, plain: Seen, draw: torch.Generator) -> None:
        self.site, self.layer = tap
        self.plain = plain
        self.draw = draw
        self.h = plain.values[tap]
        self.size = float(self.h.norm(dim=-1).median())
        self.place = {"layer": self.layer, "site": self.site}
        self.where = f"{self.site} of layer {self.layer}"
        self.takes_maps = True  # whether they fit its vectors

    def leaves_some(self, edit: Any) -> bool:
        """Whether an edit that depends on what is there leaves some tokens alone altogether."""
        return True

    def vector(self, size: float = 1.0) -> Tensor:
        """Of a random direction, and of the length of what is there."""
        v = torch.randn(self.h.shape[1], generator=self.draw)
        return v * (size * self.size / v.norm())

    def direction(self, tap: Tap | None = None, length: float = 1.0) -> Tensor:
        """Half random, half along what is there, so that products with it are not small."""
        rows = self.h if tap is None else self.plain.values[tap]
        own = rows[int(torch.randint(1, len(rows), (1,), generator=self.draw))]
        v = torch.randn(own.shape[0], generator=self.draw)
        both = own / own.norm() + v / v.norm()
        return both * (length / both.norm())

    def scores(self, direction: Tensor, tap: Tap | None = None) -> Tensor:
        """⟨h, direction⟩ of the prompt's tokens, ascending."""
        rows = self.h if tap is None else self.plain.values[tap]
        return (rows.double() @ direction.double()).sort().values

    def middle(self, direction: Tensor, tap: Tap | None = None) -> float:
        """A threshold that about half of the tokens are past, far from each of them."""
        scores = self.scores(direction, tap)
        third = len(scores) // 3
        gaps = scores.diff()[third : len(scores) - third]
        nth = third + int(gaps.argmax())
        return float(scores[nth] + scores[nth + 1]) / 2

    def gate(self, edit: Any, tap: Tap | None = None, soft: bool = False) -> Gate:
        """The edit behind a gate that is open for about half of the tokens."""
        direction = self.direction(tap)
        bias = 0.25 * self.size
        probe: dict[str, Any] = {"direction": direction, "bias": bias}
        if tap is not None:
            probe |= {"site": tap[0], "layer": tap[1]}
        threshold = self.middle(direction, tap) + bias
        scores = self.scores(direction, tap)
        spread = float(scores[len(scores) * 3 // 4] - scores[len(scores) // 4])
        return Gate(edit, probe, threshold, 3.0 / spread if soft else None)

    def steer(self) -> Steer:
        return Steer(self.vector(), scale=0.8, **self.place)

    def feature(self, mode: str, value: float | None, jump: bool) -> Feature:
        """Active at about half of the tokens; with a jump, from well above 0."""
        encoder = self.direction()
        threshold = 0.5 * self.size if jump else 0.0
        return Feature(
            encoder,
            self.direction() * (1 if mode in ("set", "add") else 0.7),
            mode=mode,
            value=value,
            bias=threshold - self.middle(encoder),
            threshold=threshold,
            **self.place,
        )

    def orthonormal(self, rank: int) -> Tensor:
        rows = torch.stack([self.direction() for _ in range(rank)])
        return torch.linalg.qr(rows.double().T).Q.T.contiguous().float()

    def probes(self) -> list[Probe]:
        """One of the tap, and one of the stream at the end of the model."""
        end = torch.randn(self.plain.values["resid_post", 0].shape[1], generator=self.draw)
        return [
            Probe(self.direction(), bias=0.5, name="here", **self.place),
            Probe(end, -1, name="end", positions="generated"),
        ]

    # -- the operations, by name ---------------------------------------------------------------

    def plain_edits(self, phase: str) -> Iterator[tuple[str, Any]]:
        """Those that do something to every token, at tokens of the phase."""
        at: dict[str, Any] = {**self.place, "phase": None if phase == "all" else phase}
        yield "steer", Steer(self.vector(), scale=0.8, **at)
        yield "steer match", Steer(self.vector(3.0), scale=-0.7, norm="match", **at)
        yield "steer keep", Steer(self.vector(), scale=1.2, norm="keep", **at)
        yield "ablate", Ablate(self.direction(length=3.0), **at)
        yield "ablate keep", Ablate(self.direction(length=3.0), norm="keep", **at)
        clamped = self.direction(length=2.0)
        yield "clamp keep", Clamp(clamped, value=0.9 * self.size, norm="keep", **at)
        yield "replace keep, in part", Replace(self.vector(), alpha=0.6, norm="keep", **at)
        three = [self.direction(length=size) for size in (0.5, 1.0, 4.0)]
        yield "ablate a subspace", Ablate(three, **at)
        yield "ablate with a strength", Ablate(three[:2], strength=1.7, **at)
        yield "clamp to a value", Clamp(self.direction(length=2.0), value=0.9 * self.size, **at)
        rows = torch.stack([self.direction() for _ in range(3)])
        yield (
            "affine",
            Affine(rows, 0.5 * rows.flip(0), bias=[0.1 * self.size, 0.0, -0.2], scale=0.6, **at),
        )
        bias = [0.3 * self.size, -0.2 * self.size]
        weight = torch.stack([self.direction(), self.direction()])
        yield "loreft", LoReFT(self.orthonormal(2), weight, bias, **at)
        yield "loreft keep", LoReFT(self.orthonormal(2), weight, bias, norm="keep", **at)
        yield "replace all by one row, in part", Replace(self.vector(), alpha=0.6, **at)
        yield "scale", Scale(1.5, **at)
        each = 1 + 0.5 * torch.randn(self.h.shape[1], generator=self.draw)
        yield "scale by components and shift", Scale(each, shift=self.vector(0.5), **at)
        yield "scale to nothing", Scale(0.0 if self.site in BRANCHES else -0.5, **at)
        yield "feature add", self.feature("add", 0.7 * self.size, False).replace(**at)

    def maps(self, phase: str, earlier: Sequence[Tap]) -> Iterator[tuple[str, Any, bool]]:
        """Affine maps by a matrix, which come first at their site, and whether they leave some
        tokens alone.
        """
        at: dict[str, Any] = {**self.place, "phase": None if phase == "all" else phase}
        width = self.h.shape[1]
        matrices = [
            (0.5 * torch.eye(width) + 0.4 * torch.randn(width, width, generator=self.draw))
            / (1 if nth == 1 else width**0.5)
            for nth in range(3)
        ]
        yield "a matrix", Affine(matrix=matrices[0], bias=self.vector(0.5), **at), False
        yield "a matrix in part", Affine(matrix=matrices[2], bias=0.1, scale=0.4, **at), False
        kept = Affine(matrix=matrices[1], norm="keep", **self.place)
        yield "gate around a matrix that keeps", self.gate(kept), True
        for tap in earlier[-1:]:
            mapped = Affine(matrix=matrices[0], **self.place)
            yield f"a matrix behind a gate on {tap}", self.gate(mapped, tap, soft=True), False

    def conditional_edits(self, earlier: Sequence[Tap]) -> Iterator[tuple[str, Any, bool]]:
        """Those that depend on what is there, and whether they leave some tokens alone."""
        direction = self.direction(length=0.5)
        unit = direction / direction.norm()
        scores = self.scores(unit)
        low, high = float(scores[len(scores) // 4]), float(scores[len(scores) * 2 // 3])
        middle = self.middle(unit)
        half = Clamp(direction, low=middle + 0.5 * self.size, strength=0.5, **self.place)
        yield "clamp to a range", Clamp(direction, low=low, high=high, **self.place), True
        yield "clamp from below, in part", half, False
        yield "clamp from above", Clamp(direction, high=middle, **self.place), True
        for jump in (False, True):
            kind = "JumpReLU" if jump else "ReLU"
            yield f"feature set, {kind}", self.feature("set", 1.5 * self.size, jump), False
            yield f"feature scale, {kind}", self.feature("scale", 3.0, jump), True
            yield f"feature ablate, {kind}", self.feature("ablate", None, jump), True
        keep = Steer(self.vector(), norm="keep", **self.place)
        yield "gate, step", self.gate(self.steer()), True
        yield "gate, sigmoid", self.gate(self.steer(), soft=True), False
        yield "gate around scale", self.gate(Scale(1.7, **self.place)), True
        ablate = Ablate(self.direction(), **self.place)
        each = torch.randn(self.h.shape[1], generator=self.draw)
        yield "gate around components", self.gate(Scale(-each, **self.place), soft=True), False
        yield "gate around ablate", self.gate(ablate, soft=True), False
        yield "gate around keep", self.gate(keep, soft=True), False
        yield "gate around replace", self.gate(Replace(self.vector(), **self.place)), True
        for nth, tap in enumerate(earlier):
            edit = (
                self.steer(),
                Ablate([self.direction(), self.direction()], **self.place),
                Replace(self.vector(), alpha=0.7, **self.place),
            )[(nth + self.layer) % 3]
            for soft in (False, True):
                name = f"gate on {tap[0]} of layer {tap[1]}, {'sigmoid' if soft else 'step'}"
                yield name, self.gate(edit, tap, soft), not soft

    def remembering(self, earlier: Sequence[Tap]) -> Iterator[tuple[str, Any]]:
        """Gates with memory, that read where the edit is or at an earlier tap."""
        for nth, tap in enumerate([None, *earlier][:3]):
            step, soft = self.gate(self.steer(), tap), self.gate(self.steer(), tap, soft=True)
            low = step.threshold - 0.2 * self.size
            memory: dict[str, Any] = (
                {"hold": 3, "smooth": 0.6}, {"hold": "rest"}, {"release": low, "smooth": 0.3}
            )[nth]  # fmt: skip
            yield f"gate that remembers, reading {tap}", replace(step, **memory)
            yield f"gate that smooths, reading {tap}", replace(soft, smooth=0.4)

    def placed_edits(self, prompt_len: int) -> Iterator[tuple[str, Any, list[int]]]:
        """Those whose positions are listed, with these positions."""
        some = [1, prompt_len - 1, prompt_len + 1]
        row = Replace(self.vector(), positions=[1, -1, prompt_len + 1], **self.place)
        yield "replace by one row", row, some
        rows = torch.stack([self.vector() for _ in range(4)])
        span = [2, 3, 4, 5]
        yield "replace a span", Replace(rows, positions=slice(2, 6), **self.place), span
        over: dict[str, Any] = {"rows": rows, "positions": slice(2, 6), **self.place}
        yield "steer by a row each", Steer(scale=0.8, **over), span
        yield "steer match by a row each", Steer(scale=-0.7, norm="match", **over), span
        yield "steer keep by a row each", Steer(scale=1.2, norm="keep", **over), span
        far = [0, 2, 3, prompt_len]
        yield "replace apart, in part", Replace(rows, alpha=0.8, positions=far, **self.place), far


class Made(NamedTuple):
    """A case as it was made; its probes are made only if it is chosen."""

    maker: Maker  # of the probes
    name: str
    prompt: list[int]
    at: At
    partial: bool = False

    def case(self) -> Case:
        """Return the case."""
        tap = self.maker.site, self.maker.layer
        return Case(self.name, self.prompt, [self.at], self.maker.probes(), tap, self.partial)


AnyCase = TypeVar("AnyCase", Case, Made)


def earlier_taps(tap: Tap) -> list[Tap]:
    """An earlier site of the same layer, and sites of layers before."""
    site, layer = tap
    order = EVERY_SITE.index(site)
    found = [(EVERY_SITE[order // 2], layer)] if order else []
    if layer:
        found += [(EVERY_SITE[(order + 2) % len(EVERY_SITE)], layer - 1), (site, 0)]
    return list(dict.fromkeys(found))


def cases(
    oracle: EditOracle, prompts: Sequence[list[int]], taps: Sequence[Tap], every: int = 1
) -> list[Case]:
    """Each operation at each tap; of all these every so-and-so-many-th."""
    draw = torch.Generator().manual_seed(17)
    plain = [oracle.run(prompt) for prompt in prompts]
    found: list[Made] = []
    for number, tap in enumerate(taps):
        for nth, (prompt, seen) in enumerate(zip(prompts, plain, strict=True)):
            phase = ("all", "prompt", "generated")[(number + nth) % 3]
            mine = of_one_tap(Maker(tap, seen, draw), prompt, phase, earlier_taps(tap))
            # The prompts share the operations out among themselves.
            found += list(mine)[nth :: len(prompts)]
    return [made.case() for made in found[::every]]


def of_each_kind(made: Sequence[AnyCase], every: int) -> list[AnyCase]:
    """Return of each kind of operation one case of so many, at least one, in turn at each tap."""
    kinds: dict[str, list[AnyCase]] = {}
    for one in made:
        kinds.setdefault(one.name.split(" at ")[0], []).append(one)
    return [
        one
        for number, of_kind in enumerate(kinds.values())
        for one in of_kind[number % min(every, len(of_kind)) :: every]
    ]


def of_one_tap(
    maker: Maker, prompt: list[int], phase: str, before: Sequence[Tap]
) -> Iterator[Made]:
    """Each operation of a maker; those with gates on other taps read the taps `before`."""
    size = len(prompt)
    wheres: dict[str, Callable[[int], bool]] = {
        "all": lambda position: True,
        "prompt": lambda position: position < size,
        "generated": lambda position: position >= size,
    }

    def case(name: str, at: At, partial: bool = False) -> Made:
        partial = partial and maker.leaves_some(at.edit)
        return Made(maker, f"{name} at {maker.where}", prompt, at, partial)

    for name, edit in maker.plain_edits(phase):
        yield case(f"{name} ({phase})", At(edit, wheres[phase]))
    for name, edit, partial in maker.conditional_edits(before):
        yield case(name, At(edit), partial)
    for name, edit, places in maker.placed_edits(size):
        yield case(name, At(edit, frozenset(places).__contains__))
    for name, edit, partial in maker.maps(phase, before) if maker.takes_maps else ():
        where = At(edit) if isinstance(edit, Gate) else At(edit, wheres[phase])
        yield case(name, where, partial)


def ask(
    llm: Any,
    given: Sequence[Case],
    *,
    layers: Any = "all",
    count: int = MAX_TOKENS,
    captured: Callable[[Case], Any] | None = None,
) -> list[Any]:
    """All the cases as one batch, with captures of all sites, or those that `captured` returns."""
    last = llm.info.shape.num_layers - 1

    def every_site(case: Case) -> Capture:
        own = sorted({last} if case.tap is None else {case.tap[1], last})
        return Capture(layers or own, EVERY_SITE)

    return llm.generate(
        [tokens(case.prompt) for case in given],
        greedy(count, logprobs=3, detokenize=False),
        capture=[(captured or every_site)(case) for case in given],
        edits=[[at.edit for at in case.edits] or None for case in given],
        probes=[case.probes or None for case in given],
        use_tqdm=False,
    )


def problems(
    oracle: EditOracle, case: Case, output: Any, tolerance: float, tie: float
) -> list[str]:
    """In what a request's results differ from the reference's."""
    prompt, chosen = case.prompt, generated(output)
    ids = [*prompt, *chosen][:-1]
    seen = oracle.run(ids, case.edits)
    found = []
    for tap, value in output.activations.items():
        error = row_error(value.reshape(len(value), -1), seen.values[tap])
        if not error <= tolerance:
            found.append(f"{tap}: {error:.2e}")
    found += _logprob_problems(seen, output, len(prompt), tie)
    for probe in case.probes:
        where = output.probes.positions_of(probe.name)
        expected = torch.from_numpy(oracle.scores(probe, seen))[where]
        error = float((output.probes[probe.name] - expected).abs().max())
        if not error <= tolerance * (float(expected.abs().max()) + 1.0):
            found.append(f"probe {probe.name}: {error:.2e}")
    found += _count_problems(oracle, case, output, len(ids))
    if case.tap is not None:
        effect, touched = seen.effect(case.tap), seen.touched(case.tap)
        if effect < LEAST_EFFECT:
            found.append(f"the case is too weak: {effect:.2e}")
        if case.partial and not 0 < touched < len(ids):
            found.append(f"the case is not partial: {touched} of {len(ids)} rows")
    return [f"{case.name}: {each}" for each in found]


def _logprob_problems(seen: Seen, output: Any, prompt_len: int, tie: float) -> list[str]:
    found = []
    chosen = generated(output)
    expected = seen.logits[prompt_len - 1 :].log_softmax(dim=-1)
    for nth, (row, step) in enumerate(zip(expected, output.outputs[0].logprobs, strict=True)):
        if not float(row.max() - row[chosen[nth]]) <= tie:
            found.append(f"token {nth} is not the most likely")
        for token, told in step.items():
            if not abs(told.logprob - float(row[token])) <= tie:
                found.append(f"token {nth}: {told.logprob} for {token}, expected {row[token]}")
    return found


def _count_problems(oracle: EditOracle, case: Case, output: Any, length: int) -> list[str]:
    """The receipt says what was selected, and that as much was done."""
    found = list(output.receipt.problems)
    expected = 0
    told = {one.what: one.positions for one in output.receipt.selected}
    for nth, at in enumerate(case.edits):
        chosen = [position for position in range(length) if at.where(position)]
        expected += len(chosen) * len(oracle.taps(at.edit))
        ranges = told[f"edits[{nth}]"]
        if chosen != [position for start, stop in ranges for position in range(start, stop)]:
            found.append(f"edits[{nth}] is said to be at {ranges}, expected {chosen}")
    edited = output.receipt.edited
    if case.edits and not edited.applied == edited.expected == expected:
        found.append(f"{edited}, expected {expected}")
    return found


def all_problems(
    llm: Any,
    oracle: EditOracle,
    given: Sequence[Case],
    tolerance: float,
    tie: float,
    **how: Any,
) -> list[str]:
    """Asks the cases in one batch, and says in what they differ from the reference."""
    return [
        problem
        for case, output in zip(given, ask(llm, given, **how), strict=True)
        for problem in problems(oracle, case, output, tolerance, tie)
    ]
