"""Cached rows take a part of the process's file descriptors, counted before anything is done."""

import asyncio
import resource

import anyio
import msgspec
import pytest
from support.open_files import open_files
from support.serving_fake import refused, serving

from midstream.config.http import HttpSettings
from midstream.errors import HttpError
from midstream.server.cached_rows.capture_cache import CaptureCache

ROWS = "/v1/midstream/activations"
ASKED = {"prompt": "abc", "midstream": {"capture": {"layers": [1]}}}
FILES = 40  # of the process: 20 for cached rows, 10 for those of one client


@pytest.fixture
def few_files(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (FILES, FILES))


@pytest.fixture
def cache():
    made = CaptureCache(HttpSettings())
    yield made
    made.close()


def store(cache, client="me", reservation=None):
    return cache.store(b"x", client, "r", {}, reservation)


def test_a_client_has_a_part_and_all_clients_have_a_part(few_files, cache):
    for _ in range(10):
        store(cache)
    with pytest.raises(HttpError, match="10 file descriptors, and 1 more exceed its limit") as mine:
        store(cache)
    assert (mine.value.status, "40 files" in mine.value.message) == (429, True)
    for _ in range(10):
        store(cache, "you")
    with pytest.raises(HttpError, match=r"20 file descriptors.*ulimit -n") as every:
        store(cache, "they")
    assert every.value.status == 507
    cache.close()
    store(cache, "they")


def test_readers_count_until_they_have_read(few_files, cache):
    held = store(cache)
    readers = [cache.open(held.id, "you") for _ in range(5)]
    before = open_files()
    with pytest.raises(HttpError) as caught:
        cache.open(held.id, "you")
    assert caught.value.status == 429
    assert open_files() <= before
    # Another client reads it though: its part is its own.
    cache.end_read(*cache.open(held.id, "me"))
    for one in readers:
        cache.end_read(*one)
    cache.end_read(*cache.open(held.id, "you"))
    assert cache._descriptors.used == 1


def test_a_read_that_fails_is_not_counted(few_files, cache, monkeypatch):
    held = store(cache)
    assert cache.open("unknown", "me") is None
    monkeypatch.setattr(CaptureCache, "_open", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cache.open(held.id, "me")
    assert cache._descriptors.used == 1


def test_room_that_is_reserved_is_there_for_its_request_and_for_no_other(few_files, cache):
    reservation = cache.reserve("me", 10)
    with pytest.raises(HttpError):
        cache.reserve("me", 1)
    with pytest.raises(HttpError):
        store(cache)
    stored = [store(cache, reservation=reservation) for _ in range(4)]
    assert cache._descriptors.used == 10
    cache.release(reservation)
    assert cache._descriptors.used == 4
    for one in stored:
        cache.delete(one.id)
    assert cache._descriptors.used == 0
    assert not cache._of_client


@pytest.mark.anyio
async def test_a_request_whose_rows_could_not_be_cached_is_refused_before_it_is_computed(few_files):
    async with serving() as (site, client):
        for body in (
            {**ASKED, "n": 11},
            {**ASKED, "prompt": ["abc"] * 11},
            {**ASKED, "prompt": [[1, 2]] * 4, "n": 3},
        ):
            await refused(client.post("/v1/completions", json=body), 429, "file descriptors")
        assert site.engine.calls == []
        answer = await client.post("/v1/completions", json={**ASKED, "n": 10})
        assert answer.status_code == 200
        assert len(site.server.captures) == 10
        # Rows that are not cached need no descriptor.
        body = {"prompt": "abc", "midstream": {"capture": {"layers": [1]}, "activations": "inline"}}
        assert (await client.post("/v1/completions", json=body)).status_code == 200


@pytest.mark.anyio
async def test_of_requests_at_once_those_that_could_not_be_cached_are_not_computed(few_files):
    async with serving() as (site, client):
        go = asyncio.Event()
        site.engine.pause = go.wait
        asked = [
            asyncio.create_task(client.post("/v1/completions", json={**ASKED, "n": 4}))
            for _ in range(5)
        ]
        with anyio.fail_after(20):
            while sum(one.done() for one in asked) < 3:
                await asyncio.sleep(0.01)
        assert len(site.engine.calls) == 2
        go.set()
        answers = await asyncio.gather(*asked)
        assert sorted(one.status_code for one in answers) == [200, 200, 429, 429, 429]


@pytest.mark.anyio
async def test_edits_with_rows_of_more_captures_than_may_be_open_are_refused(few_files):
    async with serving() as (site, client):
        ids = []
        for _ in range(4):
            answer = await client.post("/v1/completions", json=ASKED)
            ids.append(answer.json()["midstream"]["activations"]["id"])
        rows = [{"captured": name, "positions": [0]} for name in ids]
        edits = [{"op": "replace", "rows": one, "layer": 1, "positions": [0]} for one in rows]
        for count, status in ((3, 200), (4, 429)):
            body = {"prompt": "abc", "midstream": {"edits": edits[:count]}}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == status
            assert not site.server.captures._read
        assert "file descriptors" in answer.json()["error"]["message"]
        assert len(site.engine.calls) == 5


@pytest.mark.anyio
async def test_rows_expire_though_nobody_calls_and_the_timer_ends_with_the_server(monkeypatch):
    monkeypatch.setattr("midstream.server.cached_rows.capture_cache._EXPIRY_SECONDS", 0.05)
    async with serving(held_seconds=1) as (site, client):
        cache = site.server.captures
        cache._settings = msgspec.structs.replace(cache._settings, held_seconds=0.1)
        assert (await client.post("/v1/completions", json=ASKED)).status_code == 200
        before = open_files()
        held = site.server.captures.store(b"x", "me", "r", {})
        assert len(open_files() - before) == 1
        # Nothing is asked of the cache: its entries and its files go by themselves.
        with anyio.fail_after(20):
            while site.server.captures._captures:
                await asyncio.sleep(0.05)
        assert held.id not in site.server.captures._captures
        assert open_files() <= before
        assert not site.server._expiry.done()
    with anyio.fail_after(60):
        await asyncio.wait([site.server._expiry])
    assert site.server._expiry.cancelled()
