"""Requests of several clients on one connection, sent without waiting for answers, as HTTP/1.1
allows and proxies do. Each answer is compared with that of the same request on a connection of its
own, and each engine call with the plan of its request.
"""

from __future__ import annotations

import gc
import hashlib
import http.client
import io
import itertools
import json
import random
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from midstream.config.config import KEY
from midstream.plan import Plan
from midstream.runtime.frontend.request.call_plan import CallPlan
from support.listening import Listening
from support.serving_fake import outputs_of

KEYS = ("one", "two", "three")
ADDRESSES = ("192.0.2.1", "192.0.2.2", "192.0.2.3")
COMPLETIONS, CHAT, RESPONSES, MESSAGES = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages",
)  # fmt: skip
NAME = "request{:08d}"
_NAMED = re.compile(r"(?:cmpl|resp|msg)-(.*)-\d+")
# What differs between two answers to the same request: ids of cached rows, and when they expire.
_ROWS = re.compile(rb'"id": ?"([-\w]{32})"')
_CHANGING = re.compile(rb'(/v1/midstream/activations/|"id": ?")[-\w]{32}"|"expires_at": ?[\d.e+]+')
_HEADERS = ("content-length", "date", "x-request-id")
_SECONDS = 60.0


@dataclass(frozen=True)
class Asked:
    """One request."""

    kind: str
    method: str
    path: str
    body: bytes
    client: str

    def encoded(self, name: str) -> bytes:
        """Return the bytes to send."""
        head = f"{self.method} {self.path} HTTP/1.1\r\nhost: localhost\r\nx-request-id: {name}\r\n"
        if self.client in KEYS:
            head += f"authorization: Bearer {self.client}\r\n"
        else:
            head += f"x-forwarded-for: {self.client}\r\n"
        if self.body:
            head += f"content-type: application/json\r\ncontent-length: {len(self.body)}\r\n"
        return head.encode() + b"\r\n" + self.body

    @property
    def owner(self) -> str:
        """The id of its client."""
        if self.client in KEYS:
            return hashlib.sha256(self.client.encode()).hexdigest()[:16]
        return self.client

    @property
    def plans(self) -> list[Plan | None]:
        """The plan of each engine call that it makes."""
        if self.method != "POST" or self.kind.startswith("rejected"):
            return []
        value = json.loads(self.body).get(KEY) or {}
        if isinstance(value, dict):
            value.pop("activations", None)
        return [Plan.make(**value)]


@dataclass(frozen=True)
class Answer:
    """An answer, without what differs from one time to the next."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    owners: tuple[str, ...] = ()


class Connection:
    """A connection of a raw socket, whose answers are read in the order of its requests."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address, _SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self.socket.makefile("rb")

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self.socket.close()

    def makefile(self, _mode: str) -> Any:
        """Return what `http.client` reads an answer from; it may close that."""
        return _Unclosed(self._file)

    def send(self, data: bytes) -> None:
        """Send bytes."""
        self.socket.sendall(data)

    def read(self, method: str = "POST") -> tuple[int, list[tuple[str, str]], bytes]:
        """Return status, headers and body of the next answer."""
        answer = http.client.HTTPResponse(self, method=method)  # type: ignore[arg-type]
        answer.begin()
        return answer.status, answer.getheaders(), answer.read()

    def break_off(self) -> None:
        """Close it as a machine does that has lost it: the server cannot write to it any more."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class _Unclosed(io.BufferedIOBase):
    """A file that stays open when it is closed."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.read, self.read1, self.readinto = file.read, file.read1, file.readinto
        self.readline, self.peek, self.flush = file.readline, file.peek, lambda: None

    def close(self) -> None:
        """Leave it open for the next answer."""


