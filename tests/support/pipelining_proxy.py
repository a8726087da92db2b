"""A proxy of this machine that sends the requests of many clients over few connections, each
without waiting for the answers before it (HTTP/1.1 pipelining).
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

_END = b"\r\n\r\n"
_LIMIT = 1 << 24  # bytes of a head or of a line of chunks
Write = Callable[[bytes], None]


class Head(NamedTuple):
    """First line and headers of a request or of a response.

    Attributes:
        raw: as sent, with the empty line behind it.
        words: of the first line.
        headers: by name in lower case.
    """

    raw: bytes
    words: list[str]
    headers: dict[str, str]


async def read_head(reader: asyncio.StreamReader) -> Head:
    """Read a head.

    Raises:
        asyncio.IncompleteReadError: the connection ended before it.
    """
    raw = await reader.readuntil(_END)
    first, *lines = raw.decode("latin-1").strip().split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return Head(raw, first.split(" "), {name.lower(): value.strip() for name, _, value in pairs})


async def read_answer(reader: asyncio.StreamReader, method: str, write: Write) -> int:
    """Read one answer, and return its status.

    Args:
        reader: the connection.
        method: the request's.
        write: gets the bytes of the answer as they come.
    """
    head = await read_head(reader)
    status = int(head.words[1])
    write(head.raw)
    if method == "HEAD" or status in (204, 304):
        return status
    if head.headers.get("transfer-encoding", "").lower() != "chunked":
        write(await reader.readexactly(int(head.headers["content-length"])))
        return status
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line.partition(b";")[0], 16)
        write(line + await reader.readexactly(size + 2))
        if size == 0:
            return status


class _Upstream:
    """One connection to the server, and who waits for its answers, in their order."""

    def __init__(self, host: str, port: int) -> None:
        self._server = host, port
        self._waiting: deque[tuple[str, Write, asyncio.Future[None]]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._opening = asyncio.Lock()
        self.deepest = 0

    async def ask(self, method: str, request: bytes, write: Write) -> None:
        """Send a request, and return once its whole answer was given to `write`."""
        async with self._opening:
            if self._writer is None or self._writer.is_closing():
                reader, self._writer = await asyncio.open_connection(*self._server, limit=_LIMIT)
                self._task = asyncio.create_task(self._read(reader, self._writer))
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((method, write, done))
            self.deepest = max(self.deepest, len(self._waiting))
            self._writer.write(request)
        await done

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                if not self._waiting:
                    await asyncio.sleep(0.001)
                    if reader.at_eof():
                        return
                    continue
                method, write, done = self._waiting[0]
                await read_answer(reader, method, write)
                self._waiting.popleft()
                if not done.done():
                    done.set_result(None)
        except (OSError, asyncio.IncompleteReadError) as error:
            while self._waiting:
                _, _, done = self._waiting.popleft()
                if not done.done():
                    done.set_exception(ConnectionError(f"the server closed: {error}"))
        finally:
            writer.close()

    def close(self) -> None:
        """Close the connection."""
        if self._task is not None:
            self._task.cancel()


class Proxy:
    """The proxy.

    Attributes:
        port: where it listens, on 127.0.0.1.
        requests: how many it has sent on.
        abandoned: of how many the client had gone when the answer came.
    """

    def __init__(self, host: str, port: int, connections: int) -> None:
        """Args:
        host, port: the server's.
        connections: how many to keep to the server.
        """
        self._upstreams = [_Upstream(host, port) for _ in range(connections)]
        self._turn = itertools.cycle(self._upstreams)
        self.port = 0
        self.requests = self.abandoned = 0

    @property
    def deepest(self) -> int:
        """The most requests that were sent on one connection and not answered yet."""
        return max(one.deepest for one in self._upstreams)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Proxy]:
        """Answer clients for the duration of the context."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_LIMIT)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for one in self._upstreams:
                one.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def write(data: bytes) -> None:
            if not writer.is_closing():
                writer.write(data)

        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await read_head(reader)
                body = await reader.readexactly(int(head.headers.get("content-length", 0)))
                self.requests += 1
                # A connection that is chosen in turn has requests of every client.
                await next(self._turn).ask(head.words[0], head.raw + body, write)
                self.abandoned += writer.is_closing()
                await writer.drain()
        writer.close()
