"""Requests of one connection, sent before the first is answered, as a proxy may send them."""

import json
from typing import Any

import httpx
from support.pipelined import COMPLETIONS, KEYS, MESSAGES, Asked, Connection
from support.serving import NAME, Running
from support.serving_offline import TOP, VECTOR

from midstream import Steer, extra_body

SAID = "The capital of France is"
PLAIN = {"model": NAME, "prompt": SAID, "max_tokens": 4, "temperature": 0}
STEERED = {**PLAIN, **extra_body(steer=Steer(VECTOR, TOP, 60.0))}
MESSAGE = {
    "model": NAME, "messages": [{"role": "user", "content": SAID}], "max_tokens": 4,
    "temperature": 0,
}  # fmt: skip


def check(server: Running) -> None:
    url = httpx.URL(server.url)

    def texts(*bodies: dict[str, Any]) -> list[str]:
        with Connection((url.host, url.port or 80)) as connection:
            for body in bodies:
                path = MESSAGES if "messages" in body else COMPLETIONS
                asked = Asked("", "POST", path, json.dumps(body).encode(), KEYS[0])
                connection.send(asked.encoded("name"))
            answers = [connection.read() for _ in bodies]
        assert [status for status, _, _ in answers] == [200] * len(bodies)
        values = [json.loads(body) for _, _, body in answers]
        return [(value.get("choices") or value["content"])[0]["text"] for value in values]

    steered, plain, message = (texts(body)[0] for body in (STEERED, PLAIN, MESSAGE))
    assert steered != plain
    sequence = STEERED, PLAIN, PLAIN, MESSAGE, STEERED, MESSAGE
    assert texts(*sequence) == [steered, plain, plain, message, steered, message]
