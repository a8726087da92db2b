"""Fields of other tools, and misspelt or misplaced ones of ours, which vLLM would ignore."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Collection, Container, Mapping
from typing import NamedTuple

from midstream.config.config import KEY
from midstream.errors import SpecError
from midstream.plan import (
    Attention,
    Capture,
    Clamp,
    Feature,
    Gate,
    Local,
    Reconstruct,
    Replace,
    Steer,
)
from midstream.plan.control.control_laws import Threshold
from midstream.plan.operations.plain import PLAIN
from midstream.sites import BY_NAME

VLLM_LENS, EASYSTEER, FORK = "vllm-lens", "EasySteer", "the vLLM fork with steering"

# Fields inside `midstream`, which are misplaced anywhere else.
OWN = ("capture", "edits", "steer", "probes", "controller")
# Dicts in a body that vLLM ignores; clients put fields there that belong to the body itself.
_IGNORED = ("extra_body", "extra_args", "sampling_params")
_NEAR = 2  # edits between a name and its misspelling
# Words within that distance of `midstream` that are names of their own.
_ENGLISH = ("mainstream",)
_FORM = ("layer", "layers", "site", "sites", "op", "vector", "positions", "hooks", Threshold.word)
_MAX_FIELDS = 4096
_DEPTH = 4  # of lists around something of that form, at most

# A JSON key. One with a space is no field: text between quotes is skipped at its first space.
_KEYS = re.compile(rb'"([^"\\ ]{3,40})"\s*:')
_MAX_KEYS = 1024
# Bytes that are scanned at once, which bounds memory, and more than a key has with its quotes.
_CHUNK, _KEY = 1 << 20, 64


class ForeignField(NamedTuple):
    """A field of another tool."""

    tool: str
    instead: str


def _call(kind: type, *values: str, **named: str) -> str:
    arguments = [*values, *(f"{name}={value}" for name, value in named.items())]
    return f"{kind.__name__}({', '.join(arguments)})"


def _sites(*names: str) -> str:
    return f"[{', '.join(json.dumps(BY_NAME[name].name) for name in names)}]"


def _vectors(**phase: str) -> str:
    steer = _call(Steer, "vector", layer="…", scale="…", **phase)
    return f"give the vectors as `edits`: {steer}"


def _clamps(**phase: str) -> str:
    clamp = _call(Clamp, "vector", low="…", high="…", layer="…", **phase)
    return f"give them as `edits`: {clamp}"


_PROMPT, _GENERATED = '"prompt"', '"generated"'
_NAMES = f"""register the vectors, and give `edits`: {_call(Steer, '"name"')}"""
_PATCH = f"give the rows as `edits`: {_call(Replace, 'row', layer='…', positions='[…]')}"
_FEATURES = (
    "register the SAE, and give its features as `edits`: "
    f"""{_call(Feature, sae='"name"', index="{…}")}"""
)
_RECONSTRUCT = f"""register the SAE, and give `edits`: {_call(Reconstruct, '"name"')}"""
_STATES = f"ask for rows with `capture`: {_call(Capture, layers='[…]')}"
_QUERIES = (
    "ask for rows with `capture`: "
    f"{_call(Capture, layers='[…]', sites=_sites('q', 'k', 'rot_q', 'rot_k'))}"
)
_ATTENTION = f"""ask for weights with `capture`: {_call(Attention, "[…]", reduce='"full"')}"""
_HOOKS = (
    "over HTTP midstream runs no code of a client; read with `capture` or `probes`, change with "
    f"`edits` ({', '.join(PLAIN)}); in Python, {_call(Local, 'function', layer='…')} is an edit"
)

FOREIGN: Mapping[str, ForeignField] = {
    "output_residual_stream": ForeignField(VLLM_LENS, _STATES),
    "apply_steering_vectors": ForeignField(VLLM_LENS, _vectors()),
    "apply_hooks": ForeignField(VLLM_LENS, _HOOKS),
    "output_qk": ForeignField(VLLM_LENS, _QUERIES),
    "activations_transport": ForeignField(
        VLLM_LENS, "choose with the field `activations` of `midstream`: handle, inline or none"
    ),
    "steering": ForeignField(EASYSTEER, _vectors()),
    "steer_vector_request": ForeignField(EASYSTEER, _vectors()),
    "steering_vectors": ForeignField(FORK, _vectors()),
    "prefill_steering_vectors": ForeignField(FORK, _vectors(phase=_PROMPT)),
    "decode_steering_vectors": ForeignField(FORK, _vectors(phase=_GENERATED)),
    "steering_clamps": ForeignField(FORK, _clamps()),
    "prefill_steering_clamps": ForeignField(FORK, _clamps(phase=_PROMPT)),
    "decode_steering_clamps": ForeignField(FORK, _clamps(phase=_GENERATED)),
    "steering_name": ForeignField(FORK, _NAMES),
    "steering_module_ref": ForeignField(FORK, _NAMES),
    "steering_gates": ForeignField(
        FORK, f"give `edits`: {_call(Gate, 'edit', 'direction', threshold='…')}"
    ),
    "capture_wait": ForeignField(
        FORK, "leave it out: results always come once the sinks have the rows"
    ),
    "patch": ForeignField(FORK, _PATCH),
    "patch_vectors": ForeignField(FORK, _PATCH),
    "sae_clamp_specs": ForeignField(FORK, _FEATURES),
    "sae_full_reconstruction_specs": ForeignField(FORK, _RECONSTRUCT),
    "return_hidden_states": ForeignField("SGLang", _STATES),
    "output_hidden_states": ForeignField("transformers", _STATES),
    "output_attentions": ForeignField("transformers", _ATTENTION),
}


def names_in(body: bytes, known: Container[str]) -> bool:
    """Return whether a JSON body may have a field that `check_body` looks at, beside those that
    vLLM knows: its keys, at any depth, are read without parsing, but none with escapes or spaces.
    """
    keys: set[bytes] = set()
    start = 0
    while start < len(body):
        # Behind a key that begins in the chunk is only white space up to this colon.
        stop = body.find(b":", start + _CHUNK + _KEY) + 1 or len(body)
        keys.update(_KEYS.findall(body, start, stop))
        if len(keys) > _MAX_KEYS:
            return True
        start = max(start + _CHUNK, stop - _KEY)
    return any(name not in known for name in _suspects(frozenset(keys)))


def check_body(body: Mapping[str, object], known: Collection[str]) -> None:
    """Check that a body's fields, but those that vLLM knows, ask nothing of midstream."""
    _check(body, str, known, _place_in_body)
    for outer in _IGNORED:
        if outer in body and outer not in known:
            _check(body[outer], f"{outer}.{{}}".format, (), _place_in_body)
    _check(body.get("vllm_xargs"), "vllm_xargs.{}".format, (KEY,), _place_in_body)


