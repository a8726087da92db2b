"""Endpoint for the texts of tokens, such as those that lenses return."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from midstream.errors import SpecError
from midstream.runtime.frontend.request.heavy_work import in_thread
from midstream.runtime.frontend.request.prompt.tokenized import texts_of
from midstream.server.routes.common import MidstreamRoute, ServerDep, error_responses

router = APIRouter(route_class=MidstreamRoute, tags=["midstream: tokens"])

MAX_IDS = 1 << 16


class TokensBody(BaseModel):
    """Tokens."""

    model_config = ConfigDict(extra="forbid", strict=True)

    ids: list[Annotated[int, Field(ge=0, lt=1 << 31)]] = Field(
        max_length=MAX_IDS, examples=[[7042, 6872]], description="Token ids."
    )


class TokensAnswer(BaseModel):
    """Texts of tokens."""

    texts: list[str] = Field(
        examples=[[" Paris", " London"]],
        description="The text of each, decoded alone: a part of a character is U+FFFD.",
    )


@router.post(
    "/v1/midstream/tokens",
    summary="Return the text of each token",
    responses=error_responses(400, 401, 403, 413, 503),
)
async def tokens(body: TokensBody, server: ServerDep) -> TokensAnswer:
    size = server.llm.vllm_config.model_config.get_vocab_size()
    for index, token_id in enumerate(body.ids):
        if token_id >= size:
            raise SpecError(f"ids[{index}]", f"expected 0 to {size - 1}, got {token_id}")
    return TokensAnswer(texts=await in_thread(texts_of, server.llm, body.ids))
