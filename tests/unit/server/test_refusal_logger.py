"""Refusals are noted on their way out, and nothing of an answer changes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from midstream.server.http_errors import RefusalLogger


def send(status: int, *parts: bytes) -> tuple[list[dict[str, Any]], list[tuple[int, str | None]]]:
    out: list[dict[str, Any]] = []
    noted: list[tuple[int, str | None]] = []

    async def go() -> None:
        async def take(message: Any) -> None:
            out.append(message)

        watched = RefusalLogger(take, lambda status, param: noted.append((status, param)))
        await watched({"type": "http.response.start", "status": status, "headers": []})
        for nth, part in enumerate(parts, 1):
            more = nth < len(parts)
            await watched({"type": "http.response.body", "body": part, "more_body": more})

    asyncio.run(go())
    assert [one["type"] for one in out] == ["http.response.start"] + ["http.response.body"] * len(
        parts
    )
    assert b"".join(one["body"] for one in out[1:]) == b"".join(parts)
    return out, noted


ERROR = json.dumps({"error": {"message": "no", "param": "midstream.capture", "code": 400}}).encode()


@pytest.mark.parametrize(
    ("status", "parts", "expected"),
    [
        (200, (ERROR,), []),
        (204, (b"",), []),
        (400, (ERROR,), [(400, "midstream.capture")]),
        (413, (ERROR[:9], ERROR[9:]), [(413, "midstream.capture")]),
        (404, (b'{"detail": "Not Found"}',), [(404, None)]),
        (500, (b"Internal Server Error",), [(500, None)]),
        (400, (b'{"error": "text"}',), [(400, None)]),
        (400, (b'{"error": {"param": 7}}',), [(400, None)]),
        (400, (b"[" * 100_000,), [(400, None)]),
    ],
)
def test_a_refusal_is_noted_once_with_its_status_and_field(status, parts, expected):
    _, noted = send(status, *parts)
    assert noted == expected


def test_a_field_of_any_length_is_noted_short():
    body = json.dumps({"error": {"param": "x" * 5000}}).encode()
    _, noted = send(400, body)
    assert noted == [(400, "x" * 200)]
