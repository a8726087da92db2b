"""What the OpenAPI schema says of vLLM's own endpoints: that a body, and an answer, have one field
more.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from midstream.config import KEY
from midstream.serving.server import PATHS
from midstream.serving.wishes import RETURNS
from midstream.spec.operations import OPS

_ASKED, _TOLD = "MidstreamRequest", "MidstreamAnswer"
_COMPONENTS = "#/components/schemas/"


def add_fields(app: FastAPI) -> None:
    """Has the app's schema tell of the field `midstream`."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        schema = original()  # the same one each time
        schemas = schema.setdefault("components", {}).setdefault("schemas", {})
        if _ASKED not in schemas:
            schemas.update({_ASKED: _asked(), _TOLD: _told()})
            for path in PATHS:
                operation = schema["paths"].get(path, {}).get("post")
                if operation is not None:
                    _extend(operation, schemas)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


def _extend(operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if body is not None:
        _add(body, schemas, _ASKED)
    answer = operation["responses"].get("200", {}).get("content", {}).get("application/json")
    if answer is not None:
        _add(answer, schemas, _TOLD)


def _add(content: dict[str, Any], schemas: dict[str, Any], name: str) -> None:
    schema = content.setdefault("schema", {})
    named = schema.get("$ref", "").removeprefix(_COMPONENTS)
    target = schemas[named] if named else schema
    if not target:
        target["type"] = "object"
    target.setdefault("properties", {})[KEY] = {"$ref": _COMPONENTS + name}


def _asked() -> dict[str, Any]:
    def one_or_more(what: str, **properties: Any) -> dict[str, Any]:
        one = {"type": "object", "properties": properties}
        return {"description": what, "anyOf": [one, {"type": "array", "items": one}]}

    layers = {
        "anyOf": [
            {"const": "all"},
            {"type": "integer"},
            {"type": "array", "items": {"type": "integer"}},
        ]
    }
    edits = one_or_more("Edits, in their order.", op={"enum": list(OPS)}, layer={}, positions={})
    return {
        "title": _ASKED,
        "description": "What to capture, edit and probe; and how the answer is to have it.",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "capture": one_or_more(
                "Captures. By name of a sink, as its consumers write them, is another form.",
                layers=layers,
                sites={},
                positions={},
                codec={"type": "string"},
                sink={"type": "string"},
                tag={"type": "string"},
                stream={"type": "boolean"},
            ),
            "edits": edits,
            "steer": {**edits, "description": "Edits; one without `op` steers."},
            "probes": one_or_more(
                "Probes: a number a token.", direction={}, layer={}, name={"type": "string"}
            ),
            "activations": {
                "description": "How captured rows come that go to no sink.",
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


def _told() -> dict[str, Any]:
    return {
        "title": _TOLD,
        "description": "What was done. On each choice instead, where there are several.",
        "type": "object",
        "properties": {
            "receipt": {"type": "object", "description": "What was asked for and what was done."},
            "probes": {"type": "object", "description": "Scores, positions and tokens, by name."},
            "activations": {
                "type": "object",
                "description": "Captured rows as safetensors: in base64, or where to fetch them.",
            },
            "captures": {"type": "object", "description": "What became of rows, by sink."},
        },
    }
