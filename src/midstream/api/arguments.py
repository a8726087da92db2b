"""Arguments of a call: one value for all prompts, or a list with one each. One plan per prompt."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, SupportsIndex, TypeGuard

from midstream.api.vllm_arguments import SamplingArguments
from midstream.compat.foreign_fields import OWN
from midstream.config.config import Config
from midstream.errors import SpecError
from midstream.plan import Controller, Edit, Plan, Probe
from midstream.plan.control.control_laws import Threshold
from midstream.plan.forms import PlacedVector, SupportsArray, SupportsEdit
from midstream.plan.operations import is_placed_vector
from midstream.plan.readouts import Capture, ReadOut
from midstream.plan.readouts.capture import read_short_capture
from midstream.validation import at, closest

# One part of a plan or its dict, for all prompts; or a list of parts, or one entry per prompt.
# Of captures also short forms: True, layers, names of sites with their layers.
_CapturePart = ReadOut | Mapping[str, Any] | bool | str | SupportsIndex | SupportsArray | None
CaptureArgument = _CapturePart | Sequence[_CapturePart | Sequence[_CapturePart]]
_EditPart = Edit | Mapping[str, Any] | SupportsEdit | PlacedVector | None
EditArgument = _EditPart | Sequence[_EditPart | Sequence[_EditPart]]
_ProbePart = Probe | Mapping[str, Any] | None
ProbeArgument = _ProbePart | Sequence[_ProbePart | Sequence[_ProbePart]]
_Controller = Controller | Threshold | Mapping[str, Any] | str | None
ControllerArgument = _Controller | Sequence[_Controller]

# A list of these may be the parts of one prompt; lists of captures and of
# controllers have one entry per prompt.
_SEVERAL = ("steer", "edits", "probes")
_PART = re.compile(r"\b(?:capture|edits|probes)\[\d+\]")
_WHAT = {"steer": "edits", "edits": "edits", "probes": "probes"}


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The arguments of one call, as they were given."""

    capture: Any = None
    steer: Any = None
    edits: Any = None
    probes: Any = None
    controller: Any = None

    @property
    def nothing(self) -> bool:
        if self.capture is not None or self.steer is not None or self.edits is not None:
            return False
        return self.probes is None and self.controller is None

    def per_prompt(self, count: int) -> list[PromptArguments]:
        if self.nothing:
            return [PromptArguments()] * count
        columns = {name: per_prompt(name, value, count) for name, value in self._values().items()}
        return [
            PromptArguments(**{name: column[index] for name, column in columns.items()})
            for index in range(count)
        ]

    def alone(self) -> PromptArguments:
        """Return the arguments of a call with one prompt, for which every list is."""
        return PromptArguments(self.capture, self.steer, self.edits, self.probes, self.controller)

    def explain(self, error: SpecError, prompt_index: int | None = None) -> SpecError:
        """Return an error of a prompt's plan with the path of the caller's argument, as
        `steer[3][0].layer`; of one value for all, the message names the prompt.
        """
        argument_path = self._path(error.path, prompt_index)
        if argument_path is None:
            return error
        path, is_for_all = argument_path
        # The problem may name other parts of the plan.
        problem = _PART.sub(
            lambda part: (self._path(part[0], prompt_index) or part)[0], error.problem
        )
        return type(error)(path, f"{problem} (prompt {prompt_index})" if is_for_all else problem)

    def _path(self, path: str, prompt_index: int | None) -> tuple[str, bool] | None:
        """Return a plan's path as one of the caller's arguments, and whether that argument is for
        all prompts of a list; None: no argument has it.
        """
        head, rest = re.match(r"([a-z_]*)(.*)", path, re.DOTALL).groups()  # type: ignore[union-attr]
        name, rest = self._origin(head, rest, prompt_index)
        value = self._values().get(name)
        if value is None:
            return None
        mine, begin = value, name
        if prompt_index is not None and _has_entries(name, value):
            mine, begin = value[prompt_index], f"{name}[{prompt_index}]"
        # A plan numbers its parts even if the caller gave a single one.
        if not _is_list(mine) or (name == "capture" and _is_short(mine)):
            rest = rest.removeprefix("[0]")
        return begin + rest, prompt_index is not None and begin == name

    def _origin(self, head: str, rest: str, prompt_index: int | None) -> tuple[str, str]:
        """Return the argument and the rest of the path: a plan has the edits of `steer` first."""
        if head != "edits" or self.steer is None:
            return head, rest
        mine = self.steer
        if prompt_index is not None and _has_entries("steer", mine):
            mine = mine[prompt_index]
        count = len(_as_list(mine))
        index, tail = re.match(r"\[(\d+)\](.*)|", rest, re.DOTALL).groups()  # type: ignore[union-attr]
        if index is None:
            # The list itself, or a single edit, which is numbered if others precede it.
            return ("edits" if mine is None else "steer"), rest
        if int(index) < count:
            return "steer", rest
        return "edits", f"[{int(index) - count}]{tail}"

    def _values(self) -> dict[str, Any]:
        return {argument.name: getattr(self, argument.name) for argument in fields(self)}


