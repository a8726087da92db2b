"""A stand-in of the Hugging Face Hub's HTTP interface, of what `huggingface_hub` asks it."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlparse

import pytest

COMMIT = "c" * 40


class StandIn:
    """Files of each repository, by kind and name."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.asked: list[str] = []


def _handler(hub: StandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_POST(self) -> None:
            path, body = self._path(), self.rfile.read(int(self.headers["Content-Length"] or 0))
            parts = path.strip("/").split("/")
            if path == "/api/repos/create":
                asked = json.loads(body)
                name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
                key = f"{asked.get('type') or 'model'}s/{name}"
                hub.repositories.setdefault(key, {})
                self._json({"url": f"{self._url()}/{name}", "name": name})
                return
            if path == "/api/validate-yaml":
                self._json({"errors": [], "warnings": []})
                return
            key = "/".join(parts[1:4])
            if parts[4] == "preupload":
                files = [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for file in json.loads(body)["files"]
                ]
                self._json({"files": files})
            elif parts[4] == "commit":
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        content = base64.b64decode(line["value"]["content"])
                        hub.repositories[key][line["value"]["path"]] = content
                url = f"{self._url()}/{'/'.join(parts[2:4])}/commit/{COMMIT}"
                self._json({"commitUrl": url, "commitOid": COMMIT, "success": True})
            else:
                self._nothing()

        def do_GET(self) -> None:
            self._serve(is_head=False)

        def do_HEAD(self) -> None:
            self._serve(is_head=True)

        def _serve(self, is_head: bool) -> None:
            parts = self._path().strip("/").split("/")
            if parts[0] == "api":
                key = "/".join(parts[1:4])
                if key not in hub.repositories:
                    self._nothing("RepoNotFound")
                    return
                if parts[4:5] == ["tree"]:
                    self._json([
                        {"type": "file", "path": name, "size": len(data),
                         "oid": hashlib.sha1(data).hexdigest()}
                        for name, data in hub.repositories[key].items()
                    ])  # fmt: skip
                    return
                siblings = [{"rfilename": name} for name in hub.repositories[key]]
                self._json({"id": "/".join(parts[2:4]), "sha": COMMIT, "siblings": siblings,
                            "private": False, "tags": [], "downloads": 0})  # fmt: skip
                return
            kind = "datasets" if parts[0] == "datasets" else "models"
            parts = parts[1:] if kind == "datasets" else parts
            name = "/".join(parts[4:])
            data = hub.repositories.get(f"{kind}/{'/'.join(parts[:2])}", {}).get(name)
            if data is None:
                self._nothing("EntryNotFound")
                return
            hub.asked.append(name)
            self.send_response(200)
            self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if not is_head:
                self.wfile.write(data)

        def _path(self) -> str:
            return unquote(urlparse(self.path).path)

        def _url(self) -> str:
            return f"http://{self.headers['Host']}"

        def _json(self, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _nothing(self, code: str = "") -> None:
            self.send_response(404)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    return Handler


@contextmanager
def hub_stand_in(patch: pytest.MonkeyPatch, cache: Any) -> Iterator[StandIn]:
    """Have `huggingface_hub` ask a stand-in in this process, with a cache of its own."""
    from huggingface_hub import constants

    hub = StandIn()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    for name, value in (
        ("ENDPOINT", url),
        ("HF_HUB_OFFLINE", False),
        ("HF_HUB_CACHE", str(cache)),
        ("HF_HUB_DISABLE_XET", True),
        ("HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"),
    ):
        patch.setattr(constants, name, value)
    patch.setenv("HF_TOKEN", "hf_stand_in")
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
