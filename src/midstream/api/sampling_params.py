"""`midstream.SamplingParams`: vLLM's, with captures, edits and probes as arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from midstream.api.arguments import check_sampling_names
from midstream.compat.vllm_fork import ARGUMENTS, read_edits
from midstream.config.config import KEY
from midstream.errors import SpecError
from midstream.plan.plan import Plan
from midstream.validation import kind, listed, show

if TYPE_CHECKING:
    from typing_extensions import Unpack
    from vllm import SamplingParams as VllmSamplingParams

    from midstream.api.arguments import (
        CaptureArgument,
        ControllerArgument,
        EditArgument,
        ProbeArgument,
    )
    from midstream.api.vllm_arguments import SamplingArguments

    class OwnArguments(SamplingArguments, total=False):
        """Keyword arguments of `SamplingParams`."""

        steering_vectors: Any
        prefill_steering_vectors: Any
        decode_steering_vectors: Any
        steering_module_ref: Any
        steering_clamps: Any
        prefill_steering_clamps: Any
        decode_steering_clamps: Any
        patch: Any
        patch_vectors: Any
        capture: CaptureArgument
        edits: EditArgument
        probes: ProbeArgument
        controller: ControllerArgument


_PLAN = ("capture", "edits", "probes", "controller")
OWN = (*ARGUMENTS, *_PLAN)


class PlanForm(dict[str, Any]):
    """JSON form of a plan, which vLLM copies and packs like any dict; its repr omits vectors."""

    def __repr__(self) -> str:
        counts = {name: len(value) for name, value in self.items() if name != "controller"}
        parts = ", ".join(f"{count} {name}" for name, count in counts.items())
        return f"<midstream plan: {parts}>"


class _Factory(type):
    """Metaclass whose call creates vLLM's object; every `vllm.SamplingParams` is an instance."""

    def __call__(cls, *args: Any, **arguments: Unpack[OwnArguments]) -> VllmSamplingParams:
        return _made(args, dict(arguments))

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
        steering_clamps: clamps of every token: `{hook point: {layer: [clamp, …]}}`. A clamp is
            `{"vector": …, "min": …, "max": …, "value": …, "strength": …}`; see `Clamp`. They apply
            after the vectors.
        prefill_steering_clamps: clamps of prompt tokens only.
        decode_steering_clamps: clamps of generated tokens only.
        patch: rows to replace, before all other edits: `[{"layer": …, "hook": hook point,
            "dest_position": position, "source_inline": index of the row, "alpha": …}, …]`.
        patch_vectors: the rows, packed: `{"dtype": …, "shape": [rows, width], "data": base64}`.
        capture: what to capture: a Capture or its dict, a list of these, or `{sink: {"hooks": {hook
            point: [layer, …]}, "positions": …, "tag": …, "request_id": …}}` (or a
            `FilesystemCaptureRequest`). Rows for the sink `memory` are returned on the output as
            `activations`; results of other sinks are in `capture_results`.
        edits: edits of any kind, applied in order, after the steering vectors.
        probes: scores to compute.
        controller: changes the edits by the scores, see `LLM.generate`.

    The result is vLLM's own object, which vLLM copies, packs and validates as usual. `isinstance(x,
    midstream.SamplingParams)` is true for every `vllm.SamplingParams`. The class's other
    attributes, such as `from_optional`, are vLLM's.

    Raises:
        SpecError: one of these arguments is malformed; the path names the place, such as
            `decode_steering_vectors["pre_attn"][15].vector`. Values that depend on the model
            (layers, widths, registered names) are checked when the request is submitted.
    """

    if TYPE_CHECKING:

        def __init__(self, *args: Any, **arguments: Unpack[OwnArguments]) -> None: ...


def _made(args: tuple[Any, ...], arguments: dict[str, Any]) -> VllmSamplingParams:
    vllm_args = {name: value for name, value in arguments.items() if name not in OWN}
    check_sampling_names(vllm_args, SamplingParams)
    plan = read_plan({name: arguments[name] for name in OWN if arguments.get(name) is not None})
    made = _vllm()(*args, **vllm_args)
    if plan is not None:
        extra = made.extra_args or {}
        if KEY in extra:
            raise SpecError(
                f"extra_args[{KEY!r}]",
                f"there is a plan here and in {listed(OWN)}; give it in one place",
            )
        made.extra_args = {**extra, KEY: PlanForm(plan.to_dict())}
    return made


def read_plan(arguments: dict[str, Any]) -> Plan | None:
    """Return the plan of some arguments of SamplingParams, by name; None if none is given."""
    own = Plan.make(**{name: arguments[name] for name in _PLAN if name in arguments})
    edits = tuple(read_edits(arguments))
    if own is None:
        return Plan(edits=edits) if edits else None
    return replace(own, edits=(*edits, *own.edits))


def check_params(value: Any) -> None:
    """Check that a call's sampling parameters are objects of vLLM, and not their dict."""
    if isinstance(value, _vllm()):
        return
    is_list = isinstance(value, Sequence)
    for index, params in enumerate(value if is_list else [value]):
        if isinstance(params, Mapping):
            fields = ", ".join(f"{name}={show(params[name])}" for name in list(params)[:3])
            path = f"sampling_params[{index}]" if is_list else "sampling_params"
            raise SpecError(path, f"expected SamplingParams({fields}), got its dict")
        if not (params is None or isinstance(params, _vllm())):
            raise SpecError("sampling_params", f"expected SamplingParams(…), got {kind(params)}")


@functools.cache  # vLLM looks its names up in modules, which takes microseconds
def _vllm() -> type[VllmSamplingParams]:
    import vllm

    params_class: type[VllmSamplingParams] = vllm.SamplingParams
    return params_class
