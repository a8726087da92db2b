"""Requests that ask nothing of midstream, and all that a server answers them."""

from __future__ import annotations

import json
from typing import Any

import httpx

from helpers.serving import NAME, Running

TOKENS = 6
PLAIN = {
    "completions": {"prompt": "The capital of France is", "logprobs": 2},
    "several": {"prompt": ["One two", "Seven"], "n": 2, "seed": 3, "temperature": 1.0},
    "chat/completions": {"messages": [{"role": "user", "content": "Say hello."}], "logprobs": True},
    "refused": {"prompt": "x", "max_tokens": -1},
}


def answered(server: Running, name: str, stream: bool) -> Any:
    """All that a server answers, but for what is another each time."""
    path = name if "completions" in name else "completions"
    body = {"model": NAME, "temperature": 0, "max_tokens": TOKENS, "stream": stream, **PLAIN[name]}
    answer = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=120)
    kind = answer.headers["content-type"]
    if kind.startswith("text/event-stream"):
        texts = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert texts.pop() == "[DONE]"
    else:
        texts = [answer.text]
    values = [json.loads(text) for text in texts]
    for value in values:
        # The fingerprint is of the engine's settings, which midstream's are among.
        for changing in ("id", "created", "system_fingerprint"):
            value.pop(changing, None)
    # Which of several choices comes first is a matter of time.
    values.sort(key=lambda value: [one["index"] for one in value.get("choices", ())])
    return answer.status_code, kind, values
