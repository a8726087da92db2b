"""`midstream.SamplingParams`: vLLM's, with captures, edits and probes as arguments."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from midstream.config.config import KEY
from midstream.errors import SpecError
from midstream.spec.operations import Edit, Steer
from midstream.spec.plan import Plan
from midstream.steering.edit_forms import read_hooks, read_reference
from midstream.validation import at, listed

if TYPE_CHECKING:
    from vllm import SamplingParams as VllmSamplingParams

# Arguments with vectors by hook point, and the phase of the tokens that they apply to.
TIERS: dict[str, str | None] = {
    "steering_vectors": None,
    "prefill_steering_vectors": "prompt",
    "decode_steering_vectors": "generated",
}
OWN = (*TIERS, "steering_module_ref", "capture", "edits", "probes")


class PlanForm(dict[str, Any]):
    """JSON form of a plan, which vLLM copies and packs like any dict; its repr omits vectors."""

    def __repr__(self) -> str:
        parts = ", ".join(f"{len(value)} {name}" for name, value in self.items())
        return f"<midstream plan: {parts}>"


class _Factory(type):
    """Metaclass whose call creates vLLM's object; every `vllm.SamplingParams` is an instance."""

    def __call__(
        cls,
        *args: Any,
        steering_vectors: object = None,
        prefill_steering_vectors: object = None,
        decode_steering_vectors: object = None,
        steering_module_ref: object = None,
        capture: object = None,
        edits: object = None,
        probes: object = None,
        **vllm_args: Any,
    ) -> VllmSamplingParams:
        plan = read_plan(
            steering_vectors=steering_vectors,
            prefill_steering_vectors=prefill_steering_vectors,
            decode_steering_vectors=decode_steering_vectors,
            steering_module_ref=steering_module_ref,
            capture=capture,
            edits=edits,
            probes=probes,
        )
        made = _vllm()(*args, **vllm_args)
        if plan is not None:
            given = made.extra_args or {}
            if KEY in given:
                raise SpecError(
                    f"extra_args[{KEY!r}]",
                    f"there is a plan here and in {listed(OWN)}; give it in one place",
                )
            made.extra_args = {**given, KEY: PlanForm(plan.to_dict())}
        return made

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _vllm())

    def __subclasscheck__(cls, subclass: type) -> bool:
        return subclass is SamplingParams or issubclass(subclass, _vllm())

    def __getattr__(cls, name: str) -> Any:
        return getattr(_vllm(), name)

    def __dir__(cls) -> list[str]:
        return sorted({*type.__dir__(cls), *dir(_vllm())})

    @property
    def __signature__(cls) -> inspect.Signature:
        theirs = inspect.signature(_vllm())
        keyword = inspect.Parameter.KEYWORD_ONLY
        ours = [inspect.Parameter(name, keyword, default=None) for name in OWN]
        return theirs.replace(parameters=[*theirs.parameters.values(), *ours])


class SamplingParams(metaclass=_Factory):
    """Create a `vllm.SamplingParams` with a plan in its `extra_args["midstream"]`.

    All of vLLM's arguments are accepted, and:

    Args:
        steering_vectors: vectors to add at every token: `{hook point: {layer: vector}}`. A hook
            point is `pre_attn`, `post_attn`, `post_block`, or any site's name. A vector is a list,
            array or tensor [hidden], or `{"vector": …, "scale": number}`.
        prefill_steering_vectors: vectors to add at prompt tokens only, in the same form.
        decode_steering_vectors: vectors to add at generated tokens only, in the same form.
        steering_module_ref: registered vectors to add at every token: `name`, `(name, scale)` or
            `{"name": …, "scale": …}`. All four arguments add up.
        capture: what to capture: a Capture or its dict, a list of these, or `{sink: {"hooks": {hook
            point: [layer, …]}, "positions": …, "tag": …, "request_id": …}}` (or a
            `FilesystemCaptureRequest`). Rows for the sink `memory` are returned on the output as
            `activations`; results of other sinks are in `capture_results`.
        edits: edits of any kind, applied in order, after the steering vectors.
        probes: scores to compute.

    The result is vLLM's own object, which vLLM copies, packs and validates as usual. `isinstance(x,
    midstream.SamplingParams)` is true for every `vllm.SamplingParams`. The class's other
    attributes, such as `from_optional`, are vLLM's.

    Raises:
        SpecError: one of these arguments is malformed; the path names the place, such as
            `decode_steering_vectors["pre_attn"][15].vector`. Values that depend on the model
            (layers, widths, registered names) are checked when the request is submitted.
    """

    if TYPE_CHECKING:

        def __init__(self, *args: Any, **arguments: Any) -> None: ...


def read_plan(
    *,
    steering_vectors: object = None,
    prefill_steering_vectors: object = None,
    decode_steering_vectors: object = None,
    steering_module_ref: object = None,
    capture: object = None,
    edits: object = None,
    probes: object = None,
) -> Plan | None:
    """Return the plan of these arguments of SamplingParams; None if none is given.

    Raises:
        SpecError: as for SamplingParams.
    """
    found: list[Edit] = []
    if steering_module_ref is not None:
        with at("steering_module_ref"):
            found.append(Steer(read_reference(steering_module_ref)))
    tiers = (steering_vectors, prefill_steering_vectors, decode_steering_vectors)
    for (name, phase), value in zip(TIERS.items(), tiers, strict=True):
        if value is not None:
            with at(name):
                found.extend(part.edit for part in read_hooks(value, phase))
    own = Plan.make(capture=capture, edits=edits, probes=probes)
    if own is None:
        return Plan(edits=tuple(found)) if found else None
    return Plan(own.captures, (*found, *own.edits), own.probes)


def _vllm() -> type[VllmSamplingParams]:
    import vllm

    found: type[VllmSamplingParams] = vllm.SamplingParams
    return found
