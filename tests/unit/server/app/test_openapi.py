"""The OpenAPI schema has the field `midstream` where vLLM's own endpoints take and give it."""

from typing import Any

import pytest
from fastapi import FastAPI
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from midstream.plan.operations import OPS
from midstream.server.app.openapi import add_fields
from midstream.server.request_field import read_field
from midstream.server.server import PATHS


class CompletionRequest(BaseModel):
    prompt: str


class CompletionResponse(BaseModel):
    text: str


def schema_of(*, named_answers: bool) -> dict[str, Any]:
    app = FastAPI()
    for path in (*PATHS, "/v1/embeddings"):
        model = CompletionResponse if named_answers else None

        @app.post(path, response_model=model)
        async def answer(body: CompletionRequest) -> Any: ...

    add_fields(app)
    assert app.openapi() == app.openapi()
    return app.openapi()


@pytest.mark.parametrize("named_answers", [True, False])
def test_bodies_and_answers_of_the_three_endpoints_have_the_field(named_answers):
    schema = schema_of(named_answers=named_answers)
    schemas = schema["components"]["schemas"]
    for path in PATHS:
        operation = schema["paths"][path]["post"]
        body = operation["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": "#/components/schemas/CompletionRequest"}
        answer = operation["responses"]["200"]["content"]["application/json"]["schema"]
        told = schemas["CompletionResponse"] if named_answers else answer
        assert told["properties"]["midstream"] == {"$ref": "#/components/schemas/MidstreamAnswer"}
    asked = schemas["CompletionRequest"]["properties"]
    assert asked["midstream"] == {"$ref": "#/components/schemas/MidstreamRequest"}
    assert "prompt" in asked


def test_an_endpoint_that_takes_no_field_says_nothing_of_it():
    schema = schema_of(named_answers=False)
    answer = schema["paths"]["/v1/embeddings"]["post"]["responses"]["200"]["content"]
    assert "properties" not in answer["application/json"]["schema"]


def test_the_schema_of_the_field_takes_what_the_server_takes_and_its_example_is_one():
    field = schema_of(named_answers=False)["components"]["schemas"]["MidstreamRequest"]
    check = Draft202012Validator(field)
    taken: list[dict[str, Any]] = [
        *field["examples"],
        {},
        {"capture": {"layers": "all", "sites": ["resid_pre", "mlp_out"], "codec": "full8"}},
        {"capture": [{"layers": 3, "stream": True}, {"layers": [1, 2], "positions": [0, 5]}]},
        {"steer": {"vector": [1.0], "layer": 2}, "activations": "none"},
        {"capture": {"layers": [1], "queries": 3, "reduce": {"mass": [0, 1]}}},
        {"probes": [{"direction": {"f32": "AACAPw=="}, "layer": 0, "name": "mood"}]},
    ]
    for one in taken:
        read_field(dict(one))
        check.validate(one)
    assert field["properties"]["edits"]["anyOf"][0]["properties"]["op"]["enum"] == list(OPS)
    for one in ({"captures": {"layers": 1}}, {"activations": "file"}, {"edits": {"op": "halve"}}):
        assert not check.is_valid(one)
        with pytest.raises(ValueError, match=next(iter(one))):
            read_field(dict(one))
