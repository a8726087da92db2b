"""A server gives events to the sinks of its settings, and sends the last ones as it ends."""

import json

import pytest
from support.event_receiver import Receiver
from support.serving_fake import make, serving

from midstream.errors import ConfigError

pytestmark = pytest.mark.anyio


async def told(client):
    return (await client.get("/v1/midstream/status")).json()["events"]


async def test_events_are_sent_and_counted_and_the_last_are_sent_as_the_server_ends(tmp_path):
    path = tmp_path / "events.jsonl"
    with Receiver([400]) as receiver:
        webhook = {"url": receiver.url, "linger_seconds": 60.0}
        events = {"jsonl": {"path": str(path), "linger_seconds": 60.0}, "webhook": webhook}
        async with serving(events=events) as (site, client):
            site.server.events.put({"guard": "g", "request_id": "r", "text": "a secret"})
            waiting = {"delivered": 0, "dropped": 0, "dead_letters": 0, "waiting": 1}
            assert await told(client) == {"jsonl": waiting, "webhook": waiting}
            assert receiver.url not in (await client.get("/v1/midstream/status")).text
        assert len(receiver.posts) == 1
    [event] = map(json.loads, path.read_text().splitlines())
    assert (event["guard"], event["request_id"], "text" in event) == ("g", "r", False)
    assert site.server.events.counts["webhook"].dropped == 1


async def test_a_server_without_sinks_discards_events():
    async with serving() as (site, client):
        site.server.events.put({"guard": "g"})
        assert await told(client) == {}


async def test_a_server_whose_sink_cannot_be_opened_does_not_start(tmp_path):
    path = str(tmp_path / "missing" / "events")
    with pytest.raises(ConfigError, match=r"midstream\.events\.jsonl: the file cannot be opened"):
        await make(events={"jsonl": {"path": path}})
