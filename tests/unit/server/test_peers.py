"""Two API server processes of one server, here two apps in one: each answers for both."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
from support.serving_fake import Site, make, refused, rows
from support.sinking import delivery, put_now
from unit.server.asgi import raw_request

from midstream.runtime.frontend.engine_info import FrontEnds
from midstream.server.peers import Peers, add_kept

pytestmark = pytest.mark.anyio
COMPLETIONS = "/v1/completions"
HANDLES = "/v1/midstream/captures"
WATCH = "/v1/midstream/captures/watch"
KEEP = {"prompt": "abcdef", "midstream": {"capture": {"layers": [1, 2]}}}


@asynccontextmanager
async def two(
    addresses: tuple[str, str] = ("127.0.0.1", "127.0.0.1"), listening: int = 2, **settings: object
) -> AsyncIterator[tuple[list[Site], list[httpx.AsyncClient]]]:
    # Paths of sockets are short.
    with tempfile.TemporaryDirectory(prefix="midstream-") as folder:
        sites = [await make(**settings) for _ in range(2)]
        for number, site in enumerate(sites):
            site.server.peers = Peers(Path(folder), FrontEnds(2, number))
            if number < listening:
                site.server.peers.listen(site.app)
        while len(list(Path(folder).iterdir())) < listening:
            await asyncio.sleep(0.01)
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(site.client(address))
                for site, address in zip(sites, addresses, strict=True)
            ]
            yield sites, clients
        for site in sites:
            site.server.close()
        assert not list(Path(folder).iterdir())
        await end_of(*sites[:listening])


async def end_of(*sites: Site) -> None:
    await asyncio.wait([site.server.peers._task for site in sites], timeout=10)


async def handle_from(client: httpx.AsyncClient, **more: object) -> dict[str, object]:
    answer = await client.post(COMPLETIONS, json=KEEP, **more)
    found: dict[str, object] = answer.json()["midstream"]["activations"]
    return found


async def test_cached_rows_are_fetched_listed_and_deleted_from_either():
    async with two() as (_, (here, there)):
        one, other = await handle_from(here), await handle_from(there)
        for client in (here, there):
            listed = (await client.get(HANDLES)).json()
            assert [each["id"] for each in listed["captures"]] == [one["id"], other["id"]]
            assert listed["bytes"] == one["bytes"] + other["bytes"]
        whole = await there.get(one["url"])
        assert (whole.status_code, len(whole.content)) == (200, one["bytes"])
        assert whole.headers["content-type"] == "application/octet-stream"
        assert whole.headers["cache-control"] == "no-store"
        assert whole.content == (await here.get(one["url"])).content
        part = await there.get(one["url"], headers={"range": "bytes=3-5"})
        assert (part.status_code, part.content) == (206, whole.content[3:6])
        assert (await there.delete(one["url"])).status_code == 204
        for client in (here, there):
            error = await refused(client.get(one["url"]), 404, "there are no rows")
            assert error["param"] == "id"
        assert (await here.get(HANDLES)).json()["bytes"] == other["bytes"]


async def test_edits_have_the_cached_rows_of_the_other_process():
    async with two() as (sites, (here, there)):
        handle = await handle_from(here)
        edit = {"op": "replace", "rows": {"captured": handle["id"], "positions": [4]}, "layer": 1}
        body = {"prompt": "abcdef", "midstream": {"edits": {**edit, "positions": [1]}}}
        assert (await there.post(COMPLETIONS, json=body)).status_code == 200
        ((_, params, _),) = sites[1].engine.calls
        [replace] = params.extra_args["midstream"].plan.edits
        assert replace.rows[0].numpy().tolist() == [41.0] * 3
        edit["rows"]["captured"] = "gone"
        body["midstream"]["edits"] = {**edit, "positions": [1]}
        error = await refused(there.post(COMPLETIONS, json=body), 400, "there are no rows")
        assert error["param"] == "midstream.edits.rows.captured"


@pytest.mark.parametrize("has_key", [False, True])
async def test_rows_of_another_client_are_not_there(has_key):
    keys = [{"authorization": f"Bearer {name}"} for name in "ab"] if has_key else [{}, {}]
    addresses = ("127.0.0.1", "127.0.0.1" if has_key else "10.0.0.9")
    async with two(addresses, has_key=has_key, host="0.0.0.0") as (_, (here, there)):
        handle = await handle_from(here, headers=keys[0])
        assert (await there.get(HANDLES, headers=keys[1])).json()["captures"] == []
        if has_key:
            await refused(there.get(handle["url"], headers=keys[1]), 404)
            assert (await there.get(handle["url"], headers=keys[0])).status_code == 200
        # The address that a client names itself is not believed.
        forged = {**keys[1], "x-midstream-client": "127.0.0.1"}
        assert (await there.get(HANDLES, headers=forged)).json()["captures"] == []


async def test_a_running_request_is_updated_from_either():
    async with two() as (sites, (here, there)):
        go = asyncio.Event()
        sites[0].engine.pause = go.wait
        body = {"prompt": "abc", "midstream": {"edits": {"op": "scale", "factor": 2, "layer": 1}}}
        running = asyncio.create_task(here.post(COMPLETIONS, json=body))
        while not sites[0].engine.calls:
            await asyncio.sleep(0.01)
        ((_, _, name),) = sites[0].engine.calls
        path = f"/v1/midstream/requests/{name}/update"
        answer = await there.post(path, json={"scale": 0.5})
        assert (answer.status_code, answer.json()["choices"][0]["version"]) == (200, 1)
        assert [scale for *_, scale in sites[0].engine.updates] == [0.5]
        assert (await there.post(path, json={"scale": "x"})).status_code == 400
        go.set()
        await running
        await refused(there.post(path, json={"scale": 1}), 404, "no request")


async def test_server_wide_captures_are_changed_in_both_and_by_one_after_the_other():
    async with two() as (sites, clients):
        for first, second in (clients, clients[::-1]):
            bodies = [{"capture": {"layers": [nth % 4]}} for nth in range(6)]
            puts = [c.put(WATCH, json=body) for body in bodies for c in (first, second)]
            assert {one.status_code for one in await asyncio.gather(*puts)} == {200}
            current = [site.engine.captures.current for site in sites]
            assert len(current[0]) == 1
            assert current[0] == current[1]
            error = await refused(second.put(WATCH, json={"capture": {"layers": [9]}}), 400)
            assert error["param"] == "capture.layers"
            assert [site.engine.captures.current for site in sites] == current
            assert (await first.delete(WATCH)).status_code == 204
            assert not any(site.engine.captures for site in sites)
            await refused(second.delete(WATCH), 404)
            assert (await second.put(WATCH, json=bodies[0])).status_code == 200
            assert (await first.delete(HANDLES)).status_code == 204
            assert not any(site.engine.captures for site in sites)


async def test_a_body_is_not_read_before_the_admin_key_is_checked(monkeypatch):
    monkeypatch.setenv("MIDSTREAM_ADMIN_KEY", "secret")
    async with two() as (sites, _):
        for site in sites:
            sent, taken = await raw_request(site.app, method="PUT", path=WATCH)
            assert (sent[0]["status"], taken) == (401, 0)


async def test_before_both_have_started_captures_of_all_are_not_changed():
    async with two(listening=1) as (sites, (here, there)):
        handle = await handle_from(here)
        assert (await here.get(HANDLES)).json()["captures"][0]["id"] == handle["id"]
        await refused(here.get(handle["url"] + "x"), 404)
        for client in (here, there):
            put = client.put(WATCH, json={"capture": {"layers": [0]}})
            await refused(put, 503, "not all API server processes")
        assert not any(site.engine.captures for site in sites)


async def test_kept_rows_of_both_are_collected_and_counted():
    async with two() as (sites, (here, _)):
        assert (await here.put(WATCH, json={"capture": {"layers": [1]}})).status_code == 200
        for site, name in zip((*sites, sites[1]), "abc", strict=True):
            one = delivery(tag="watch", request_id=name, activations=rows((1,), 5))
            put_now(site.engine.sinks.queue("kept"), one, 60)
        found = [(await here.post(f"{WATCH}/collect")).json() for _ in range(3)]
        ids = [[one["request_id"] for one in each["completions"]] for each in found]
        assert ids == [["a"], ["b", "c"], []]
        assert [each["kept"] for each in found] == [2, 0, 0]


async def test_kept_rows_are_not_lost_with_a_process_that_has_ended():
    async with two() as (sites, (here, _)):
        assert (await here.put(WATCH, json={"capture": {"layers": [1]}})).status_code == 200
        one = delivery(tag="watch", activations=rows((1,), 5))
        put_now(sites[0].engine.sinks.queue("kept"), one, 60)
        sites[1].server.peers._server.should_exit = True
        await end_of(sites[1])
        Path(sites[1].server.peers._path(1)).touch()
        await refused(here.post(f"{WATCH}/collect"), 503, "does not answer")
        assert sites[0].engine.captures.show("watch").kept["completions"] == 1


def test_what_is_kept_is_added_by_name():
    own = [{"name": "a", "kept": {"completions": 1, "bytes": 5}}, {"name": "b"}]
    add_kept(own, [{"name": "a", "kept": {"completions": 2, "bytes": 7}}, {"name": "c"}])
    assert own == [{"name": "a", "kept": {"completions": 3, "bytes": 12}}, {"name": "b"}]
