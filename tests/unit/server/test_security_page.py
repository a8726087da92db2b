"""What docs/internal/promises.md says is tested, is; and promises of the code as a whole."""

import ast
import errno
import json
import logging
import os
import re
from pathlib import Path

import pytest
from support.serving_fake import serving
from support.syntax import nodes_of, tree_of

import midstream
from midstream.errors import HttpError, ReceiptError, SpecError
from midstream.plan import Steer
from midstream.server import audit_log

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "internal" / "promises.md").read_text(encoding="utf-8")
SERVING = [
    *(
        path
        for folder in ("server", "client", "http")
        for path in (ROOT / "src" / "midstream" / folder).rglob("*.py")
    ),
    ROOT / "src" / "midstream" / "results" / "serialization.py",
    ROOT / "src" / "midstream" / "steering" / "files.py",
]
NAMED = re.findall(r"`(tests/[a-z_/]+\.py)::(\w+)`", PAGE)


def names_in(path):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in tree_of(ROOT / path).body if isinstance(node, kinds)}


def test_each_test_that_the_page_names_is_there():
    assert [(path, name) for path, name in NAMED if name not in names_in(path)] == []


def test_each_promise_names_a_test():
    promises = PAGE.partition("## What is promised")[2].partition("\n## ")[0]
    lines = [line for line in promises.splitlines() if line.startswith("| ")][1:]
    assert len(lines) > 25
    assert [line for line in lines if "`tests/" not in line] == []


def test_nothing_that_serves_unpickles():
    banned = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    for path in SERVING:
        for node in nodes_of(path):
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").partition(".")[0]}
            elif isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("torch.load", "eval", "exec"), path
                allows = [word for word in node.keywords if word.arg == "allow_pickle"]
                assert all(ast.unparse(word.value) == "False" for word in allows), path
                continue
            else:
                continue
            assert not names & banned, path


REFUSED = [
    ("POST", "/v1/completions", {"prompt": "a", "midstream": {"capture": 3.5}}),
    ("POST", "/v1/completions", {"prompt": "a", "midstream": {"activations": 1}}),
    ("POST", "/v1/embeddings", {"midstream": {}}),
    ("PUT", "/v1/midstream/vectors/x", {"9": [1]}),
    ("PUT", "/v1/midstream/vectors/x", "/etc/passwd"),
    ("PUT", "/v1/midstream/steering", {"base": "../x"}),
    ("POST", "/v1/steering/set", {"vectors": {"no": 1}}),
    ("POST", "/v1/steering/modules/register", {"name": "/etc", "vectors": []}),
    ("GET", "/v1/midstream/vectors/none", None),
    ("GET", "/v1/midstream/activations/none", None),
    ("DELETE", "/v1/midstream/activations/a.b", None),
]  # fmt: skip


@pytest.mark.anyio
@pytest.mark.parametrize(("method", "path", "body"), REFUSED)
async def test_no_refusal_tells_where_the_server_is_installed(method, path, body):
    async with serving() as (_, client):
        answer = await client.request(method, path, json=body)
    assert 400 <= answer.status_code < 500
    text = json.dumps(answer.json())
    for place in (str(ROOT), str(Path(midstream.__file__).parent), "site-packages", "Traceback"):
        assert place not in text


@pytest.mark.anyio
async def test_answers_name_the_steering_by_epoch_and_digest():
    async with serving() as (site, client):
        asked = {"prompt": "abc"}
        plain = await client.post("/v1/completions", json=asked)
        assert "x-midstream-steering" not in plain.headers
        site.engine.steering.set(base=Steer([1.0, 0.0, 0.0], layer=1))
        digest = site.engine.steering.digest[:16]
        for more in ({}, {"midstream": {"capture": {"layers": [1]}}}, {"stream": True}):
            answer = await client.post("/v1/completions", json={**asked, **more})
            assert answer.headers["x-midstream-steering"] == f"epoch=1, digest={digest}"
        for path in ("/v1/embeddings", "/invocations"):
            answer = await client.post(path, json=asked)
            assert answer.headers["x-midstream-steering"] == f"epoch=1, digest={digest}"
        site.engine.steering.clear()
        plain = await client.post("/v1/completions", json=asked)
        assert "x-midstream-steering" not in plain.headers


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example:8000", 403),
        ("[", 403),
    ],
)
async def test_a_page_whose_name_leads_here_gets_nothing_from_a_local_server_without_key(
    host, status
):
    async with serving() as (site, client):
        headers = {"host": host}
        for method, path, body in (
            ("GET", "/v1/midstream/vectors", None),
            ("PUT", "/v1/midstream/steering", {"base": []}),
            ("POST", "/v1/completions", {"prompt": "a", "midstream": {}}),
        ):
            answer = await client.request(method, path, json=body, headers=headers)
            assert answer.status_code == status
    async with serving(has_key=True) as (_, client):
        answer = await client.get("/v1/midstream/vectors", headers={"host": "evil.example"})
        assert answer.status_code == 200


@pytest.mark.anyio
async def test_a_machine_that_is_full_is_507(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "memfd_create", full)
    async with serving() as (_, client):
        asked = {"prompt": "abc", "midstream": {"capture": {"layers": [1]}}}
        assert (await client.post("/v1/completions", json=asked)).status_code == 507
    problem = ReceiptError(f"sink store: [Errno 28] {os.strerror(errno.ENOSPC)}: '/x'")
    assert HttpError.of(problem).status == 507
    assert HttpError.of(ReceiptError("no rows")).status == 500


@pytest.mark.anyio
async def test_a_long_value_and_a_long_path_are_repeated_in_part(caplog):
    caplog.set_level("INFO", "midstream.serving")
    long = "x" * 100_000
    async with serving() as (_, client):
        for value in (long, [long], {long: 1}):
            asked = {"prompt": "abc", "midstream": {"activations": value}}
            answer = await client.post("/v1/completions", json=asked)
            assert answer.status_code == 400
            assert len(answer.content) < 1000
        await client.get("/v1/midstream/" + "y" * 5000)
    messages = [record.getMessage() for record in caplog.records]
    assert max(map(len, messages)) < 1000
    [last] = [message for message in messages if "yyy" in message]
    [path] = re.findall(r"/v1/midstream/y+", last)
    assert len(path) == 200


def test_a_mistake_of_a_client_is_logged_without_a_traceback():
    found = []
    handler = logging.Handler()
    handler.emit = found.append
    theirs = logging.getLogger("vllm")
    theirs.addHandler(handler)
    try:
        audit_log.attach_handlers()
        for error in (SpecError("a", "b"), ValueError("c")):
            theirs.error("Error in completion stream generator.", exc_info=error)
    finally:
        theirs.removeHandler(handler)
        logging.getLogger("midstream").removeHandler(handler)
    assert [one.exc_info[1].args for one in found] == [("c",)]
