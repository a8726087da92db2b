"""Read-outs of a request: what its engine has for them, and what they cost in a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from midstream.codecs import Rp8, parse_codec
from midstream.errors import SpecError
from midstream.plan import Plan, ResolvedPlan
from midstream.plan.plan import has_token
from midstream.plan.positions.ranges import count
from midstream.plan.readouts import KINDS, Capture, ReadOut
from midstream.plan.resolved import LensMap, SaeEncoder
from midstream.runtime.frontend.request.prompt.tokenized import token_id
from midstream.runtime.frontend.request.reconstructions import reading
from midstream.runtime.protocol.worker_info import WorkerInfo
from midstream.sites import Tap
from midstream.validation import at

if TYPE_CHECKING:
    from midstream.runtime.frontend.lens_registry import LensRegistry
    from midstream.runtime.frontend.request.token_directions import DirectionCache
    from midstream.runtime.frontend.sae_registry import SaeRegistry


@dataclass(frozen=True, slots=True)
class Registries:
    """Registered weights of an engine, and directions of tokens; None: there can be none."""

    lenses: LensRegistry | None = None
    saes: SaeRegistry | None = None
    directions: DirectionCache | None = None


class EngineReadings:
    """What one engine has for read-outs; see `midstream.plan.readouts.base.ReadOutEngine`."""

    def __init__(self, engine: Any, workers: Sequence[WorkerInfo], parts: Mapping[Tap, int]):
        self._engine = engine
        self._workers = workers
        self.parts = parts
        self.registries = Registries()

    @cached_property
    def vocabulary(self) -> int:
        return int(self._engine.vllm_config.model_config.get_vocab_size())

    @cached_property
    def last_stage(self) -> frozenset[Tap]:
        last = max(worker.stage for worker in self._workers)
        return frozenset(
            tap for worker in self._workers if worker.stage == last for tap in worker.taps
        )

    def token_id(self, text: str) -> int:
        return token_id(self._engine, text)

    def lens_maps(self, name: str, depths: list[int]) -> tuple[LensMap, ...]:
        assert self.registries.lenses is not None
        return self.registries.lenses.maps_of(name, depths)

    def sae_tap(self, name: str) -> Tap | None:
        assert self.registries.saes is not None
        return self.registries.saes.get(name).tap

    def sae_encoder(self, name: str) -> SaeEncoder:
        assert self.registries.saes is not None
        return self.registries.saes.get(name).encoder


def bound(plan: Plan, engine: EngineReadings) -> Plan:
    """Return a plan with ids of tokens, layers and sites in read-outs, and vectors in edits."""
    captures = []
    for index, readout in enumerate(plan.captures):
        with at(f"capture[{index}]"):
            captures.append(readout.bind(engine))
    if any(ours is not theirs for ours, theirs in zip(captures, plan.captures, strict=True)):
        plan = replace(plan, captures=tuple(captures))
    directions = engine.registries.directions
    steers = directions is not None and any(map(has_token, plan.edits))
    return directions.bound(plan) if directions is not None and steers else plan


def finished(
    plan: ResolvedPlan, own: Plan | None, engine: EngineReadings
) -> tuple[ResolvedPlan, tuple[tuple[str, str], ...]]:
    """Return a plan with what read-outs need of the engine, and its weights, (kind, name)."""
    weights: dict[tuple[str, str], None] = {}
    captures = list(plan.captures)
    for index, capture in enumerate(captures):
        if capture.pattern is None or own is None or capture.source < 0:
            continue
        readout = own.captures[capture.source]
        with at(f"capture[{capture.source}]"):
            captures[index] = readout.finish(capture, engine)
        weights.update(dict.fromkeys(readout.weights))
    return replace(plan, captures=tuple(captures)), tuple(weights)


def readout_rows(
    plan: ResolvedPlan, vllm_config: Any, workers: Sequence[WorkerInfo], grows: bool
) -> int:
    """Return the most rows, positions times layers, that lenses and SAEs of one completion read or
    reconstruct in a step. Tokens that are computed again after a preemption do not count.
    """
    reads: Iterable[Any] = [
        *(
            (item.where, len(item.taps))
            for item in plan.captures
            if KINDS.get(item.kind, Capture).decodes
        ),
        *((edit.where, 1) for edit in reading(plan)),
    ]
    step_tokens = workers[0].step_tokens
    speculative = vllm_config.speculative_config
    at_once = 1 if speculative is None else 1 + speculative.num_speculative_tokens
    num_rows = 0
    for where, layers in reads:
        prompt = count(where.possible, plan.prompt_len)
        positions = step_tokens if grows else min(step_tokens, max(prompt, at_once))
        num_rows += positions * layers
    return num_rows


def check_heads(captures: tuple[ReadOut, ...], codec: str) -> None:
    """Check that heads can be chosen from the rows that a codec encoded."""
    for index, capture in enumerate(captures):
        if capture.heads is None or not capture.returns_vectors:
            continue
        if isinstance(parse_codec(codec), Rp8):
            raise SpecError(
                f"capture[{index}].heads",
                f"rows of the codec {codec} are sketches of whole vectors, without heads; use "
                "another codec, or omit `heads`",
            )
