"""Lenses of a request: texts of their tokens, their maps, and what the engine can decode."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from midstream.errors import SpecError
from midstream.runtime.frontend.lens_registry import LensRegistry
from midstream.runtime.frontend.request.prompt.tokenized import token_id
from midstream.runtime.protocol.worker_info import WorkerInfo
from midstream.spec import Lens, Logits, Plan, ResolvedPlan
from midstream.spec.lens import LOGIT
from midstream.spec.resolve.lens import check_lenses
from midstream.spec.resolve.resolved import ResolvedCapture
from midstream.validation import at

# Layers that the stream has passed at a site of layer i, beyond i.
AFTER = {"resid_pre": 0, "resid_post": 1}


def with_token_ids(plan: Plan, engine: Any) -> Plan:
    """Return a plan whose lenses and logits have the ids of their tokens."""
    id_of = functools.partial(token_id, engine)
    captures = []
    for index, capture in enumerate(plan.captures):
        with at(f"capture[{index}]"):
            captures.append(
                capture.with_ids(id_of) if isinstance(capture, (Lens, Logits)) else capture
            )
    if all(capture is other for capture, other in zip(captures, plan.captures, strict=True)):
        return plan
    return replace(plan, captures=tuple(captures))


def with_maps(
    plan: ResolvedPlan, own: Plan | None, registry: LensRegistry | None
) -> tuple[ResolvedPlan, tuple[str, ...]]:
    """Return a plan with the maps of its lenses, and the names of the registered ones.

    Args:
        registry: the registered lenses; None: there can be none.
    """
    names: dict[str, None] = {}
    captures = list(plan.captures)
    for index, capture in enumerate(captures):
        own_capture = None if own is None or capture.source < 0 else own.captures[capture.source]
        if not isinstance(own_capture, Lens) or own_capture.kind == LOGIT:
            continue
        assert capture.pattern is not None
        assert registry is not None
        with at(f"capture[{capture.source}]"):
            after = AFTER.get(own_capture.sites.names[0])
            if after is None:
                raise SpecError("site", "a registered lens reads resid_pre or resid_post")
            depths = [layer + after for _, layer in capture.pattern.reads]
            maps = registry.maps_of(own_capture.kind, depths)
        captures[index] = replace(capture, pattern=replace(capture.pattern, maps=maps))
        names[own_capture.kind] = None
    return (replace(plan, captures=tuple(captures)) if names else plan), tuple(names)


def check_decodable(
    lenses: Sequence[ResolvedCapture],
    plan: ResolvedPlan,
    vllm_config: Any,
    workers: Sequence[WorkerInfo],
) -> None:
    """Check that the engine can carry out the lenses of a plan."""
    check_lenses(plan, vllm_config)
    _check_stage(lenses, workers)


def _check_stage(lenses: Sequence[ResolvedCapture], workers: Sequence[WorkerInfo]) -> None:
    """Check that all layers of lenses are where the final norm and the head are."""
    last = max(worker.stage for worker in workers)
    there = {tap for worker in workers if worker.stage == last for tap in worker.taps}
    for capture in lenses:
        assert capture.pattern is not None
        for site, layer in capture.pattern.reads:
            if (site, layer) not in there:
                raise SpecError(
                    f"capture[{capture.source}].layers",
                    f"{site} of layer {layer} is on another pipeline stage than the final norm and "
                    f"the head; choose layers of the last stage: "
                    f"{sorted(number for name, number in there if name == site)}",
                )
