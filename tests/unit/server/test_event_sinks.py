"""A server gives events to the sinks of its settings, and sends the last ones as it ends."""

import json

import pytest
from support.event_receiver import Receiver
from support.serving_fake import WIDTH, make, serving

from midstream import Probe
from midstream.errors import ConfigError

pytestmark = pytest.mark.anyio
PROBE = Probe([1.0] * WIDTH, layer=1)


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


async def test_an_action_of_a_guard_is_an_event_with_text_only_if_guard_and_sink_ask_for_it(
    tmp_path,
):
    plain, full = tmp_path / "plain.jsonl", tmp_path / "full.jsonl"
    with Receiver() as receiver:
        events = {
            "jsonl": {"path": str(full), "text": True},
            "webhook": {"url": receiver.url, "dead_letters": str(plain)},
        }
        async with serving(events=events) as (_, client):
            for name, text in (("silent", False), ("told", True)):
                guard = {"probe": PROBE.to_dict(), "above": 0.6, "action": "flag", "text": text}
                answer = await client.put(f"/v1/midstream/guards/{name}", json=guard)
                assert answer.status_code == 200, answer.text
            body = {"prompt": "abcde", "model": "fake"}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        [(_, _, posted)] = receiver.posts
    written = [json.loads(line) for line in full.read_text().splitlines()]
    sent = json.loads(posted)["events"]
    assert [(event["guard"], "text" in event) for event in written] == [
        ("silent", False), ("told", True),
    ]  # fmt: skip
    for event, same in zip(written, sent, strict=True):
        assert {key: part for key, part in event.items() if key != "text"} == same
        assert set(same) == {
            "id", "time", "guard", "version", "action", "position", "score", "request_id",
            "completion", "client", "model",
        }  # fmt: skip
        assert (same["position"], same["version"], same["action"]) == (5, 1, "flag")


async def test_a_server_without_sinks_discards_events():
    async with serving() as (site, client):
        site.server.events.put({"guard": "g"})
        assert await told(client) == {}


async def test_a_server_whose_sink_cannot_be_opened_does_not_start(tmp_path):
    path = str(tmp_path / "missing" / "events")
    with pytest.raises(ConfigError, match=r"midstream\.events\.jsonl: the file cannot be opened"):
        await make(events={"jsonl": {"path": path}})
