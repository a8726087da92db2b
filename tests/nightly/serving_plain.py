"""Requests without a plan, and a server's complete responses to them."""

import json
from typing import Any

import httpx
from support.serving import NAME, Running

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
    return answer.status_code, kind, joined(values) if stream else values


def joined(events: list[dict[str, Any]]) -> list[Any]:
    """Events of a stream, those of a choice as one: how many there are is a matter of time."""
    whole: dict[Any, Any] = {}
    for event in events:
        index = event["choices"][0]["index"] if event.get("choices") else None
        whole[index] = add(whole[index], event) if index in whole else event
    return [whole[index] for index in sorted(whole, key=str)]


def add(one: Any, other: Any, name: str = "") -> Any:
    """Return the joined value of a field, from an event and the one after it."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: add(one.get(key), other.get(key), key) for key in {**one, **other}}
    if name == "choices":
        return [add(mine, theirs) for mine, theirs in zip(one, other, strict=True)]
    if isinstance(one, list) and isinstance(other, list) or name in ("text", "content"):
        return (one or other) if None in (one, other) else one + other
    return one if other is None else other
