"""What docs/security.md says is tested, is; and promises that are of the code as a whole."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from support.serving_fake import serving

import midstream
from midstream.config.http import HttpSettings

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
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


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_each_test_that_the_page_names_is_there(path, name):
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    assert name in {node.name for node in tree.body if isinstance(node, kinds)}


def test_each_promise_names_a_test():
    promises = PAGE.partition("## What is promised")[2].partition("\n## ")[0]
    lines = [line for line in promises.splitlines() if line.startswith("| ")][1:]
    assert len(lines) > 25
    assert [line for line in lines if "`tests/" not in line] == []


def test_the_limits_on_the_page_are_the_settings():
    limits = PAGE.partition("## The limits")[2].partition("\n## ")[0]
    assert {each.name for each in fields(HttpSettings)} - {"admin"} == set(
        re.findall(r"`([a-z]+_[a-z_]+)`", limits)
    )


def test_nothing_that_serves_unpickles():
    banned = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    for path in SERVING:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
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
    ("POST", "/v1/completions", {"prompt": "a", "midstream": {"capture": 3}}),
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
