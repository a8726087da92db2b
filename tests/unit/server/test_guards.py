"""Guards over HTTP: their versions, whose requests they read, what they do, and who is told."""

import asyncio
import json
import logging
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from support.event_receiver import HANG, Receiver
from support.serving_endpoints import Params
from support.serving_fake import WIDTH, refused, serving

from midstream import Probe
from midstream.config.http import ADMIN_HEADER
from midstream.errors import BusyError, SpecError
from midstream.server.guards import guarded_calls
from midstream.server.guards.guarded_calls import ASKER
from midstream.sinks.events import event_log
from midstream.steering.guard_definition import fingerprint, share_of

pytestmark = pytest.mark.anyio
GUARDS = "/v1/midstream/guards"
PROBE = Probe([1.0] * WIDTH, layer=1)
# Of the fake engine score p is p / 8; a prompt of five tokens has seven, so that it ends at 6.
FORM: dict[str, Any] = {"probe": PROBE.to_dict(), "above": 0.6}
ASK = {"prompt": "abcde", "model": "fake"}
LAST = 6
JSON = {"content-type": "application/json"}


@contextmanager
def events() -> Any:
    """The fields of the log's events."""
    found: list[dict[str, Any]] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.midstream)  # type: ignore[method-assign]
    logger = logging.getLogger("midstream.serving")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def named(found: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [one for one in found if one["event"] == event]


def count(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"midstream:{name}", labels) or 0.0


async def stream(client: Any, **body: Any) -> tuple[str, str | None]:
    """The text and the finish reason of a stream."""
    headers = body.pop("headers", {})
    answer = await client.post(
        "/v1/completions", json={**ASK, "stream": True, **body}, headers=headers
    )
    assert answer.status_code == 200, answer.text
    chunks = [
        json.loads(line.removeprefix("data: "))
        for line in answer.text.splitlines()
        if line.startswith("data: {")
    ]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    reasons = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    return "".join(choice.get("text", "") for choice in choices), reasons[-1] if reasons else None


async def test_a_guard_is_put_shown_promoted_rolled_back_and_deleted():
    async with serving() as (site, client):
        with events() as found:
            made = (await client.put(f"{GUARDS}/toxic", json=FORM)).json()
            assert (made["name"], made["version"], made["action"]) == ("toxic", 1, "shadow")
            assert "direction" not in json.dumps(made)
            full = (await client.get(f"{GUARDS}/toxic?full=true")).json()
            assert full["probe"] == PROBE.to_dict()
            again = await client.put(f"{GUARDS}/again", json={"probe": full["probe"], "above": 0.6})
            assert again.json()["digest"] == made["digest"]
            for version, action in ((2, "flag"), (3, "stop")):
                answer = (await client.post(f"{GUARDS}/toxic/promote")).json()
                assert (answer["version"], answer["action"]) == (version, action)
            await refused(client.post(f"{GUARDS}/toxic/promote"), 400, "cannot be promoted")
            back = (await client.post(f"{GUARDS}/toxic/rollback", json={"version": 1})).json()
            assert (back["version"], back["digest"]) == (4, made["digest"])
            assert (await client.post(f"{GUARDS}/toxic/rollback", json={})).json()[
                "action"
            ] == "stop"
            assert (await client.delete(f"{GUARDS}/toxic")).status_code == 204
        listed = (await client.get(GUARDS)).json()["guards"]
        assert [one["name"] for one in listed] == ["again"]
        history = (await client.get(f"{GUARDS}/toxic/history")).json()["versions"]
        changes = ["put", "promote", "promote", "rollback", "rollback", "delete"]
        assert [one["change"] for one in history] == changes
        assert [one["version"] for one in history] == [1, 2, 3, 4, 5, 6]
        logged = [one for one in named(found, "guard.changed") if one["name"] == "toxic"]
        assert [one["change"] for one in logged] == changes
        assert {one["who"] for one in logged} == {"127.0.0.1"}
        assert [one["time"] for one in logged] == [one["time"] for one in history]
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/promote")):
            await refused(client.request(method, f"{GUARDS}/toxic{path}"), 404, "no guard 'toxic'")
        await refused(client.get(f"{GUARDS}/unknown/history"), 404)
        await refused(client.post(f"{GUARDS}/unknown/rollback", json={}), 404)


async def test_wrong_guards_are_refused_with_their_field():
    async with serving(vector_bytes=300) as (site, client):
        for body, status, param, problem in (
            ({}, 400, "probe", "missing"),
            ({**FORM, "treshold": 1}, 400, "treshold", "unknown field"),
            ({**FORM, "action": "block"}, 400, "action", "expected one of"),
            ({**FORM, "scope": {"models": ["gpt"]}}, 400, "scope.models[0]", "no model 'gpt' now"),
            ({**FORM, "scope": {"keys": ["0" * 16]}}, 400, "scope.keys", "has no API keys"),
            ({**FORM, "scope": {"models": [["fake"]]}}, 400, "scope.models[0]", "expected a text"),
            ({**FORM, "message": "x" * 300}, 507, "probe", "more than the limit of 300"),
        ):
            error = await refused(client.put(f"{GUARDS}/toxic", json=body), status, problem)
            assert error["param"] == param
        await refused(client.put(f"{GUARDS}/a%20b", json=FORM), 400, "name")
        # What cannot be written as UTF-8 would break each answer that has it.
        for field, value in (("message", "\ud800"), ("webhook", "https://example.org/\ud800")):
            asked: Any = {"content": json.dumps({**FORM, field: value}), "headers": JSON}
            await refused(client.put(f"{GUARDS}/toxic", **asked), 400, "surrogate")
        assert site.engine.guards.active() == ()
    async with serving() as (_, client):
        await client.put(f"{GUARDS}/toxic", json=FORM)
        for version in (True, "1", 1.0):
            body = {"version": version}
            await refused(client.post(f"{GUARDS}/toxic/rollback", json=body), 400, "version")


async def test_a_client_that_may_not_change_guards_cannot_read_them(monkeypatch):
    monkeypatch.setenv("MIDSTREAM_ADMIN_KEY", "secret")
    async with serving() as (_, client):
        right = {ADMIN_HEADER: "secret"}
        assert (await client.put(f"{GUARDS}/toxic", json=FORM, headers=right)).status_code == 200
        for path in ("", "/toxic", "/toxic/history"):
            await refused(client.get(GUARDS + path), 401)
            assert (await client.get(GUARDS + path, headers=right)).status_code == 200


async def test_a_shadow_scores_and_shows_the_client_nothing():
    async with serving() as (site, client):
        plain = (await client.post("/v1/completions", json=ASK)).json()
        await client.put(f"{GUARDS}/shadowed", json=FORM)
        labels = {"guard": "shadowed", "version": "1"}
        with events() as found:
            answer = await client.post("/v1/completions", json=ASK)
        assert answer.json() == plain
        assert "midstream" not in answer.text
        assert [
            probe.name for probe in site.engine.calls[-1][1].extra_args["midstream"].guards
        ] == ["guard:shadowed:1"]
        assert count("guard_score_count", **labels) == 1
        assert count("guard_score_bucket", le="0.5", **labels) == 0
        assert count("guard_score_bucket", le="1.0", **labels) == 1  # it is LAST / 8
        assert count("guard_actions_total", action="shadow", **labels) == 1
        assert count("guard_requests_total", scored="true", **labels) == 1
        (event,) = named(found, "guard.action")
        assert event == {
            "event": "guard.action", "guard": "shadowed", "version": 1, "action": "shadow",
            "position": 5, "score": 0.625, "request_id": "cmpl-0", "completion": 0,
            "client": "127.0.0.1", "model": "fake",
        }  # fmt: skip
        # A request with a plan has its own results alone.
        own = {"midstream": {"probes": {"direction": [1.0] * WIDTH, "layer": 2, "name": "mine"}}}
        result = (await client.post("/v1/completions", json={**ASK, **own})).json()["midstream"]
        assert list(result["probes"]) == ["mine"]
        assert "guard" not in json.dumps(result)


async def test_a_guard_below_its_threshold_does_nothing():
    async with serving() as (_, client):
        await client.put(f"{GUARDS}/quiet", json={**FORM, "above": 0.8, "action": "stop"})
        with events() as found:
            assert await stream(client) == ("t1t2t3", "length")
        assert named(found, "guard.action") == []
        assert count("guard_score_count", guard="quiet", version="1") == 1


async def test_a_stop_shows_a_finish_reason_and_the_operators_message():
    async with serving() as (_, client):
        form = {**FORM, "action": "stop", "message": " Sorry."}
        await client.put(f"{GUARDS}/stopping", json=form)
        assert await stream(client) == ("t1t2t3 Sorry.", "content_filter")
        whole = (await client.post("/v1/completions", json=ASK)).json()
        assert whole["choices"][0]["text"] == "t1t2t3 Sorry."


@pytest.mark.parametrize("visible", [True, False])
@pytest.mark.parametrize("is_asked", [True, False])
async def test_flags_are_in_answers_that_ask_if_the_guard_is_visible(visible, is_asked):
    async with serving() as (_, client):
        form = {**FORM, "action": "flag", "visible": visible}
        await client.put(f"{GUARDS}/flagged", json=form)
        body = {**ASK, "midstream": {"guards": is_asked}}
        answer = (await client.post("/v1/completions", json=body)).json()
        flag = {"guard": "flagged", "version": 1, "action": "flag", "position": 5, "score": 0.625}
        if is_asked:
            assert answer["midstream"] == {"guards": [flag] if visible else []}
        else:
            assert "midstream" not in answer or "guards" not in answer["midstream"]
        body = {**ASK, "midstream": {"guards": True}, "stream": True}
        answer = await client.post("/v1/completions", json=body)
        assert answer.text.count('"guards"') == 1
    async with serving() as (_, client):
        await refused(
            client.post("/v1/completions", json={**ASK, "midstream": {"guards": 1}}), 400, "true or"
        )


async def test_a_guard_is_for_the_requests_of_its_scope(monkeypatch):
    async with serving(has_key=True) as (site, client):
        key, other = "sk-1", "sk-2"
        mine, theirs = ({"authorization": f"Bearer {each}"} for each in (key, other))
        for name, scope in (
            ("of-key", {"keys": [fingerprint(key)]}),
            ("of-model", {"models": ["fake"]}),
            ("of-share", {"share": 0.5}),
        ):
            put = await client.put(f"{GUARDS}/{name}", json={**FORM, "scope": scope}, headers=mine)
            assert put.status_code == 200, put.text

        async def guards(headers: Any, request_id: str = "1") -> set[str]:
            sent = {**headers, "x-request-id": request_id}
            await client.post("/v1/completions", json=ASK, headers=sent)
            carried = site.engine.calls[-1][1].extra_args["midstream"]
            return {probe.name.split(":")[1] for probe in carried.guards} - {"of-share"}

        assert await guards(mine) == {"of-key", "of-model"}
        assert await guards(theirs) == {"of-model"}
        chosen = set()
        for nth in range(32):
            await client.post(
                "/v1/completions", json=ASK, headers={**mine, "x-request-id": str(nth)}
            )
            _, params, request_id = site.engine.calls[-1]
            has = any("of-share" in one.name for one in params.extra_args["midstream"].guards)
            assert has == (share_of("of-share", request_id) < 0.5)
            chosen.add(has)
        assert chosen == {True, False}


async def test_a_guard_of_an_adapter_reads_its_requests_alone():
    async with serving() as (site, client):
        site.app.state.openai_serving_models = SimpleNamespace(lora_requests={"tuned": None})
        await client.put(f"{GUARDS}/of-tuned", json={**FORM, "scope": {"models": ["tuned"]}})
        await client.put(f"{GUARDS}/of-base", json={**FORM, "scope": {"models": ["fake"]}})
        calls, token = site.server.guards, ASKER.set("me")
        try:
            for adapter, name in (("tuned", "of-tuned"), ("other", None), (None, "of-base")):
                lora = None if adapter is None else SimpleNamespace(lora_name=adapter)
                call = calls.begin("1", Params(), lora)
                found = [] if call is None else [guard.name for guard in call.guards]
                assert found == ([] if name is None else [name])
                assert call is None or call.model == (adapter or "fake")
        finally:
            ASKER.reset(token)


async def test_a_clients_probe_of_a_name_like_a_guards_has_its_scores():
    async with serving() as (_, client):
        await client.put(f"{GUARDS}/toxic", json=FORM)
        own = {"direction": [1.0] * WIDTH, "layer": 2, "name": "guard:mine"}
        body = {**ASK, "midstream": {"probes": own}}
        answer = (await client.post("/v1/completions", json=body)).json()
        assert list(answer["midstream"]["probes"]) == ["guard:mine"]
        await refused(
            client.put("/v1/midstream/steering", json={"base": own}), 400, "the server's guards"
        )


async def test_the_servers_own_requests_have_no_guards():
    async with serving() as (site, client):
        await client.put(f"{GUARDS}/toxic", json=FORM)
        positive, negative = [["good", "nice"], ["bad", "sad"]]
        body = {"positive": positive, "negative": negative, "layers": [1]}
        await client.post("/v1/midstream/fit", json=body)
        for _, params, _ in site.engine.calls:
            assert not getattr((params.extra_args or {}).get("midstream"), "guards", ())


async def test_a_request_keeps_the_version_that_it_began_with():
    async with serving() as (site, client):
        await client.put(f"{GUARDS}/swapped", json={**FORM, "action": "stop", "message": "one"})
        gate = asyncio.Event()
        site.engine.pause = gate.wait
        asked = asyncio.create_task(stream(client))
        while not site.engine.calls:
            await asyncio.sleep(0)
        await client.put(f"{GUARDS}/swapped", json={**FORM, "action": "stop", "message": "two"})
        gate.set()
        assert await asked == ("t1t2t3one", "content_filter")
        assert await stream(client) == ("t1t2t3two", "content_filter")


async def test_a_second_stage_runs_only_if_the_first_one_lets_it():
    async with serving() as (site, client):
        first = {**FORM, "above": 2.0}
        await client.put(f"{GUARDS}/cheap", json=first)
        dear = {**FORM, "above": 0.7, "action": "stop", "message": "!", "when": {"guard": "cheap"}}
        await client.put(f"{GUARDS}/dear", json={**dear, "when": {"guard": "cheap", "above": 0.8}})
        assert await stream(client) == ("t1t2t3", "length")
        assert len(site.engine.calls) == 1
        assert count("guard_requests_total", guard="dear", version="1", scored="false") == 1
        await client.put(f"{GUARDS}/dear", json={**dear, "when": {"guard": "cheap", "above": 0.5}})
        assert await stream(client) == ("t1t2t3!", "content_filter")
        (prompt, params, request_id) = site.engine.calls[-1]
        assert (prompt, request_id) == ("abcde", "cmpl-0-dear-0")
        (probe,) = params.extra_args["midstream"].plan.probes
        assert probe.name == "guard:dear:2"
        assert count("guard_requests_total", guard="dear", version="2", scored="true") == 1
        await client.put(f"{GUARDS}/dear", json=dear)  # by the threshold of the first, which is 2
        assert await stream(client) == ("t1t2t3", "length")


def busy(*_: Any, **__: Any) -> Any:
    raise BusyError("too many wait", 1)


async def hang(*_: Any, **__: Any) -> Any:
    await asyncio.sleep(60)
    yield


@pytest.mark.parametrize(
    ("generate", "problem"), [(busy, "too many wait"), (hang, "no scores within 0.05 s")]
)
async def test_a_second_stage_that_fails_or_hangs_acts_unless_its_guard_lets_it_pass(
    generate, problem, monkeypatch
):
    monkeypatch.setattr(guarded_calls, "READ_SECONDS", 0.05)
    async with serving() as (site, client):
        await client.put(f"{GUARDS}/cheap", json=FORM)
        dear = {**FORM, "action": "stop", "message": "!", "when": {"guard": "cheap"}}
        named_so = f"dear-{problem[:2]}"
        for version, (choice, ended) in enumerate(
            [
                ({}, ("t1t2t3!", "content_filter")),
                ({"if_unavailable": "pass"}, ("t1t2t3", "length")),
            ],
            1,
        ):
            await client.put(f"{GUARDS}/{named_so}", json={**dear, **choice})
            site.server.guards.connect(site.engine, generate)
            with events() as logged:
                assert await stream(client) == ended
            (failed,) = named(logged, "guard.failed")
            assert (failed["guard"], failed["problem"]) == (named_so, problem)
            acted = [one for one in named(logged, "guard.action") if one["guard"] == named_so]
            assert [one["problem"] for one in acted] == ([] if choice else [problem])
            assert not any("score" in one or "position" in one for one in acted)
            labels = {"guard": named_so, "version": str(version)}
            assert count("guard_failures_total", **labels) == 1
            assert count("guard_requests_total", **labels, scored="false") == 1


async def test_only_a_guard_with_a_second_request_says_what_holds_if_that_fails():
    async with serving() as (_, client):
        await client.put(f"{GUARDS}/cheap", json=FORM)
        first, alone = {"when": {"guard": "cheap"}}, {"action": "flag", "when": {"guard": "cheap"}}
        for form, words in [
            ({**FORM, "if_unavailable": "pass"}, "only a guard with `when` and a probe"),
            ({**alone, "if_unavailable": "act"}, "only a guard with `when` and a probe"),
            ({**FORM, **first, "if_unavailable": "stop"}, "expected one of `act`, `pass`"),
        ]:
            answer = await client.put(f"{GUARDS}/dear", json=form)
            assert answer.status_code == 400
            assert "if_unavailable" in answer.text
            assert words in answer.json()["error"]["message"]
        form = {**FORM, **first, "if_unavailable": "pass"}
        assert (await client.put(f"{GUARDS}/dear", json=form)).json()["if_unavailable"] == "pass"


async def until(done: Any) -> None:
    for _ in range(500):
        if done():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


async def test_a_webhook_gets_the_event_beside_the_answer_and_again_until_it_is_accepted():
    with Receiver([(503, {"retry-after": "0"}), 200, 400]) as receiver:
        async with serving() as (site, client):
            form = {**FORM, "action": "webhook", "webhook": receiver.url, "text": True}
            await client.put(f"{GUARDS}/hooked", json=form)
            with events() as logged:
                assert await stream(client) == ("t1t2t3", "length")
                await until(lambda: receiver.received)
            first, second = (json.loads(body)["events"] for _, _, body in receiver.posts)
            assert first == second
            (told,) = named(logged, "guard.action")
            (event,) = first
            assert {name: told[name] for name in event if name in told} == {
                name: event[name] for name in event if name not in ("id", "time")
            }
            assert event["text"] == "t1t2t3"
            await stream(client)  # 400: it is not tried again
            await until(lambda: site.server.events.undelivered)
            counts = (await client.get("/v1/midstream/status")).json()["events"]["guards"]
            assert counts == {"delivered": 1, "dropped": 1, "dead_letters": 0, "waiting": 0}
            assert len(receiver.posts) == 3


async def test_a_webhook_that_hangs_delays_no_answer_and_its_queue_is_bounded(monkeypatch):
    monkeypatch.setattr(event_log, "_OWN_BYTES", 600)
    with Receiver([HANG]) as receiver:
        async with serving() as (site, client):
            webhook = {"url": receiver.url, "seconds": 0.3}
            form = {**FORM, "action": "webhook", "webhook": webhook}
            await client.put(f"{GUARDS}/hanging", json=form)
            start = asyncio.get_running_loop().time()
            for _ in range(10):
                assert (await client.post("/v1/completions", json=ASK)).status_code == 200
            assert asyncio.get_running_loop().time() - start < 2.0
            counts = site.server.events.counts["guards"]
            assert counts.waiting in (1, 2)
            assert counts.dropped == 10 - counts.waiting
        assert site.server.events.counts["guards"].dropped == 10


async def test_a_stream_of_several_completions_is_not_read_by_guards_that_observe():
    async with serving() as (site, client):
        await client.put(f"{GUARDS}/mixed", json=FORM)
        await client.post("/v1/completions", json={**ASK, "n": 2})
        assert "midstream" not in (site.engine.calls[-1][1].extra_args or {})
        assert count("guard_requests_total", guard="mixed", version="1", scored="false") == 1
        # A second stage that stops is not passed by, though its first one only watches.
        stop = {**FORM, "action": "stop", "when": {"guard": "mixed"}}
        await client.put(f"{GUARDS}/later", json=stop)
        token = ASKER.set("me")
        beams = Params(max_tokens=1, output_kind=SimpleNamespace(name="CUMULATIVE"))
        for params, request_id, field in (
            (Params(2), "cmpl-1-0", "n"),
            (beams, "cmpl-1-0f3a-beam-2", "use_beam_search"),
        ):
            with pytest.raises(SpecError, match="unsupported while a guard") as caught:
                site.server.guards.begin(request_id, params, None)
            assert caught.value.path == field
        ASKER.reset(token)
        await client.put(f"{GUARDS}/mixed", json={**FORM, "scope": {"share": 1e-9}})
        await client.post("/v1/completions", json=ASK)
        assert "midstream" not in (site.engine.calls[-1][1].extra_args or {})


async def test_a_request_that_names_itself_like_one_of_a_search_for_beams_is_guarded():
    async with serving() as (site, client):
        await client.put(f"{GUARDS}/every", json={**FORM, "action": "stop"})
        token = ASKER.set("me")
        call = site.server.guards.begin("chatcmpl-x-beam-1", Params(max_tokens=1), None)
        ASKER.reset(token)
        assert call is not None
        assert [guard.name for guard in call.guards] == ["every"]


async def test_swaps_under_load_drop_nothing_and_every_answer_is_of_one_version():
    """The message of an answer is that of the version that its event names."""
    async with serving() as (_, client):
        form = {**FORM, "action": "stop", "message": "v1"}
        await client.put(f"{GUARDS}/live", json=form)
        done = asyncio.Event()
        texts: list[tuple[str, str | None]] = []

        async def ask() -> None:
            while not done.is_set():
                texts.append(await stream(client))

        with events() as found:
            clients = [asyncio.create_task(ask()) for _ in range(4)]
            for version in range(2, 40):
                if version % 3:
                    form = {**FORM, "action": "stop", "message": f"v{version}"}
                    made = await client.put(f"{GUARDS}/live", json=form)
                else:
                    made = await client.post(f"{GUARDS}/live/rollback", json={})
                assert made.json()["version"] == version
            done.set()
            await asyncio.gather(*clients)
        assert len(texts) >= 8
        assert {reason for _, reason in texts} == {"content_filter"}
        versions = [one["version"] for one in named(found, "guard.action")]
        assert len(versions) == len(texts)
        history = (await client.get(f"{GUARDS}/live/history?full=true")).json()["versions"]
        messages = {one["version"]: one["message"] for one in history}
        told = sorted(messages[version] for version in versions if version in messages)
        seen = sorted(text.removeprefix("t1t2t3") for text, _ in texts)
        assert set(told) <= set(seen)
        assert len(set(versions)) > 1