def check_extra_args(extra_args: Mapping[str, object]) -> None:
    """Check that `SamplingParams.extra_args` ask nothing of midstream but in its own field."""
    _check(extra_args, "extra_args[{!r}]".format, (KEY,), _place_in_python)


def _place_in_body(name: str) -> str:
    return f'the body\'s field `{KEY}`: {{"{KEY}": {{"{name}": …}}}}'


def _place_in_python(name: str) -> str:
    return (
        f"the call's argument `{name}`, in midstream.SamplingParams({name}=…), or in "
        f'extra_args={{"{KEY}": {{"{name}": …}}}}'
    )


def _check(
    fields: object,
    path_of: Callable[[str], str],
    known: Collection[str],
    place_of: Callable[[str], str],
) -> None:
    if fields is None or not isinstance(fields, (dict, Mapping)):
        return
    if len(fields) > _MAX_FIELDS:
        raise SpecError("", f"expected at most {_MAX_FIELDS} fields, got {len(fields)}")
    if not fields.keys() - known:
        return
    for name, value in fields.items():
        if isinstance(name, str) and value is not None and name not in known:
            problem = _problem(name, value, place_of)
            if problem:
                raise SpecError(path_of(name), problem)


def _problem(name: str, value: object, place_of: Callable[[str], str]) -> str:
    """Return what is wrong with a field that vLLM does not define; empty: it is not midstream's."""
    if name in OWN:
        return f"the field belongs in {place_of(name)}"
    if name == KEY:
        return "the field belongs at the top level of the body"
    if name in FOREIGN:
        field = FOREIGN[name]
        return f"a field of {field.tool}, which midstream does not read here; {field.instead}"
    near = _nearest(name.casefold())
    if near == KEY and (name not in _ENGLISH or isinstance(value, Mapping)):
        return f"unknown field; did you mean `{KEY}`?"
    if near in OWN and (_has_form(value) or (_is_empty(value) and _is_slip(name, near))):
        return f"unknown field; did you mean `{near}`? It belongs in {place_of(near)}"
    return ""


def _is_empty(value: object) -> bool:
    """Return whether a value is a list or dict of nothing, which has no form to be known by."""
    return isinstance(value, (list, tuple, Mapping)) and not value


def _is_slip(name: str, own: str) -> bool:
    """Return whether a name is one letter away from a field's, or has its letters in any order."""
    name = name.casefold()
    return _distance(name, own) <= 1 or sorted(name) == sorted(own)


def _has_form(value: object, depth: int = 0) -> bool:
    """Return whether a value looks like a part of a plan, or a list of these."""
    if isinstance(value, (list, tuple)):
        return depth < _DEPTH and any(_has_form(part, depth + 1) for part in value[:8])
    if isinstance(value, Mapping):
        return any(name in value for name in _FORM)
    return type(value).__module__.startswith("midstream.plan.")


@functools.lru_cache(maxsize=64)  # clients send the same keys again and again
def _suspects(keys: frozenset[bytes]) -> list[str]:
    names = [key.decode("utf-8", "replace") for key in keys]
    return [name for name in names if name in FOREIGN or _nearest(name.casefold())]


@functools.lru_cache(maxsize=4096)
def _nearest(name: str) -> str:
    """Return the name of midstream that is at most two edits away; empty: none."""
    candidates = [(_distance(name, own), own) for own in (KEY, *OWN) if _may_be(name, own)]
    distance, nearest = min(candidates, default=(_NEAR + 1, ""))
    return nearest if distance <= _NEAR else ""


def _may_be(name: str, own: str) -> bool:
    """Return False if names are surely over two edits apart: one of three parts survives two."""
    if abs(len(name) - len(own)) > _NEAR:
        return False
    third = len(own) // 3
    parts = (own[:third], own[third : 2 * third], own[2 * third :])
    return any(part in name for part in parts)


def _distance(first: str, second: str) -> int:
    """Return the number of letters to insert, delete or replace between two names."""
    row = list(range(len(second) + 1))
    for i, letter in enumerate(first, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(second, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (letter != other))
    return row[-1]
