"""Which paths answer without the API key: docs/security.md says what vLLM's server does."""

import re
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from support.serving_fake import scope_of

import midstream
from midstream.server.middleware import _OWN
from midstream.server.server import PATHS

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## Paths without the key")[2].partition("\n## ")[0]
UNGUARDED = {
    path
    for line in SECTION.splitlines()
    if line.startswith("| `/")
    for path in re.findall(r"`(/[^`]*)`", line.split("|")[1])
}
# What the page has a proxy forward: whole prefixes, and single paths.
PREFIXES = tuple(re.findall(r"location (/\S+) \{ proxy_pass", SECTION))
SINGLE = set(re.findall(r"location = (/\S+) \{ proxy_pass", SECTION))
# Those that the guard of a release names, in its two forms.
GUARDS = (
    re.compile(r"GUARDED_PREFIX = \(([^)]*)\)"),
    re.compile(r"url_path\.startswith\(\(?([^)]*)\)"),
)


@pytest.fixture(scope="module")
def app() -> Any:
    """vLLM's server with midstream, which asks for a key."""
    midstream.activate()
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    config = '{"midstream": {"http": {"studio": true}}}'
    given = ["--model", "none", "--api-key", "secret", "--additional-config", config]
    found = build_app(parser.parse_args(given), ("generate",))
    # To write the whole schema takes two seconds, and nobody reads it here.
    found.openapi = dict  # type: ignore[method-assign]
    return found


@pytest.fixture(scope="module")
def answers(app: Any) -> dict[tuple[str, str], int]:
    """Status of every (method, path) of vLLM's server with midstream, asked without the key."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)

    async def ask() -> dict[tuple[str, str], int]:
        found = {}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for route in app.routes:
                path = getattr(route, "path", "")
                for method in sorted(getattr(route, "methods", None) or {"GET"}):
                    answer = await client.request(method, re.sub(r"\{[^}]*\}", "x", path), json={})
                    found[method, path] = answer.status_code
            key = {"authorization": "Bearer secret"}
            assert (await client.get("/v1/midstream/status", headers=key)).status_code == 503
        return found

    return anyio.run(ask)


def test_the_page_names_every_path_that_answers_without_the_key_and_no_other(answers):
    unguarded = {path for (_, path), status in answers.items() if status != 401}
    assert unguarded == UNGUARDED


def test_without_the_key_nothing_of_midstream_that_has_data_answers(answers):
    own = {path: status for (_, path), status in answers.items() if path.startswith(_OWN)}
    assert len(own) > 15
    without_data = {path for path, status in own.items() if status != 401}
    assert without_data == {"/midstream", "/midstream/", "/midstream/{name}", "/midstream/ready"}
    assert {answers["POST", path] for path in PATHS} == {401}


def test_a_body_is_not_read_before_the_key_is_checked(app):
    for path in (*PATHS, "/v1/midstream/sweep", "/v1/midstream/fit", "/v1/steering/set"):
        sent: list[Any] = []

        async def receive() -> Any:
            pytest.fail("the body is read")

        async def send(message: Any, sent: list[Any] = sent) -> None:
            sent.append(message)

        scope = {**scope_of("5"), "path": path, "raw_path": path.encode()}
        anyio.run(app, scope, receive, send)
        assert sent[0]["status"] == 401, path


def test_what_the_page_has_a_proxy_forward_is_guarded_or_has_no_data(answers):
    assert PREFIXES == ("/v1/",)
    assert {"/health", "/midstream/ready"} == SINGLE
    for (method, path), status in answers.items():
        if path.startswith(PREFIXES):
            assert status == 401, (method, path)


def test_every_release_guards_what_the_page_has_a_proxy_forward(release):
    guards = []
    for file in (release / "entrypoints").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if "verify_token" in text:
            guards += [found[1] for guard in GUARDS for found in guard.finditer(text)]
    prefixes = {prefix for guard in guards for prefix in re.findall(r'"([^"]*)"', guard)}
    assert prefixes, "the guard of this release is not as expected"
    for forwarded in PREFIXES:
        assert any(forwarded.startswith(prefix) for prefix in prefixes)
    for path in PATHS:
        assert path.startswith(PREFIXES)
