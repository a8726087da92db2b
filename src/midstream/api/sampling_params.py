"""`midstream.SamplingParams`: vLLM's, with steering and captures as arguments."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from midstream.config.config import KEY
from midstream.errors import SpecError
from midstream.spec.operations import Edit, Steer
from midstream.spec.plan import Plan
from midstream.steering.tiers import read_hooks, read_reference
from midstream.validation import at, listed

if TYPE_CHECKING:
    from vllm import SamplingParams as VllmSamplingParams

# Each argument of vectors by hook point, and the phase of the tokens that it is for.
TIERS: dict[str, str | None] = {
    "steering_vectors": None,
    "prefill_steering_vectors": "prompt",
    "decode_steering_vectors": "generated",
}
OWN = (*TIERS, "steering_module_ref", "capture", "edits", "probes")


class PlanForm(dict[str, Any]):
    """A plan's JSON form, which vLLM copies and packs like any dict. It does not print vectors."""

    def __repr__(self) -> str:
        parts = ", ".join(f"{len(value)} {name}" for name, value in self.items())
        return f"<midstream plan: {parts}>"


class _Factory(type):
    """Calling the class makes vLLM's object, of which all of them are instances."""

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
    """Makes a `vllm.SamplingParams`, with a plan in its `extra_args["midstream"]`.

    All of vLLM's arguments are taken as they are, and:

    Args:
        steering_vectors: vectors that are added at every token: `{hook point: {layer: vector}}`.
            A hook point is `pre_attn`, `post_attn`, `post_block`, or any site's name; a vector is
            a list, array or tensor of the model's width, or `{"vector": …, "scale": number}`.
        prefill_steering_vectors: the same, at the prompt's tokens only.
        decode_steering_vectors: the same, at generated tokens only.
        steering_module_ref: vectors registered under a name, added at every token: `name`,
            `(name, scale)` or `{"name": …, "scale": …}`. All four add up.
        capture: what to capture: a Capture or its dict, a list of these, or
            `{sink: {"hooks": {hook point: [layer, …]}, "positions": …, "tag": …, "request_id": …}}`
            (or a `FilesystemCaptureRequest`). Rows for the sink `memory` come back on the output,
            as `activations`; what became of those for others is in `capture_results`.
        edits: edits of any kind, applied after those above, in this order.
        probes: scores to read.

    What it makes is vLLM's own object, so that it is copied, packed and checked as vLLM does it;
    `isinstance(x, midstream.SamplingParams)` is true of every `vllm.SamplingParams`. The class's
    other attributes are vLLM's, `from_optional` among them.

    Raises:
        SpecError: one of these arguments is malformed. The path leads to the place:
            `decode_steering_vectors["pre_attn"][15].vector`. What depends on the model (layers,
            widths, registered names) is checked when the request is made.
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
    """The plan that these arguments of SamplingParams mean; None if none is given.

    Raises:
        SpecError: as SamplingParams.
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
