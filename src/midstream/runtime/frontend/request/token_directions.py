"""Directions of tokens, which requests steer with: `Steer(token=…)`."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

from midstream.errors import BusyError, SpecError
from midstream.plan import ModelShape, Plan, Steer
from midstream.plan.operations import Edit, Gate
from midstream.plan.plan import has_token
from midstream.plan.readouts.lens import AFTER, LENS
from midstream.plan.resolved import LensMap
from midstream.plan.tap_lookup import find_layer, find_taps
from midstream.plan.tokens import LOGIT, STREAM, read_kind, read_token
from midstream.plan.vectors.vector import Vector
from midstream.runtime.frontend.lens_registry import LensRegistry
from midstream.runtime.frontend.request.prompt.tokenized import token_id
from midstream.runtime.frontend.rpc.fetch import Exchange
from midstream.runtime.protocol.results import WeightState
from midstream.runtime.protocol.rpc import ReadDirections, ReadWeights, TokenDirections
from midstream.sites import Tap
from midstream.validation import at, read_int, read_word

_CACHED = 4096
# Key of the lens without maps, whose direction is the same after every layer.
_ANY = -1


class DirectionKey(NamedTuple):
    """A direction: of a token, through the map that a lens has after so many layers."""

    token: int
    lens: str
    depth: int


class DirectionCache:
    """Directions of tokens of one engine, each asked of the workers once."""

    def __init__(self, lenses: LensRegistry, shape: ModelShape, engine: Any) -> None:
        self._lenses, self._shape, self._engine = lenses, shape, engine
        self._found: dict[DirectionKey, Vector] = {}
        # Whether other front ends may change the weights unseen, and what to do if one did.
        self.is_shared, self.outdated = False, self.forget
        self._weights = 0
        # None: that has to be awaited, by `fetch` before a plan is resolved
        self.carry_out: Callable[[Exchange[None]], None] | None = None
        self.carry_out_later: Callable[[Exchange[None]], Awaitable[None]] | None = None

    def forget(self) -> None:
        self._found.clear()

    def bound(self, plan: Plan) -> Plan:
        return plan.expanded(self._expanded)

    def reading(self, keys: Mapping[DirectionKey, str]) -> Exchange[None]:
        """Ask the workers for directions that are not there, by their path in a plan, if any."""
        if self.is_shared:
            states: list[WeightState] = yield ReadWeights()
            number = max(state.number for state in states)
            if number != self._weights:
                self._weights = number
                self.outdated()
        for key, path in keys.items():
            if key in self._found:
                continue
            with at(path) if path else nullcontext():
                answers: list[TokenDirections] = yield ReadDirections(key.token, self._map(key))
                data = next((answer.data for answer in answers if answer.data), None)
                if data is None:
                    whys = [answer.problem for answer in answers if answer.problem]
                    raise SpecError("token", f"its direction is unknown: {', '.join(whys)}")
            self._found[key] = Vector(data)
            while len(self._found) > _CACHED:
                del self._found[next(iter(self._found))]

    async def fetch(self, keys: Mapping[DirectionKey, str]) -> None:
        assert self.carry_out_later is not None
        await self.carry_out_later(self.reading(keys))

    def needed(self, plan: Plan | None) -> dict[DirectionKey, str]:
        """Return the directions that a plan needs, with the path of an edit that needs each."""
        paths: dict[DirectionKey, str] = {}
        for index, edit in enumerate(() if plan is None else plan.edits):
            if has_token(edit):
                path = f"edits[{index}]"
                with at(path):
                    keys = [key for _, key in self._keys(edit)]
                paths |= dict.fromkeys(keys, f"{path}.edit" if isinstance(edit, Gate) else path)
        return paths

    def get(self, key: DirectionKey) -> Vector:
        if key not in self._found:
            if self.carry_out is None:
                raise BusyError("a lens was replaced meanwhile; ask again", 1)
            self.carry_out(self.reading({key: ""}))
        # The last used are kept longest.
        vector = self._found[key] = self._found.pop(key)
        return vector

    def place(self, token: int | str, layer: int, lens: str, site: str) -> DirectionKey:
        """Return what the direction of a token at a layer is stored under."""
        with at("lens"):
            lens = read_kind(lens)
        with at("site"):
            site = read_word(site, STREAM)
        with at("layer"):
            layer = find_layer(read_int(layer), self._shape)
        return self.key(read_token(token), (site, layer), lens)

    def key(self, token: int | str, tap: Tap, lens: str) -> DirectionKey:
        last = self._shape.num_layers - 1
        reason = self._shape.reason((LENS, last))
        if reason is not None:
            raise SpecError("token", f"the stream cannot be decoded: {reason}")
        with at("token"):
            number = token_id(self._engine, token) if isinstance(token, str) else token
            size = int(self._engine.vllm_config.model_config.get_vocab_size())
            if number >= size:
                raise SpecError("", f"there is no token {number}: the model has {size}")
        site, layer = tap
        if lens == LOGIT:
            return DirectionKey(number, lens, _ANY)
        if site not in AFTER:
            raise SpecError("site", "a registered lens reads resid_pre or resid_post")
        return DirectionKey(number, lens, layer + AFTER[site])

    def _keys(self, edit: Edit) -> Iterator[tuple[Tap, DirectionKey]]:
        """Yield each tap of an edit with a token, and what its direction is stored under."""
        steer = edit.edit if isinstance(edit, Gate) else edit
        assert isinstance(steer, Steer)
        assert steer.token is not None
        with nullcontext() if steer is edit else at("edit"):
            for tap in find_taps(steer.layers, steer.sites, self._shape, "layer", "site"):
                yield tap, self.key(steer.token, tap, steer.lens)

    def _expanded(self, edit: Edit) -> tuple[Edit, ...]:
        if not has_token(edit):
            return (edit,)
        steer = edit.edit if isinstance(edit, Gate) else edit
        assert isinstance(steer, Steer)
        keys = list(self._keys(edit))
        bare: dict[str, Any] = {"token": None, "lens": None}
        if steer.lens == LOGIT:
            parts = [steer.replace(**bare, vector=self.get(keys[0][1]))]
        else:
            parts = [
                steer.replace(**bare, vector=self.get(key), site=tap[0], layer=tap[1])
                for tap, key in keys
            ]
        if isinstance(edit, Gate):
            return tuple(dataclasses.replace(edit, edit=part) for part in parts)
        return tuple(parts)

    def _map(self, key: DirectionKey) -> list[LensMap]:
        if key.lens == LOGIT:
            return [LensMap()]
        try:
            return list(self._lenses.maps_of(key.lens, [key.depth]))
        except SpecError as error:
            names = {"kind": "lens", "layers": "layer"}
            raise SpecError(names.get(error.path, error.path), error.problem) from None
