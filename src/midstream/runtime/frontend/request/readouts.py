"""Read-outs of a request, lenses and SAEs: the registered weights, and what a step costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from midstream.errors import SpecError
from midstream.runtime.frontend.request.lenses import check_decodable, with_maps, with_token_ids
from midstream.runtime.frontend.request.reconstructions import reading
from midstream.runtime.protocol.worker_info import WorkerInfo
from midstream.spec import Features, Plan, ResolvedPlan
from midstream.spec.positions.ranges import count
from midstream.spec.resolve.lens import lenses_of
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


def bound(plan: Plan, engine: Any, registries: Registries) -> Plan:
    """Return a plan whose lenses have the ids of their tokens, whose SAEs have layers and sites,
    and whose edits have vectors in place of tokens.
    """
    plan = with_token_ids(plan, engine)
    if registries.directions is not None and plan.steers_to_tokens:
        plan = registries.directions.bound(plan)
    if not any(isinstance(capture, Features) for capture in plan.captures):
        return plan
    captures = list(plan.captures)
    for index, capture in enumerate(captures):
        if isinstance(capture, Features):
            assert registries.saes is not None
            with at(f"capture[{index}]"):
                sae = registries.saes.get(capture.sae)
                if capture.layer is not None and capture.site is not None:
                    continue
                tap = sae.sae.tap
                if tap is not None:
                    captures[index] = capture.at_tap(*tap)
    return replace(plan, captures=tuple(captures))


def with_weights(
    plan: ResolvedPlan, own: Plan | None, registries: Registries
) -> tuple[ResolvedPlan, tuple[tuple[str, str], ...]]:
    """Return a plan with the maps of its lenses and the encoders of its SAEs, and which registered
    weights these are: (kind, name).

    Args:
        own: the plan that was resolved, after `bound`.
    """
    plan, lenses = with_maps(plan, own, registries.lenses)
    read = dict.fromkeys(("lens", name) for name in lenses)
    captures = list(plan.captures)
    for index, capture in enumerate(captures):
        if capture.pattern is None or capture.pattern.kind != "features":
            continue
        assert own is not None
        asked = own.captures[capture.source]
        assert isinstance(asked, Features)
        assert registries.saes is not None
        encoder = registries.saes.get(asked.sae).encoder
        with at(f"capture[{capture.source}]"):
            _check(asked, encoder.features)
        captures[index] = replace(capture, pattern=replace(capture.pattern, encoder=encoder))
        read["sae", asked.sae] = None
    return (replace(plan, captures=tuple(captures)) if read else plan), tuple(read)


def readout_rows(
    plan: ResolvedPlan, vllm_config: Any, workers: Sequence[WorkerInfo], grows: bool
) -> int:
    """Return the most rows, positions times layers, that lenses and SAEs of one completion read or
    reconstruct in a step. Generated tokens that are computed again after a preemption do not count.

    Args:
        grows: whether the prompt grows, as that of a session does.
    """
    lenses = lenses_of(plan)
    if lenses:
        check_decodable(lenses, plan, vllm_config, workers)
    reads = lenses + [
        capture
        for capture in plan.captures
        if capture.pattern is not None and capture.pattern.kind == "features"
    ]
    taken = [(capture.where, len(capture.taps)) for capture in reads]
    taken += [(edit.where, 1) for edit in reading(plan)]
    if not taken:
        return 0
    step_tokens = workers[0].step_tokens
    speculative = vllm_config.speculative_config
    at_once = 1 if speculative is None else 1 + speculative.num_speculative_tokens
    num_rows = 0
    for where, layers in taken:
        prompt = count(where.possible, plan.prompt_len)
        positions = step_tokens if grows else min(step_tokens, max(prompt, at_once))
        num_rows += positions * layers
    return num_rows


def _check(asked: Features, features: int) -> None:
    """Check that an SAE has what is asked for."""
    if asked.top > features:
        raise SpecError("top", f"the SAE {asked.sae!r} has {features} features")
    for index, feature in enumerate(asked.features):
        if feature >= features:
            raise SpecError(
                f"features[{index}]",
                f"there is no feature {feature}: the SAE {asked.sae!r} has {features}, 0 to "
                f"{features - 1}",
            )
