"""Texts of tokens over HTTP."""

import pytest
from support.serving_fake import refused, serving

pytestmark = pytest.mark.anyio
PATH = "/v1/midstream/tokens"


async def test_each_token_is_decoded_alone():
    async with serving() as (_, client):
        answer = await client.post(PATH, json={"ids": [97, 98, 97]})
        assert answer.json() == {"texts": ["a", "b", "a"]}
        assert (await client.post(PATH, json={"ids": []})).json() == {"texts": []}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "ids"),
        ({"ids": "a"}, "ids"),
        ({"ids": [1.5]}, "ids.0"),
        ({"ids": [-1]}, "ids.0"),
        ({"ids": [1, 0x110000]}, "ids[1]"),
        ({"ids": [0] * 65537}, "ids"),
        ({"ids": [1], "x": 1}, "x"),
    ],
)
async def test_what_is_malformed_is_refused_with_its_place(body, param):
    async with serving() as (_, client):
        error = await refused(client.post(PATH, json=body), 400)
        assert error["param"] == param