# Arguments of these types are immutable; a list or a dict may change from call to call.
_IMMUTABLE = (type(None), ReadOut, Edit, Probe, Controller, str, int)
_CACHED_PLANS = 64
_PLANS: dict[tuple[int, ...], tuple[PromptArguments, Plan | None]] = {}  # by `key`


@dataclass(frozen=True, slots=True)
class PromptArguments:
    """Arguments for one prompt. Two of these are equal if their values are the same objects."""

    capture: Any = field(default=None, compare=False)
    steer: Any = field(default=None, compare=False)
    edits: Any = field(default=None, compare=False)
    probes: Any = field(default=None, compare=False)
    controller: Any = field(default=None, compare=False)
    key: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        # Prompts with the same arguments share a plan, which is parsed once.
        object.__setattr__(self, "key", tuple(map(id, self._parts)))

    def plan(self) -> Plan | None:
        """Return the plan of the arguments, the same for the same immutable objects, if any."""
        # The cache keeps the arguments alive, so that no other object gets one of their ids.
        cached = _PLANS.get(self.key)
        if cached is not None:
            return cached[1]
        edits: Any = self.edits
        if self.steer is not None:
            named = [
                {"op": "steer", **edit} if isinstance(edit, Mapping) else edit
                for edit in _as_list(self.steer)
            ]
            if not named:
                raise SpecError("edits", "the list is empty; leave it out to ask for none")
            edits = named if edits is None else [*named, *_as_list(edits)]
        plan = Plan.make(self.capture, edits, self.probes, self.controller)
        if all(isinstance(part, _IMMUTABLE) for part in self._parts):
            if len(_PLANS) >= _CACHED_PLANS:
                _PLANS.clear()
            _PLANS[self.key] = self, plan
        return plan

    def split_controller(self) -> tuple[Controller | None, PromptArguments]:
        """Return a controller in `mode="async"`, if any, which no plan has, and the other parts."""
        mine = self.controller
        if not isinstance(mine, Controller) or mine.mode != "async":
            return None, self
        return mine, PromptArguments(self.capture, self.steer, self.edits, self.probes)

    @property
    def _parts(self) -> tuple[Any, ...]:
        return self.capture, self.steer, self.edits, self.probes, self.controller


# Arguments of other tools and near misses, and what to write instead.
_INSTEAD = {
    "activations": "capture=Capture(layers=…)",
    "cache": "capture=Capture(layers=…)",
    "capture_layers": "capture=Capture(layers=…)",
    "captures": "capture=…",
    "edit": "edits=…",
    "fwd_hooks": "edits=… to change activations, capture=… to read them",
    "hooks": "edits=… to change activations, capture=… to read them",
    "interventions": "edits=…",
    **{
        name.lower(): f"capture={name}(…)"
        for name in ("Attention", "Features", "Lens", "Logits", "Norms")
    },
    "layers": "capture=Capture(layers=…)",
    "names_filter": "capture=Capture(layers=…, sites=…)",
    "output_hidden_states": "capture=Capture(layers=…)",
    "output_residual_stream": "capture=Capture(layers=…)",
    "patch": "edits=Replace(…)",
    "plan": "capture=…, edits=…, probes=…, or SamplingParams(capture=…, edits=…, probes=…)",
    "probe": "probes=…",
    "return_hidden_states": "capture=Capture(layers=…)",
    "sites": "capture=Capture(layers=…, sites=…)",
    "steer": "edits=Steer(vector, layer=…)",
    "steer_vector": "steer=Steer(vector, layer=…)",
    "steer_vector_request": "steer=Steer(vector, layer=…)",
    "steering": "steer=Steer(vector, layer=…)",
    "steering_vectors": "steer=Steer(vector, layer=…), or SamplingParams(steering_vectors=…)",
}