@dataclass
class Pipelines:
    """Requests to one server, and what is known of them."""

    listening: Listening
    clients: Sequence[str]
    ran: dict[str, list[Plan | None]] = field(default_factory=dict)
    asked: dict[str, Asked] = field(default_factory=dict)
    alone: dict[Asked, Answer] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.listening.site.engine.script = self._script

    def _script(self, prompt: Any, params: Any, request_id: str) -> list[Any]:
        """Return outputs whose text tells the plan, which is recorded."""
        carried = (params.extra_args or {}).get(KEY)
        plan = carried.plan if isinstance(carried, CallPlan) else carried
        named = _NAMED.fullmatch(request_id)
        assert named is not None
        self.ran.setdefault(named[1], []).append(plan)
        text = "plain" if plan is None else json.dumps(plan.to_dict(), sort_keys=True)
        found = outputs_of(prompt, params, request_id)
        for output in found:
            for completion in output.outputs:
                completion.text += " " + hashlib.sha256(text.encode()).hexdigest()[:12]
        return found

    def name(self, asked: Asked) -> str:
        """Return a new id for a request."""
        name = NAME.format(next(self.numbers))
        self.asked[name] = asked
        return name

    def read(self, connection: Connection, asked: Asked, name: str) -> Answer:
        """Return the next answer, and delete its cached rows."""
        status, headers, body = connection.read(asked.method)
        captures = self.listening.site.server.captures
        owners = []
        for found in _ROWS.findall(body):
            kept = captures.get(found.decode())
            if kept is not None:
                owners.append(kept.client)
                captures.delete(kept.id)
        body = _CHANGING.sub(b"CHANGING", body.replace(name.encode(), b"NAME"))
        left = tuple(sorted(one for one in headers if one[0].lower() not in _HEADERS))
        return Answer(status, left, body, tuple(owners))

    def answer_alone(self, asked: Asked) -> Answer:
        """Return the answer to a request on a connection of its own."""
        if asked not in self.alone:
            name = self.name(asked)
            with Connection(self.listening.address) as connection:
                connection.send(asked.encoded(name))
                found = self.read(connection, asked, name)
            assert set(found.owners) <= {asked.owner}
            self.alone[asked] = found
        return self.alone[asked]

    def follow(self, sequence: Sequence[Asked], rng: random.Random | None = None) -> list[str]:
        """Send requests on one connection, and return what differs from their answers alone."""
        expected = [self.answer_alone(asked) for asked in sequence]
        names = [self.name(asked) for asked in sequence]
        sent = [asked.encoded(name) for asked, name in zip(sequence, names, strict=True)]
        read = ahead = len(sequence)
        if rng is not None:
            ahead = rng.choice((ahead, ahead, 2, 1))
            read = read if rng.random() < 0.85 else rng.randrange(len(sequence))
        found: list[Answer] = []
        with Connection(self.listening.address) as connection:

            def answers(count: int) -> None:
                while len(found) < min(count, read):
                    nth = len(found)
                    found.append(self.read(connection, sequence[nth], names[nth]))

            if ahead >= len(sequence):
                for piece in _pieces(b"".join(sent), rng):
                    connection.send(piece)
            else:
                for nth, one in enumerate(sent):
                    answers(nth + 1 - ahead)
                    connection.send(one)
            answers(read)
            if read % 2 and read < len(sequence):
                connection.break_off()
        return [
            f"{[one.kind for one in sequence]}, answer {nth}: expected {right}, got {answer}"
            for nth, (right, answer) in enumerate(zip(expected, found, strict=False))
            if right != answer
        ]

    def wrong_plans(self) -> list[str]:
        """Return which engine calls ran with another plan than that of their request."""
        site, end = self.listening.site, time.monotonic() + _SECONDS
        while site.engine.running + len(site.server.open_requests):
            calls, requests = site.engine.running, len(site.server.open_requests)
            left = f"{calls} calls of the engine and {requests} requests do not end"
            assert time.monotonic() < end, left
            time.sleep(0.01)
            # The stream of a client that broke off may end only when its generator is collected.
            gc.collect()
        return [
            f"{name}, {self.asked[name].kind}: expected {self.asked[name].plans}, ran {ran}"
            for name, ran in self.ran.items()
            if ran != self.asked[name].plans
        ]


def _pieces(sent: bytes, rng: random.Random | None) -> list[bytes]:
    """Return bytes in one piece, or cut anywhere."""
    if rng is None or rng.randrange(2):
        return [sent]
    cuts = sorted(rng.randrange(len(sent)) for _ in range(3))
    pairs = zip([0, *cuts], [*cuts, len(sent)], strict=True)
    return [sent[start:stop] for start, stop in pairs if start < stop]


def _steer(rng: random.Random) -> dict[str, Any]:
    scale, layer = rng.choice((0.5, 2.0)), rng.randrange(2)
    return {"edits": [{"op": "steer", "vector": [1.0, 2.0, 2.0], "layer": layer, "scale": scale}]}


