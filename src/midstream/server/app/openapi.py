"""OpenAPI schema of the field `midstream`, which vLLM's own endpoints accept and return."""

from __future__ import annotations

import inspect
from typing import Any

from fastapi import FastAPI

from midstream.config.config import KEY
from midstream.plan.control.control_laws import Threshold
from midstream.plan.control.controller import POLICIES
from midstream.plan.operations import KINDS_BY_OP, OPS
from midstream.plan.probe import Probe
from midstream.plan.readouts import KINDS, Capture
from midstream.results.readouts import RESULTS
from midstream.server.request_field import RETURNS
from midstream.server.server import PATHS

_REQUEST, _RESPONSE = "MidstreamRequest", "MidstreamAnswer"
_COMPONENTS = "#/components/schemas/"
_TYPES = {"str": "string", "bool": "boolean", "int": "integer"}
_LAYERS = {
    "anyOf": [
        {"const": "all"},
        {"type": "integer"},
        {"type": "array", "items": {"type": "integer"}},
    ]
}


def add_fields(app: FastAPI) -> None:
    original = app.openapi

    def openapi() -> dict[str, Any]:
        schema = original()  # the same one each time
        schemas = schema.setdefault("components", {}).setdefault("schemas", {})
        if _REQUEST not in schemas:
            schemas.update({_REQUEST: _request_schema(), _RESPONSE: _response_schema()})
            for path in PATHS:
                operation = schema["paths"].get(path, {}).get("post")
                if operation is not None:
                    _extend(operation, schemas)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


def _extend(operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    request, answer = operation.get("requestBody", {}), operation["responses"].get("200", {})
    for body, name in ((request, _REQUEST), (answer, _RESPONSE)):
        content = body.get("content", {}).get("application/json")
        if content is not None:
            schema = content.setdefault("schema", {})
            named = schema.get("$ref", "").removeprefix(_COMPONENTS)
            target = schemas[named] if named else schema
            if not target:
                target["type"] = "object"
            target.setdefault("properties", {})[KEY] = {"$ref": _COMPONENTS + name}


def _request_schema() -> dict[str, Any]:
    def one_or_more(what: str, **properties: Any) -> dict[str, Any]:
        schema = {"type": "object", "properties": properties}
        return {"description": what, "anyOf": [schema, {"type": "array", "items": schema}]}

    controller: dict[str, Any] = {
        Threshold.word: {"type": "object"},
        "declared": {"type": "string"},
        "name": {"type": "string"},
        "on_error": {"enum": list(POLICIES)},
        "edits": {"type": "object"},
    }
    marks = {kind.key: {"const": True} for kind in KINDS.values() if kind.is_form({kind.key: True})}
    captures = {**marks, **_arguments(Capture, *KINDS.values()), "layers": _LAYERS}
    operations = {"op": {"enum": list(OPS)}, **_arguments(*KINDS_BY_OP.values())}
    edits = one_or_more("Edits, applied in order.", **operations)
    capture = one_or_more(
        "Captures. Or true, layers, or names of sites with their layers, for every token; or an "
        "object of capture requests by name of the sink.",
        **captures,
    )
    short = ({"const": True}, {"type": "string"}, {"type": "integer"})
    listed = ({"type": "array", "items": {"type": kind}} for kind in ("integer", "string"))
    capture["anyOf"] += [*short, *listed]
    return {
        "title": _REQUEST,
        "description": "What to capture, edit and probe, and how to return captured rows.",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "capture": capture,
            "edits": edits,
            "steer": {**edits, "description": "Edits; `op` defaults to `steer`."},
            "probes": one_or_more(
                "Probes: one score per token, or one per class.", **_arguments(Probe)
            ),
            "controller": {
                "description": "Changes the edits by the scores: a declared name, or an object.",
                "anyOf": [{"type": "string"}, {"type": "object", "properties": controller}],
            },
            "activations": {
                "description": "How to return captured rows that go to no sink.",
                "enum": list(RETURNS),
                "default": RETURNS[0],
            },
        },
        "examples": [
            {
                "capture": {"layers": [10, 20], "positions": "last_prompt"},
                "edits": [{"op": "scale", "factor": 1.5, "layer": 3}],
                "activations": "inline",
            }
        ],
    }


def _arguments(*kinds: type) -> dict[str, dict[str, str]]:
    """Return the schemas of the arguments of constructors, by name; with the type that all give."""
    words: dict[str, set[str]] = {}
    for kind in kinds:
        for name, parameter in inspect.signature(kind).parameters.items():
            words.setdefault(name.rstrip("_"), set()).add(_TYPES.get(parameter.annotation, ""))
    # A set of one type, which may be unknown.
    agreed = {name: min(types) if len(types) == 1 else "" for name, types in words.items()}
    return {name: {"type": word} if word else {} for name, word in agreed.items()}


def _response_schema() -> dict[str, Any]:
    return {
        "title": _RESPONSE,
        "description": "Results. With several choices, each choice has its own field.",
        "type": "object",
        "properties": {
            "receipt": {"type": "object", "description": "What was requested and what was done."},
            "probes": {"type": "object", "description": "Scores, positions and tokens, by name."},
            "activations": {
                "type": "object",
                "description": "Captured rows as safetensors: in base64, or the URL to fetch.",
            },
            **{
                name: {"type": kind.json_type, "description": kind.about}
                for name, kind in sorted(RESULTS.items())
            },
            "captures": {"type": "object", "description": "Result of storing the rows, by sink."},
        },
    }
