"""Refusals are noted on their way out, and nothing of an answer changes."""

import json
from typing import Any

import pytest

from midstream.server.http_errors import RefusalLogger

pytestmark = pytest.mark.anyio
ERROR = json.dumps({"error": {"message": "no", "param": "midstream.capture", "code": 400}}).encode()
LONG = json.dumps({"error": {"param": "x" * 5000}}).encode()


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
        (400, (LONG,), [(400, "x" * 200)]),
    ],
)
async def test_a_refusal_is_noted_once_with_its_status_and_the_beginning_of_its_field(
    status, parts, expected
):
    out: list[Any] = []
    noted: list[tuple[int, str | None]] = []

    async def take(message: Any) -> None:
        out.append(message)

    watched = RefusalLogger(take, lambda status, param: noted.append((status, param)))
    sent = [{"type": "http.response.start", "status": status, "headers": []}]
    sent += [
        {"type": "http.response.body", "body": part, "more_body": nth < len(parts)}
        for nth, part in enumerate(parts, 1)
    ]
    for message in sent:
        await watched(message)
    assert out == sent
    assert noted == expected
