"""Random requests with random plans, drawn from a seed and from earlier outputs."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from midstream import Capture
from midstream.plan import Plan
from support.adversary_edits import Catalogue, placed, vector_of
from support.adversary_where import Place, Places

NAMES = ("amber", "blue", "coral")
LATE = 40
PHASES = {"base": None, "prompt": "prompt", "generated": "generated"}


@dataclass(frozen=True)
class Shape:
    """What a mix may look like."""

    families: tuple[tuple[int, ...], ...]  # token sequences whose beginnings many prompts share
    longest: int  # most rows of a request
    chunk: int  # most tokens of a step; some prompts are longer
    stops: tuple[str, ...] = ()  # texts that may end a generation; none: there is no tokenizer
    most_tokens: int = 14  # most tokens generated, but for a few that get twice as many
    sampled: bool = True  # whether some requests sample, with a seed


@dataclass(frozen=True)
class Ask:
    """One request."""

    number: int  # which of the mix
    at: int  # the tick at which it comes
    prompt: list[int]  # token ids
    params: dict[str, Any]  # of SamplingParams, but for the plan
    plan: dict[str, Any] | None  # what it asks for, as JSON; None: nothing
    server: dict[str, Any]  # edits of every request at that time, as JSON, by tier
    names: dict[str, list[float]]  # vectors registered at that time, by name
    alone: dict[str, Any] | None  # plan and server-wide edits by value, as one plan; None: nothing
    abort_at: int | None = None  # the tick at which it is given up; None: never
    # Edits by value, in the order in which they apply, and where they do; for hooks.
    parts: tuple[tuple[Any, Place], ...] = field(default=(), compare=False)
    # The places of captures: what the cache serves has scores, and no rows.
    reads: tuple[Place, ...] = field(default=(), compare=False)
    probes: tuple[Any, ...] = field(default=(), compare=False)

    @property
    def name(self) -> str:
        """Its id at the engine."""
        return f"mix-{self.number}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, enough to ask the same again."""
        left = ("parts", "reads", "probes")
        return {key: value for key, value in vars(self).items() if key not in left}

    @staticmethod
    def parse(value: dict[str, Any]) -> Ask:
        """What `to_dict` gave."""
        return Ask(**value)

    def __str__(self) -> str:
        plan = json.dumps(self.plan, default=str)
        return (
            f"request {self.number}: prompt of {len(self.prompt)} tokens {_short(self.prompt)}, "
            f"{self.params}, at tick {self.at}; "
            f"server-wide: {', '.join(self.server) or 'nothing'}; plan: {plan[:1500]}"
        )


@dataclass(frozen=True)
class Past:
    """A request that has ended: its prompt and what was generated."""

    prompt: list[int]
    generated: list[int]


@dataclass(frozen=True)
class Rival:
    """A prompt and edits of it, against which others are set that differ in little."""

    prompt: list[int]
    max_tokens: int
    edits: list[tuple[Any, Place]]
    probes: list[tuple[Any, Place]]


