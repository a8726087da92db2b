"""Studio: a page for browsers at `/midstream`, of the files that `studio/` builds. Needs no key."""

from __future__ import annotations

import functools
import hashlib
from importlib.resources import files

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from midstream.errors import HttpError
from midstream.server.routes.common import MidstreamRoute

PATH = "/midstream"
INDEX = "index.html"
TYPES = {
    INDEX: "text/html; charset=utf-8",
    "studio.js": "text/javascript; charset=utf-8",
    "studio.css": "text/css; charset=utf-8",
}
HEADERS = {
    # The page loads its own two files and calls its own server, and is shown in no frame.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}

router = APIRouter(route_class=MidstreamRoute, include_in_schema=False)


@router.get(PATH)
def redirect(request: Request) -> Response:
    return RedirectResponse(f"{request.scope.get('root_path', '')}{PATH}/", 308)


@router.get(f"{PATH}/")
def index(request: Request) -> Response:
    return _answer(request, INDEX)


@router.get(f"{PATH}/{{name}}")
def asset(name: str, request: Request) -> Response:
    if name not in TYPES:
        raise HttpError(404, f"Studio has no file {name[:100]!r}", "name")
    return _answer(request, name)


def _answer(request: Request, name: str) -> Response:
    content, etag = _read(name)
    headers = {**HEADERS, "etag": etag}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers={**headers, "content-type": TYPES[name]})


@functools.cache
def _read(name: str) -> tuple[bytes, str]:
    content = (files("midstream.server") / "studio" / name).read_bytes()
    return content, f'"{hashlib.sha256(content).hexdigest()[:32]}"'
