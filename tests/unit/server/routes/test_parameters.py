"""Parameters of the model over HTTP."""

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load
from support.serving_fake import refused, serving

from midstream.deadlines import within

pytestmark = pytest.mark.anyio
HEAD = "lm_head.weight"
PATH = f"/v1/midstream/parameters/{HEAD}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_an_allowed_parameter_comes_bit_for_bit(dtype):
    async with serving(parameters=["model.norm.weight", HEAD]) as (site, client):
        value = site.engine.parameters[HEAD] = torch.randn(7, 3).to(dtype)
        answer = await client.get(PATH)
    assert answer.headers["content-type"] == "application/octet-stream"
    found = load(answer.content)
    assert list(found) == [HEAD]
    assert found[HEAD].dtype == dtype
    assert torch.equal(found[HEAD], value)


async def test_a_parameter_that_the_setting_does_not_name_is_not_read():
    async with serving() as (site, client):
        site.engine.parameters[HEAD] = torch.randn(7, 3)
        await refused(client.get(PATH), 403, "but none; start it with")
    async with serving(parameters=["model.norm.weight"]) as (site, client):
        site.engine.parameters[HEAD] = torch.randn(7, 3)
        await refused(client.get(PATH), 403, "http.parameters")
        await refused(client.get("/v1/midstream/parameters/model.norm.weight"), 400, "there is no")
        # A rejected request does not block the next one.
        await refused(client.get("/v1/midstream/parameters/model.norm.weight"), 400)


async def test_a_client_that_waits_too_long_for_others_is_503():
    async with serving(parameters=[HEAD]) as (site, client):
        site.engine.parameters[HEAD] = torch.randn(7, 3)
        site.server.settings = replace(site.server.settings, wait_seconds=0.05)
        async with site.server.parameter_lock:
            await refused(within(30, client.get(PATH)), 503, "http.wait_seconds")
        assert (await client.get(PATH)).status_code == 200
