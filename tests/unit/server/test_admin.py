"""Vectors and steering are changed by whom the server lets, and by nobody else."""

import re

import pytest
from support.serving_fake import make, refused, serving
from unit.server.asgi import raw_request

from midstream.config.http import ADMIN_HEADER

pytestmark = pytest.mark.anyio
VECTORS, STEERING = "/v1/midstream/vectors", "/v1/midstream/steering"
CAPTURES = "/v1/midstream/captures"
GUARDS = "/v1/midstream/guards"
V = [1.0, 2.0, 2.0]


CHANGES = [
    ("PUT", f"{VECTORS}/x", V),
    ("DELETE", f"{VECTORS}/x", None),
    ("PUT", STEERING, {"base": []}),
    ("DELETE", STEERING, None),
    ("PUT", f"{CAPTURES}/x", {"capture": {"layers": [1]}}),
    ("DELETE", CAPTURES, None),
    ("PUT", f"{GUARDS}/x", {"probe": {"direction": V, "layer": 1}, "above": 1.0}),
    ("POST", "/v1/steering/set", {"vectors": {"post_block": {"1": V}}}),
    ("POST", "/v1/steering/clear", None),
    ("POST", "/v1/steering/modules/register", {"name": "x", "vectors": V}),
    ("POST", "/v1/steering/modules/unregister", {"name": "x"}),
]
READS = [VECTORS, STEERING, "/v1/midstream/sites", CAPTURES, "/v1/steering",
         "/v1/steering/layers", "/v1/steering/modules"]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "body"), CHANGES)
async def test_changes_need_the_admin_key_where_there_is_one(method, path, body, monkeypatch):
    monkeypatch.setenv("MIDSTREAM_ADMIN_KEY", "secret")
    async with serving(host="0.0.0.0") as (site, client):
        site.engine.vectors.register("x", V)
        epoch = site.engine.steering.epoch
        await refused(client.request(method, path, json=body), 401)
        wrong = {ADMIN_HEADER: "wrong"}
        await refused(client.request(method, path, json=body, headers=wrong), 401)
        assert (site.engine.steering.epoch, len(site.engine.vectors)) == (epoch, 1)
        right = {ADMIN_HEADER: "secret"}
        answer = await client.request(method, path, json=body, headers=right)
        assert answer.status_code in (200, 204)


async def test_every_route_but_those_that_change_nothing_for_others_needs_the_admin_key(
    monkeypatch,
):
    monkeypatch.setenv("MIDSTREAM_ADMIN_KEY", "secret")
    # What a client computes for itself, and what is its own.
    free = {"/v1/midstream/sweep", "/v1/midstream/fit", "/v1/midstream/tokens",
            "/v1/midstream/requests/x/update", "/v1/midstream/activations/x",
            "/v1/steering/vectors", "/v1/steering/dynamic"}  # fmt: skip
    async with serving() as (site, client):
        tried = set()
        for route in site.app.routes:
            path = re.sub(r"\{[^}]*\}", "x", getattr(route, "path", ""))
            if not path.startswith(("/v1/midstream", "/v1/steering")) or path in free:
                continue
            for method in route.methods - {"GET", "HEAD"}:
                tried.add((method, path))
                await refused(client.request(method, path), 401, "admin key")
    assert {(method, path) for method, path, _ in CHANGES} < tried
    assert len(tried) >= 12


@pytest.mark.parametrize(("method", "path", "body"), CHANGES)
async def test_beyond_loopback_without_a_key_nobody_may(method, path, body):
    async with serving(host=None) as (site, client):
        site.engine.vectors.register("x", V)
        await refused(client.request(method, path, json=body), 403)
        # A body that is malformed tells nobody more.
        await refused(client.request(method, path, json={"unknown": 1}), 403)
        for read in READS:
            assert (await client.get(read)).status_code == 200


@pytest.mark.parametrize(("method", "path", "body"), CHANGES)
async def test_a_page_of_another_place_may_not(method, path, body):
    async with serving() as (site, client):
        site.engine.vectors.register("x", V)
        page = {"origin": "https://example.org"}
        await refused(client.request(method, path, json=body, headers=page), 403)
        answer = await client.request(method, path, json=body)
        assert answer.status_code in (200, 204)


async def test_before_the_engine_is_there_all_is_503():
    async with serving() as (site, client):
        site.server._llm = None
        for method, path, body in CHANGES:
            await refused(client.request(method, path, json=body), 503)
        for path in READS:
            if path != CAPTURES:
                await refused(client.get(path), 503)


async def test_a_body_is_not_read_before_the_admin_key_is_checked(monkeypatch):
    monkeypatch.setenv("MIDSTREAM_ADMIN_KEY", "secret")
    site = await make()
    for method, path in (
        ("PUT", "/v1/midstream/steering"),
        ("PUT", "/v1/midstream/vectors/x"),
        ("POST", "/v1/steering/set"),
    ):
        sent, taken = await raw_request(site.app, method=method, path=path)
        assert (sent[0]["status"], taken) == (401, 0), path
