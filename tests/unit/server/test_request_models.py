"""The fields that this vLLM defines are known from the endpoints themselves."""

from fastapi import FastAPI
from pydantic import BaseModel, Field

from midstream.server.body_values import body_fields


class First(BaseModel):
    """A body."""

    prompt: str = ""
    steering: int = Field(1, alias="patch")


class Second(BaseModel):
    """Another body of the same endpoint."""

    capture: int = 1


def app_with(endpoint, module="vllm.entrypoints.openai.api_server"):
    endpoint.__module__ = module
    app = FastAPI()
    app.add_api_route("/v1/it", endpoint, methods=["POST"])
    return app


def test_the_fields_of_all_models_of_an_endpoint_are_found():
    async def endpoint(body: First | Second) -> None: ...

    fields = {"prompt", "steering", "patch", "capture"}
    endpoint.__annotations__ = {"body": First | Second}
    assert body_fields(app_with(endpoint)) == {"/v1/it": fields}


def test_endpoints_of_others_and_without_a_model_are_left_out():
    async def plain(number: int) -> None: ...

    async def unknown(body) -> None: ...

    async def other(body) -> None: ...

    unknown.__annotations__ = {"body": "NotThere"}
    other.__annotations__ = {"body": First}
    assert body_fields(app_with(plain)) == {}
    assert body_fields(app_with(other, module="plugin.of.others")) == {}
    assert body_fields(None) == {}
    unknown_app = FastAPI()
    unknown.__module__ = "vllm.entrypoints"
    unknown_app.add_route("/v1/unknown", unknown, methods=["POST"])
    assert body_fields(unknown_app) == {}


def test_this_vllm_defines_models_for_the_endpoints_that_return_results():
    from vllm.entrypoints.openai.chat_completion import api_router as chat
    from vllm.entrypoints.openai.completion import api_router as completion

    app = FastAPI()
    app.include_router(chat.router)
    app.include_router(completion.router)
    found = body_fields(app)
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert {"seed", "stop", "vllm_xargs"} <= found[path]
        assert not found[path] & {"capture", "steering_vectors", "midstream"}