class Mix:
    """Draws the requests of one mix, one after the other."""

    def __init__(self, seed: int, count: int, shape: Shape, catalogue: Catalogue) -> None:
        self.seed = seed
        self.count = count
        self.shape = shape
        self.catalogue = catalogue
        self.drawn = 0
        self._draw = random.Random(f"mix {seed}")
        self._server: list[tuple[str, Any]] = []
        self._names: dict[str, Any] = {}
        self._written: list[tuple[Any, Place]] = []
        self._lately: list[Rival] = []
        self._scored: list[Rival] = []  # with probes; some come again, for their kept scores
        self._steers = [edit for edit in catalogue.edits if vector_of(edit) is not None][:8]

    def coming(self, tick: int, past: Sequence[Past], open_: int) -> list[Ask]:
        """The requests that come now, given those that have ended and how many have not."""
        # Crowded times, in which blocks are taken from others, and quiet ones, in which they stay.
        most = 14 if tick // 50 % 2 else 3
        if self.drawn == self.count or open_ > most:
            return []
        burst = min(self._draw.choice((0, 0, 1, 1, 2, most // 2)), self.count - self.drawn)
        if not open_:
            burst = max(1, burst)
        return [self._next(tick, past) for _ in range(burst)]

    # -- one request --------------------------------------------------------------------------

    def _next(self, tick: int, past: Sequence[Past]) -> Ask:
        number, self.drawn = self.drawn, self.drawn + 1
        draw = random.Random(f"{self.seed} {number}")
        self._change_server(draw)
        rival = draw.choice(self._lately[-4:]) if self._lately and draw.random() < 0.2 else None
        again = self._scored and draw.random() < 0.1
        if again:
            rival = draw.choice(self._scored[-3:])
        prompt = self._prompt(draw, past) if rival is None else rival.prompt
        params = self._params(draw, len(prompt))
        if rival is not None:
            params["max_tokens"] = rival.max_tokens
        places = Places(draw, prompt, params["max_tokens"])
        edits, captures, probes = self._asked(draw, places)
        if again and rival is not None:
            edits, captures, probes = rival.edits, [], rival.probes
        elif rival is not None:
            edits = [self._against(draw, edit, place) for edit, place in rival.edits]
        if edits:
            self._lately.append(Rival(prompt, params["max_tokens"], edits, probes))
        if probes:
            self._scored.append(Rival(prompt, params["max_tokens"], edits, probes))
        reads = tuple(place for _, place in captures)
        own = [self._named(draw, edit) for edit, _ in edits]
        server = [
            placed(edit, phase=PHASES[tier])
            for tier, edit in self._server
            # Where there is no generated token to edit, such edits do not apply.
            if params["max_tokens"] > 1 or tier != "generated"
        ]
        shown = [capture.to_dict() for capture, _ in captures]
        scored = [probe for probe, _ in probes]
        alone = Plan.make(
            capture=shown or None,
            edits=[*server, *(edit for edit, _ in edits)] or None,
            probes=scored or None,
        )
        plan = Plan.make(capture=shown or None, edits=own or None, probes=scored or None)
        size = len(prompt)
        of_server = [(edit, _tier_place(edit, size)) for edit in server]
        return Ask(
            number=number,
            at=tick,
            prompt=prompt,
            params=params,
            plan=None if plan is None else plan.to_dict(),
            server={tier: edit.to_dict() for tier, edit in self._server},
            names={name: value.numpy().tolist() for name, value in self._names.items()},
            alone=None if alone is None else alone.to_dict(),
            abort_at=tick + draw.randint(0, 12) if draw.random() < 0.08 else None,
            parts=(*of_server, *edits),
            reads=reads,
            probes=tuple(scored),
        )

    def _change_server(self, draw: random.Random) -> None:
        """Now and then every request is steered for a while, and names change their vectors."""
        if self._server:
            if draw.random() < 0.3:
                self._server = []
        elif draw.random() < 0.03:
            self._server = [(draw.choice(list(PHASES)), self.catalogue.edit(draw))]
        if not self._names or draw.random() < 0.1:
            steer = draw.choice(self._steers)
            self._names = {**self._names, draw.choice(NAMES): vector_of(steer)}

    def _prompt(self, draw: random.Random, past: Sequence[Past]) -> list[int]:
        kind = draw.random()
        most = self.shape.longest - 3
        # Of those that ended lately, whose blocks may still be there.
        one = draw.choice(past[-5:]) if past else None
        if one and kind < 0.2:  # the very same
            return list(one.prompt)
        if one and kind < 0.4:  # the next turn of a conversation
            more = [self._token(draw) for _ in range(draw.randint(0, 9))]
            return [*one.prompt, *one.generated, *more][:most]
        family = draw.choice(self.shape.families)
        if kind < 0.48:  # as short as can be
            return [self._token(draw) for _ in range(draw.randint(1, 3))]
        size = min(len(family), most)
        length = draw.randint(2, size) if kind < 0.75 else draw.randint(size * 2 // 3, size)
        own = draw.randint(0, min(length - 1, 20)) if draw.random() < 0.5 else 0
        return [*family[: length - own], *(self._token(draw) for _ in range(own))]

    def _token(self, draw: random.Random) -> int:
        return draw.choice(draw.choice(self.shape.families))

    def _params(self, draw: random.Random, size: int) -> dict[str, Any]:
        most = self.shape.longest - size
        wanted = draw.choice((1, 2, draw.randint(3, self.shape.most_tokens)))
        if draw.random() < 0.35:
            wanted = draw.randint(self.shape.most_tokens, 3 * self.shape.most_tokens)
        params: dict[str, Any] = {
            "max_tokens": max(1, min(wanted, most)),
            "temperature": 0.0,
            "n": draw.choice((1, 1, 1, 1, 2, 3)),
            "ignore_eos": draw.random() < 0.7,
            "logprobs": 5,
            "detokenize": False,
        }
        if not self.shape.sampled:
            params["n"] = 1  # several are sampled, or alike
        elif params["n"] > 1 or draw.random() < 0.25:
            params |= {"temperature": draw.choice((0.7, 1.3)), "seed": draw.randrange(1 << 30)}
        if self.shape.stops and draw.random() < 0.25:
            params |= {
                "stop": draw.sample(self.shape.stops, 1),
                "detokenize": True,
                "include_stop_str_in_output": draw.random() < 0.5,
            }
        if draw.random() < 0.15:
            params["stop_token_ids"] = sorted({self._token(draw) for _ in range(12)})
        return params

    def _asked(self, draw: random.Random, places: Places) -> tuple[list[Any], list[Any], list[Any]]:
        """(edit, place), (capture, place), (probe, place) of each."""
        if draw.random() < 0.2:
            return [], [], []
        edits = [self._edit(draw, places) for _ in range(draw.choice((0, 1, 1, 1, 2, 3)))]
        captures: dict[Any, Place] = {}
        for _ in range(draw.choice((0, 1, 1, 2))):
            place = places.any(for_edit=False)
            taps = draw.sample(self.catalogue.taps, draw.randint(1, 2))
            layers, sites = sorted({tap[1] for tap in taps}), sorted({tap[0] for tap in taps})
            heads = self.catalogue.heads_of(draw, sites)
            captures[Capture(layers, sites, heads=heads, **place.written)] = place
        probes = []
        for nth in range(draw.choice((0, 0, 0, 1, 2))):
            place = places.any(for_edit=False)
            probes.append((self.catalogue.probe(draw, f"p{nth}", place.written), place))
        return edits, list(captures.items()), probes

    def _edit(self, draw: random.Random, places: Places) -> tuple[Any, Place]:
        if self._written and draw.random() < 0.3:
            # What another request asked for as well, where that fits: their KV can be shared.
            edit, place = draw.choice(self._written)
            return edit, place
        if draw.random() < 0.12:
            count = draw.choice((2, 3, 7, 34))
            place_of_rows = places.run(count)
            if place_of_rows is not None:
                spread = draw.choice(self.catalogue.spreads)
                return spread.over(count, place_of_rows.written), place_of_rows
        named = [edit for edit in self._steers if vector_of(edit) in self._names.values()]
        edit = draw.choice(named) if draw.random() < 0.1 else self.catalogue.edit(draw)
        place = places.any(for_edit=True)
        if places.size > LATE + 2 and draw.random() < 0.15:
            # Far from the beginning, so that blocks before are shared with plain traffic.
            place = Place({"positions": slice(LATE, None)}, lambda p, _: p >= LATE)
        found = placed(edit, **place.written)
        if not place.written:
            self._written.append((found, place))
        return found, place

    def _against(self, draw: random.Random, edit: Any, place: Place) -> tuple[Any, Place]:
        """The same, or another edit of the same tap at the same positions."""
        tap = (edit.sites, edit.layers)
        others = [each for each in self.catalogue.edits if (each.sites, each.layers) == tap]
        if draw.random() < 0.4 or not others:
            return edit, place
        return placed(draw.choice(others), **place.written), place

    def _named(self, draw: random.Random, edit: Any) -> Any:
        """The edit, perhaps with a name in place of its vector."""
        vector = vector_of(edit)
        for name, value in self._names.items():
            if vector == value and draw.random() < 0.8:
                return edit.replace(vector=name)
        return edit


def _tier_place(edit: Any, size: int) -> Place:
    phase = edit.positions.phase
    return Place({}, lambda p, _: phase == "all" or (p < size) == (phase == "prompt"))


def _short(ids: list[int]) -> str:
    return str(ids) if len(ids) < 40 else f"[{', '.join(map(str, ids[:40]))}, …]"