def _capture(rng: random.Random, how: str = "handle", **more: Any) -> dict[str, Any]:
    return {"capture": {"layers": [rng.randrange(4)], **more}, "activations": how}


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


_PADDING = "x" * 100_000  # more than uvicorn reads before the handler asks for it
_PROBE = {"probes": [{"name": "p", "direction": [1.0, 2.0, 2.0], "layer": 1}]}
# By kind: method, path, and what makes the body.
KINDS: dict[str, tuple[str, str, Callable[[random.Random], Any]]] = {
    "plain": ("POST", COMPLETIONS, lambda _: {"prompt": "abc"}),
    "plain, long": ("POST", COMPLETIONS, lambda _: {"prompt": "abc", "note": _PADDING}),
    "plain, streamed": ("POST", COMPLETIONS, lambda _: {"prompt": "ab", "stream": True}),
    "plain chat": ("POST", CHAT, lambda _: {"messages": _messages("abc")}),
    "plain response": ("POST", RESPONSES, lambda _: {"input": "abc"}),
    "plain message": ("POST", MESSAGES, lambda _: {"messages": _messages("abc")}),
    "nothing asked": ("POST", COMPLETIONS, lambda _: {"prompt": "abc", KEY: {}}),
    "steered": ("POST", COMPLETIONS, lambda rng: {"prompt": "abc", KEY: _steer(rng)}),
    "steered, long": (
        "POST", COMPLETIONS, lambda rng: {"prompt": "abc", "note": _PADDING, KEY: _steer(rng)},
    ),
    "steered, streamed": (
        "POST", COMPLETIONS, lambda rng: {"prompt": "abc", "stream": True, KEY: _steer(rng)},
    ),
    "steered chat": ("POST", CHAT, lambda rng: {"messages": _messages("a"), KEY: _steer(rng)}),
    "steered response": ("POST", RESPONSES, lambda rng: {"input": "abc", KEY: _steer(rng)}),
    "captured": ("POST", COMPLETIONS, lambda rng: {"prompt": "abcd", KEY: _capture(rng)}),
    "captured chat": ("POST", CHAT, lambda rng: {"messages": _messages("a"), KEY: _capture(rng)}),
    "captured response": (
        "POST", RESPONSES, lambda rng: {"input": "abc", "stream": True, KEY: _capture(rng)},
    ),
    "captured inline": (
        "POST", COMPLETIONS, lambda rng: {"prompt": "abcd", KEY: _capture(rng, "inline")},
    ),
    "captured, streamed": (
        "POST", COMPLETIONS,
        lambda rng: {"prompt": "a", "stream": True, KEY: _capture(rng, "inline", stream=True)},
    ),
    "probed": ("POST", COMPLETIONS, lambda _: {"prompt": "abc", KEY: _PROBE}),
    "rejected field": ("POST", COMPLETIONS, lambda _: {"prompt": "abc", KEY: {"capture": 3.5}}),
    "rejected beams": (
        "POST", COMPLETIONS,
        lambda rng: {"prompt": "abc", "use_beam_search": True, KEY: _steer(rng)},
    ),
    "rejected message": (
        "POST", MESSAGES, lambda rng: {"messages": _messages("a"), KEY: _steer(rng)},
    ),
    "rejected JSON": ("POST", COMPLETIONS, lambda _: b'{"prompt": "abc", "midstream": {'),
    "rejected path": ("POST", "/v1/nothing", lambda rng: {"prompt": "abc", KEY: _steer(rng)}),
    "health": ("GET", "/health", lambda _: b""),
    "head of health": ("HEAD", "/health", lambda _: b""),
    "vectors": ("GET", "/v1/midstream/vectors", lambda _: b""),
    "no rows": ("DELETE", "/v1/midstream/activations/none", lambda _: b""),
}  # fmt: skip


def ask(kind: str, client: str, rng: random.Random | None = None) -> Asked:
    """Return a request of a kind of `KINDS`."""
    method, path, make = KINDS[kind]
    body = make(rng or random.Random(0))
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Asked(kind, method, path, content, client)


def draw(clients: Sequence[str], rng: random.Random) -> list[Asked]:
    """Return random requests for one connection."""
    kinds = list(KINDS)
    return [ask(rng.choice(kinds), rng.choice(clients), rng) for _ in range(rng.randint(2, 6))]
