"""Studio's page: there only if it is switched on, and under a policy that loads nothing else."""

import hashlib
import json
import re
from pathlib import Path

import pytest
from support.serving_fake import refused, serving

from midstream.config.config import Config
from midstream.errors import ConfigError
from midstream.server.routes.studio import HEADERS, TYPES

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).resolve().parents[4]
BUILT = ROOT / "src" / "midstream" / "server" / "studio"
SOURCES = ROOT / "studio"


async def test_without_the_setting_there_is_no_page():
    async with serving() as (_, client):
        for path in ("/midstream", "/midstream/", "/midstream/studio.js"):
            assert (await client.get(path)).status_code == 404


async def test_the_page_and_its_files_are_those_that_were_built():
    async with serving(studio=True) as (_, client):
        moved = await client.get("/midstream")
        assert (moved.status_code, moved.headers["location"]) == (308, "/midstream/")
        for path, name in (("", "index.html"), ("studio.js",) * 2, ("studio.css",) * 2):
            answer = await client.get(f"/midstream/{path}")
            assert answer.status_code == 200
            assert answer.content == (BUILT / name).read_bytes()
            assert answer.headers["content-type"] == TYPES[name]
            for header, value in HEADERS.items():
                assert answer.headers[header] == value
            same = await client.get(
                f"/midstream/{path}", headers={"if-none-match": answer.headers["etag"]}
            )
            assert (same.status_code, same.content) == (304, b"")


@pytest.mark.parametrize("name", ["build.json", "..%2fserver.py", "../server.py", "x.js"])
async def test_no_other_file_is_given(name):
    async with serving(studio=True) as (_, client):
        assert (await client.get(f"/midstream/{name}")).status_code == 404


async def test_the_policy_allows_the_pages_own_files_and_server_alone():
    async with serving(studio=True) as (_, client):
        page = await client.get("/midstream/")
    sent = page.headers["content-security-policy"]
    policy = dict(part.split(" ", 1) for part in sent.split("; "))
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "connect-src": "'self'",
        "img-src": "'self' data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }


async def test_a_page_whose_name_leads_here_does_not_get_it():
    async with serving(studio=True) as (_, client):
        await refused(client.get("/midstream/", headers={"host": "evil.example"}), 403)


async def test_the_setting_is_read_strictly():
    assert Config.parse({"http": {"studio": True}}).http["studio"] is True
    with pytest.raises(ConfigError, match="studio"):
        Config.parse({"http": {"studio": 1}})
    with pytest.raises(ConfigError, match="studio"):
        Config.parse({"http": {"studio": None}})


async def test_the_files_are_built_from_the_sources_that_are_here():
    record = json.loads((BUILT / "build.json").read_text())
    names = ("index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts")
    paths = [SOURCES / name for name in names] + [
        path for path in (SOURCES / "src").rglob("*") if path.is_file()
    ]
    found = {path.relative_to(SOURCES).as_posix(): sha256(path.read_bytes()) for path in paths}
    lines = "".join(f"{found[name]}  {name}\n" for name in sorted(found))
    built = {
        path.name: sha256(path.read_bytes())
        for path in BUILT.iterdir()
        if path != BUILT / "build.json"
    }
    problem = "the sources in studio/ were changed: run `npm ci && npm run build` there"
    assert record["sources"] == sha256(lines.encode()), problem
    assert record["files"] == built, problem


async def test_the_files_are_small_and_name_no_other_place():
    sizes = [path.stat().st_size for path in BUILT.iterdir()]
    assert sum(sizes) < 300_000
    for name in TYPES:
        text = (BUILT / name).read_text()
        assert not re.findall(r"(?:https?:)?//[a-z0-9-]+\.[a-z]", text)
        assert "innerHTML" not in text
        assert "eval(" not in text


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
