"""What operators look at and set up: readiness, logs, and a folder that servers share."""

import io
import json
import logging
from typing import Any

import pytest
from support.serving_fake import make, refused, serving

from midstream.config.http import read_http
from midstream.errors import ConfigError
from midstream.server import audit_log

pytestmark = pytest.mark.anyio
READY, VECTORS = "/midstream/ready", "/v1/midstream/vectors"
STEERING, STATUS = "/v1/midstream/steering", "/v1/midstream/status"


async def test_a_server_is_ready_until_its_engine_fails_or_it_shuts_down():
    async with serving(has_key=True) as (site, client):

        async def state() -> tuple[int, Any]:
            answer = await client.get(READY)
            return answer.status_code, answer.json()

        assert await state() == (200, {"ready": True})
        site.engine.errored = True
        assert await state() == (503, {"ready": False})
        site.engine.errored = False
        site.engine.intake.close()
        assert await state() == (503, {"ready": False})
        site.server._llm = None  # as before the engine is there
        assert (await client.get(READY)).status_code == 503


async def test_servers_of_a_folder_have_the_same_vectors_and_steering(tmp_path):
    shared = {"shared_folder": str(tmp_path / "shared")}
    async with serving(**shared) as (_, one), serving(**shared) as (_, other):
        answer = await one.put(f"{VECTORS}/happy", json={"1": [1.0, 2.0, 2.0]})
        assert answer.status_code == 200, answer.text
        assert (await other.get(f"{VECTORS}/happy")).json()["digest"] == answer.json()["digest"]
        state = (await other.put(STEERING, json={"base": ["happy", 2.0]})).json()
        assert (await one.get(STEERING)).json() == state
        # Names that are set at the interface of another tool hold too.
        assert (await other.post("/v1/steering/clear")).status_code == 200
        assert (await one.get(STEERING)).json()["base"] == []
        assert (await one.get(STATUS)).json()["shared_changes"] == 4
        assert (await other.delete(f"{VECTORS}/happy")).status_code == 204
        await refused(one.get(f"{VECTORS}/happy"), 404)
    async with serving() as (_, alone):
        assert (await alone.get(STATUS)).json()["shared_changes"] is None


async def test_the_limit_of_bytes_is_that_of_all_servers_of_a_folder(tmp_path):
    shared = {"shared_folder": str(tmp_path / "shared"), "vector_bytes": 20}
    async with serving(**shared) as (_, one), serving(**shared) as (_, other):
        assert (await one.put(f"{VECTORS}/a", json={"1": [1.0, 2.0, 2.0]})).status_code == 200
        await refused(other.put(f"{VECTORS}/b", json={"1": [1.0, 2.0, 2.0]}), 507)


async def test_a_folder_of_another_model_keeps_a_server_from_starting(tmp_path, monkeypatch):
    from midstream.steering import shared_folder

    await make(shared_folder=str(tmp_path / "shared"))
    monkeypatch.setattr(shared_folder, "_model_of", lambda shape: "another")
    with pytest.raises(ConfigError, match="another model"):
        await make(shared_folder=str(tmp_path / "shared"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shared_folder": "relative/path"}, "shared_folder: expected an absolute path"),
        ({"shared_folder": 3}, "shared_folder: expected `str . null`, got 3"),
        ({"log": "xml"}, "log: expected one of `text`, `json`, got 'xml'"),
    ],
)
def test_wrong_settings_are_named(given, message):
    with pytest.raises(ConfigError, match=message):
        read_http(given)


@pytest.fixture
def lines(monkeypatch):
    ours = logging.getLogger("midstream")
    before = ours.handlers, ours.propagate, ours.level
    written = io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    audit_log.attach_handlers("json")
    ours.setLevel(logging.INFO)
    yield lambda: [json.loads(line) for line in written.getvalue().splitlines()]
    ours.handlers, ours.propagate, ours.level = before


async def test_a_rejected_request_is_a_line_of_json_with_its_id(lines):
    async with serving() as (_, client):
        headers = {"x-request-id": 'mine-7 "'}
        answer = await client.get(f"{VECTORS}/unknown", headers=headers)
        assert answer.status_code == 404
    refused_lines = [one for one in lines() if one.get("event") == "request.refused"]
    assert refused_lines[0]["request_id"] == 'mine-7 "'
    assert refused_lines[0]["status"] == 404
    assert {"time", "level", "logger"} <= set(refused_lines[0])


async def test_a_wait_and_a_receipts_problem_are_lines_with_the_requests_id(lines):
    from dataclasses import replace

    from support.serving_fake import outputs_of

    async with serving() as (site, client):
        site.engine.intake.begin_wait("cmpl-w", lambda error: None).end()

        def mismatched(*given: Any) -> list[Any]:
            found = outputs_of(*given)
            for one in found[-1].outputs:
                one.receipt = replace(one.receipt, problems=("a row is missing",))
            return found

        site.engine.script = mismatched
        body = {"prompt": "x", "midstream": {"capture": {"layers": [1]}}}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    found = {one.get("event"): one for one in lines()}
    assert found["request.waiting"]["request_id"] == "cmpl-w"
    assert found["request.waited"]["seconds"] >= 0
    assert found["receipt.problem"]["problem"].endswith("a row is missing")
    assert "cmpl-0" in found["receipt.problem"]["problem"]


def test_a_traceback_is_one_line_of_json():
    try:
        raise RuntimeError("two\nlines")
    except RuntimeError:
        record = logging.LogRecord(
            "midstream.x", logging.ERROR, "", 0, "it %s", ("failed",), __import__("sys").exc_info()
        )
    text = audit_log.JsonLines().format(record)
    assert len(text.splitlines()) == 1
    found = json.loads(text)
    assert found["message"] == "it failed"
    assert "two\nlines" in found["exception"]