# The same of sampling parameters, by the names of transformers and short forms.
_TRANSFORMERS = {
    "do_sample": "temperature=0",
    "num_return_sequences": "n=…",
    "eos_token_id": "stop_token_ids=[…]",
    "stop_sequences": "stop=[…]",
    "temp": "temperature=…",
    **dict.fromkeys(("max_length", "max_new_tokens"), "max_tokens=…"),
}
_OF_SAMPLING = {
    **{name: f"SamplingParams({name}=…)" for name in SamplingArguments.__annotations__},
    **{name: f"SamplingParams({meant})" for name, meant in _TRANSFORMERS.items()},
}
_IN_A_CALL = {**_OF_SAMPLING, **_INSTEAD}
_SAMPLING = {**_INSTEAD, **_TRANSFORMERS, "num_beams": "LLM.beam_search(…)"}
# Fields of requests to a server that are no sampling parameters; and how alike a name must be to
# one of these to be taken for it.
_BODY = (
    *("model", "prompt", "messages", "input", "stream", "stream_options", "echo", "suffix", "user"),
    *("max_completion_tokens", "max_output_tokens", "top_logprobs", "best_of", "prompt_embeds"),
    *("tools", "tool_choice", "response_format", "chat_template", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message", "add_special_tokens", "documents"),
    *("priority", "request_id", "cache_salt", "vllm_xargs", "return_token_ids", "store"),
    *("return_tokens_as_token_ids", "truncate_prompt_tokens", "use_beam_search"),
)
_VERY_ALIKE = 0.85
# The same of an engine: settings of midstream that are no arguments, and transformers' names.
_SETTINGS = {
    **{name: f"generate(prompt, {meant})" for name, meant in _OF_SAMPLING.items()},
    **{name: f"generate(prompt, {name}=…)" for name in ("edits", "probes", "steer", "controller")},
    "capture": "layers=[…] for every request, or generate(prompt, capture=…)",
    **{name: f'midstream={{"{name}": …}}' for name in Config.__struct_encode_fields__},
    "steering": 'enable_steering=True, or midstream={"steering": …} for edits of every request',
    "device": "to leave it out (vLLM has one device, that of its build)",
    "device_map": "tensor_parallel_size=…, the number of GPUs",
    "torch_dtype": "dtype=…",
    **dict.fromkeys(("load_in_8bit", "load_in_4bit"), "quantization=…"),
    **dict.fromkeys(("n_ctx", "max_length", "max_seq_len"), "max_model_len=…"),
}


def check_names(function: str, others: Iterable[str], *known: Callable[..., Any]) -> None:
    """Check that arguments of a call are those of some functions, or midstream's, none misspelt.

    Others that resemble nothing are left to vLLM, which may know more.
    """
    _check_names(function, others, known, _IN_A_CALL, OWN)


def check_sampling_names(others: Iterable[str], known: Callable[..., Any]) -> None:
    """Check that arguments of SamplingParams are those of its class; see `check_names`."""
    _check_names("SamplingParams", others, (known,), _SAMPLING, OWN)


def check_body_names(others: Iterable[str]) -> None:
    """Check that fields of a request to a server are not nearly those that it knows: vLLM's server
    ignores the fields that it does not know.
    """
    known = {*SamplingArguments.__annotations__, *_BODY}
    for name in others:
        if name in known:
            continue
        close = closest(name, known, _VERY_ALIKE)
        if close or name in _TRANSFORMERS:
            shown = _TRANSFORMERS.get(name, f"{close}=…")
            raise SpecError(name, f"the server ignores this field; did you mean {shown}?")


def check_engine_names(function: str, others: Iterable[str], *known: Callable[..., Any]) -> None:
    """Check that arguments of an engine are those of some functions; see `check_names`."""
    _check_names(function, others, known, _SETTINGS, ())


def _check_names(
    function: str,
    others: Iterable[str],
    known: Iterable[Callable[..., Any]],
    instead: Mapping[str, str],
    own: Iterable[str],
) -> None:
    parameters = _parameters(*known)
    for name in others:
        if name in parameters:
            continue
        close = "" if name in instead else closest(name, parameters.union(own))
        shown = f"{close}=…" if close else instead.get(name) or instead.get(closest(name, instead))
        if shown:
            raise SpecError(name, f"{function}() has no such argument; did you mean {shown}?")


@functools.cache
def _parameters(*functions: Callable[..., Any]) -> frozenset[str]:
    return frozenset().union(*(inspect.signature(function).parameters for function in functions))


def per_prompt(name: str, value: Any, count: int) -> list[Any]:
    """Return an argument's value for each prompt: of several, a list has one entry each, and a flat
    list of several edits or probes, which can mean two things, is rejected.
    """
    if not _is_list(value):
        return [value] * count
    if name == "capture":
        with at(name):
            if read_short_capture(value) is not None:
                return [value] * count
    if name in _SEVERAL and not _is_per_prompt(value):
        if count > 1 and len(value) > 1:
            what = _WHAT[name]
            raise SpecError(
                name,
                f"a flat list of {len(value)} {what} for {count} prompts can be read two ways; "
                "give one list per prompt: [[a], [b]] for one each, [[a, b], [a, b]] for all of "
                "them each; a single value without a list is for all prompts",
            )
        return [value] * count
    if name == "capture":
        for index, entry in enumerate(value):
            if not isinstance(entry, (type(None), bool, ReadOut, Mapping, list, tuple)):
                with at(f"{name}[{index}]"):
                    Capture.parse(entry)
    if len(value) != count:
        prompts = "1 prompt" if count == 1 else f"{count} prompts"
        raise SpecError(name, f"{len(value)} entries for {prompts}; give one, or one each")
    return list(value)


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if _is_list(value) else [value]


def _has_entries(name: str, value: Any) -> TypeGuard[Sequence[Any]]:
    """Return whether an argument of several prompts is a list with one entry each."""
    if not _is_list(value):
        return False
    if name == "capture":
        return not _is_short(value)
    return name not in _SEVERAL or _is_per_prompt(value)


def _is_short(value: Any) -> bool:
    """Return whether a value is a short form of a capture, which may be malformed."""
    try:
        return read_short_capture(value) is not None
    except SpecError:
        return True


def _is_per_prompt(value: Sequence[Any]) -> bool:
    return any(entry is None or _is_list(entry) for entry in value)


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    """Return whether a value is a list, rather than the single edit (vector, layer)."""
    return isinstance(value, (list, tuple)) and not is_placed_vector(value)
