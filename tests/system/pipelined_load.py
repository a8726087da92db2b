"""Many clients behind a proxy that pipelines their requests over few connections to `vllm serve`.
Each answer is compared with that of the same request alone, on a connection of its own.

    python -m system.pipelined_load MODEL [--seconds 300] [--clients 64] [--connections 4]

Prints a table, and exits with 1 if an answer differs.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from support import serving
from support.pipelined import CHAT, COMPLETIONS, KEYS, MESSAGES, RESPONSES, Asked, Connection
from support.pipelining_proxy import Proxy, read_answer
from support.serving import NAME

from midstream import Capture, Probe, Steer, extra_body
from midstream.config.config import KEY
from midstream.results.serialization import unpack

LAYERS, WIDTH = 30, 576
DISTINCT = 96  # number of different requests, of which the clients draw theirs
_LEAVES = 0.03  # share of requests whose client does not wait for the answer
# What differs between two answers to the same request.
_OWN = frozenset({"id", "created", "created_at", "request_id", "url", "expires_at", "item_id"})
_ROWS = "/v1/midstream/activations/"
# Rounding of a row, relative to its length; and of a score.
_ROUNDING, _SCORE = 1e-4, 1e-2


@dataclass
class Tally:
    """What came of the requests, by kind.

    Attributes:
        requests, differ: how many there were, and how many were answered in another way.
        rows: how many cached captures were fetched by their client and refused to another one.
        abandoned: of how many the client has not waited for the answer.
        seconds: how long each answered request took.
        problems: what was wrong, in words.
    """

    requests: Counter[str] = field(default_factory=Counter)
    differ: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    abandoned: int = 0
    seconds: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def table(self) -> str:
        """Return a table by kind of request."""
        lines = [f"{'kind':24} {'requests':>9} {'differ':>7}"]
        for kind in sorted(self.requests):
            lines.append(f"{kind:24} {self.requests[kind]:9} {self.differ[kind]:7}")
        lines.append(f"{'all':24} {self.requests.total():9} {self.differ.total():7}")
        return "\n".join(lines)


def requests(count: int) -> list[Asked]:
    """Return the requests of which clients draw theirs."""
    rng = random.Random(0)
    return [_draw(nth, rng) for nth in range(count)]


def _vector(rng: random.Random) -> list[float]:
    return [rng.gauss(0, 1) for _ in range(WIDTH)]


def _plan(kind: str, rng: random.Random) -> dict[str, Any]:
    layer, layers = rng.randrange(LAYERS), sorted(rng.sample(range(LAYERS), 2))
    if kind == "steered":
        return extra_body(steer=Steer(_vector(rng), layer, rng.choice((20.0, 60.0))))
    if kind == "captured":
        return extra_body(capture=Capture(layers), activations="inline")
    if kind == "cached":
        return extra_body(capture=Capture(layers), activations="handle")
    if kind == "probed":
        return extra_body(probes=Probe(_vector(rng), layer, name="p"), activations="none")
    if kind == "rejected":
        return {KEY: {"capture": {"layers": [LAYERS + layer]}}}
    return {}


def _draw(nth: int, rng: random.Random) -> Asked:
    kinds = ("plain", "steered", "captured", "plain", "cached", "probed", "plain", "rejected")
    kind = kinds[nth % len(kinds)]
    text = rng.choice(("The capital of France is", "Once upon a time", "2 + 2 =", "Dear Sir"))
    plan = _plan(kind, rng)
    forms = ["completion", "streamed", "chat", "response"] + ["message"] * (kind == "plain")
    form = forms[nth // len(kinds) % len(forms)]
    body: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": rng.randint(1, 4)}
    if form == "response":
        path = RESPONSES
        body = {"model": NAME, "temperature": 0, "max_output_tokens": 3, "input": text}
    elif form in ("chat", "message"):
        path = CHAT if form == "chat" else MESSAGES
        body |= {"messages": [{"role": "user", "content": text}]}
    else:
        path = COMPLETIONS
        body |= {"prompt": text, "ignore_eos": True, "stream": form == "streamed"}
    content = json.dumps({**body, **plan}).encode()
    return Asked(f"{kind}, {form}", "POST", path, content, rng.choice(KEYS))


def outline(body: bytes, rows: list[str]) -> Any:
    """Return what two answers to the same request have in common.

    Args:
        body: the answer.
        rows: gets the ids of cached rows.
    """
    text = body.decode()
    if not text.startswith(("data:", "event:", ":")):
        return _common(json.loads(text) if text else None, rows)
    # How many tokens an event has depends on the load.
    found: dict[str, Any] = {"text": "", "ends": [], "scores": []}
    for line in text.splitlines():
        if line.startswith("data: {"):
            value = json.loads(line.removeprefix("data: "))
            for choice in value.get("choices", ()):
                found["text"] += choice.get("text") or ""
                found["ends"] += filter(None, [choice.get("finish_reason")])
            own = _common(value.get(KEY, {}), rows)
            for probe in own.pop("probes", {}).values():
                found["scores"] += zip(probe["positions"], probe["scores"], strict=True)
            found |= own | {name: value[name] for name in ("error",) if name in value}
    return found


def _common(value: Any, rows: list[str]) -> Any:
    if isinstance(value, list):
        return [_common(one, rows) for one in value]
    if not isinstance(value, dict):
        return value
    if str(value.get("url", "")).startswith(_ROWS):
        rows.append(value["id"])
    if isinstance(value.get("base64"), str):
        return _values(base64.b64decode(value["base64"]))
    return {name: _common(one, rows) for name, one in value.items() if name not in _OWN}


def _values(packed: bytes) -> dict[str, torch.Tensor]:
    """Return packed rows by their tap, with their positions."""
    rows = unpack(packed)
    found = {f"{site} {layer}": rows[site, layer] for site, layer in rows}
    found |= {f"positions of {tap}": rows.positions_of(*tap) for tap in rows}
    return found


def is_same(one: Any, other: Any) -> bool:
    """Return whether two answers are the same but for rounding, which depends on what else is in
    the batch.
    """
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or not one.is_floating_point():
            return torch.equal(one, other)
        return bool(((one - other).norm(dim=-1) <= _ROUNDING * other.norm(dim=-1)).all())
    if isinstance(one, float) and isinstance(other, float):
        # A score is a sum of terms that are larger than it is.
        return math.isclose(one, other, rel_tol=_ROUNDING, abs_tol=_SCORE)
    return type(one) is type(other) and bool(one == other)


class _Client:
    """A client of the server, on a connection that it opens again when it has left it."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, asked: Asked, name: str, *, leaves: bool = False) -> tuple[int, bytes]:
        """Return status and body of the answer; nothing of it if the client leaves before."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address, limit=1 << 24)
        reader, writer = self._streams
        writer.write(asked.encoded(name))
        await writer.drain()
        if leaves:
            self.close()
            return 0, b""
        parts: list[bytes] = []
        status = await read_answer(reader, asked.method, parts.append)
        head, *rest = parts
        if b"transfer-encoding: chunked" in head.lower():
            rest = [part.partition(b"\r\n")[2][:-2] for part in rest]
        return status, b"".join(rest)

    def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class Load:
    """One run of the load against a server whose API keys are `KEYS`."""

    def __init__(self, url: str, distinct: int = DISTINCT) -> None:
        """Args:
        url: the server's.
        distinct: number of different requests.
        """
        given = httpx.URL(url)
        self._server = given.host, given.port or 80
        self._asked = requests(distinct)
        self._alone: dict[Asked, tuple[int, Any, list[Any]]] = {}
        self.tally = Tally()
        self.deepest = 0

    def answer_alone(self) -> None:
        """Ask for each request alone."""
        for asked in self._asked:
            with Connection(self._server) as connection:
                connection.send(asked.encoded("alone"))
                status, _, body = connection.read()
            rows: list[str] = []
            told = outline(body, rows)
            fetched = [self._fetch(name, asked.client) for name in rows]
            self._alone[asked] = status, told, [one for one in fetched if one is not None]
            assert len(fetched) == len(self._alone[asked][2])
            assert (status == 200) != asked.kind.startswith("rejected"), body[:500]

    def _fetch(self, name: str, key: str) -> Any:
        """Return cached rows, on a connection of their own; None: this client has none such."""
        asked = Asked("rows", "GET", _ROWS + name, b"", key)
        with Connection(self._server) as connection:
            connection.send(asked.encoded("rows"))
            status, _, body = connection.read("GET")
        return _values(body) if status == 200 else None

    async def run(self, clients: int, connections: int, seconds: float) -> None:
        """Have clients ask behind a proxy.

        Args:
            clients: how many.
            connections: how many the proxy keeps to the server.
            seconds: for how long.
        """
        end = time.monotonic() + seconds
        async with Proxy(*self._server, connections).listening() as proxy:
            address = "127.0.0.1", proxy.port
            await asyncio.gather(*(self._client(nth, address, end) for nth in range(clients)))
            self.deepest = proxy.deepest

    async def _client(self, number: int, address: tuple[str, int], end: float) -> None:
        rng, client, tally = random.Random(number), _Client(address), self.tally
        while time.monotonic() < end:
            asked, began = rng.choice(self._asked), time.monotonic()
            name = f"client-{number}-{tally.requests.total()}"
            if rng.random() < _LEAVES:
                await client.ask(asked, name, leaves=True)
                tally.abandoned += 1
                continue
            status, body = await client.ask(asked, name)
            tally.seconds.append(time.monotonic() - began)
            tally.requests[asked.kind] += 1
            problem = await self._problem(asked, status, body)
            if problem:
                tally.differ[asked.kind] += 1
                tally.problems.append(f"{name}, {asked.kind}: {problem}")
        client.close()

    async def _problem(self, asked: Asked, status: int, body: bytes) -> str:
        """Return what is wrong with an answer; empty: nothing."""
        rows: list[str] = []
        told = outline(body, rows)
        right, expected, kept = self._alone[asked]
        fetched = []
        for name in rows:
            fetched.append(await asyncio.to_thread(self._fetch, name, asked.client))
            other = KEYS[(KEYS.index(asked.client) + 1) % len(KEYS)]
            if await asyncio.to_thread(self._fetch, name, other) is not None:
                return "another client can fetch the rows"
            self.tally.rows += 1
        if status != right or not is_same(told, expected):
            return f"expected {right} {str(expected)[:600]}, got {status} {str(told)[:600]}"
        return "" if is_same(fetched, kept) else "other rows"


def command(model: Path) -> list[str]:
    """Python's arguments that start the server."""
    return serving.command(model.resolve(), "--sites=resid_post", "--api-key", *KEYS)


def main(words: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--connections", type=int, default=4)
    given = parser.parse_args(None if words is None else list(words))
    with (
        tempfile.TemporaryDirectory() as folder,
        serving.running(command(given.model), Path(folder)) as server,
    ):
        load = Load(server.url)
        load.answer_alone()
        asyncio.run(load.run(given.clients, given.connections, given.seconds))
    tally = load.tally
    typical = sorted(tally.seconds)[len(tally.seconds) // 2]
    sys.stdout.write(
        f"{tally.table()}\n{given.clients} clients, {given.connections} connections to the server, "
        f"at most {load.deepest} requests on one at a time, {given.seconds:.0f} s; median of an "
        f"answer {typical:.2f} s; {tally.rows} cached captures fetched; {tally.abandoned} requests "
        "whose client left\n"
    )
    for problem in tally.problems[:10]:
        sys.stdout.write(problem + "\n")
    return int(bool(tally.problems))


if __name__ == "__main__":
    sys.exit(main())
