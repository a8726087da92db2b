"""The API server processes of one server, which ask each other by HTTP on sockets in its private
folder, with the client's own headers, so that each checks them itself.
"""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from midstream.deadlines import locked
from midstream.errors import HttpError, ServerError
from midstream.runtime.frontend.engine_info import FrontEnds

# Key in the scope of a request that another process has sent.
PEER = "midstream.peer"
_CLIENT = b"x-midstream-client"
_SECONDS = 30.0  # for each part of an answer
_RETRY_SECONDS = 2
_NO_LISTENER = (errno.ECONNREFUSED, errno.ENOENT)
_NO_QUEUE = (errno.EAGAIN, errno.ENOTCONN)  # its queue of connections is full
_NO_MEMORY = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
_SHOWN = 200
_OTHER = "another API server process of this server"
_ROWS, _REQUESTS = "/v1/midstream/activations/", "/v1/midstream/requests/"
CAPTURES = "/v1/midstream/captures"
# Headers of one connection, and what is ours.
_DROPPED = frozenset(
    {b"connection", b"content-length", b"expect", b"keep-alive", b"transfer-encoding", _CLIENT}
)
Answer = Callable[[Send], Awaitable[None]]  # by this process
Way = Callable[[Answer, Scope, bytes, Send], Awaitable[None]]


class Peers:
    """The other processes, as one of them sees them. Call on the event loop, but `read_rows`."""

    def __init__(self, folder: Path, front_ends: FrontEnds) -> None:
        self._folder = folder
        self.front_ends = front_ends  # how many there are, and the number of this one
        self._others = [n for n in range(front_ends.count) if n != front_ends.number]
        self._changing = asyncio.Lock()  # held by process 0 while it changes all
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None

    def listen(self, app: ASGIApp) -> None:
        """Answer the other processes from now on."""

        async def from_peer(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                names = dict(scope["headers"])
                client = names.get(_CLIENT, b"").decode("latin-1")
                scope = {**scope, PEER: True, "client": (client, 0) if client else None}
            await app(scope, receive, send)

        path = str(self._path(self.front_ends.number))
        config = uvicorn.Config(
            from_peer, uds=path, lifespan="off", log_config=None, access_log=False
        )
        self._server = _Listener(config)
        self._task = asyncio.create_task(self._server.serve(), name="midstream peers")

    def close(self) -> None:
        self._path(self.front_ends.number).unlink(missing_ok=True)
        if self._server is not None:
            self._server.should_exit = True

    def way(self, scope: Scope, path: str) -> Way | None:
        """Return how a request for midstream's own endpoints is answered; None: by this process."""
        is_change = scope["method"] in ("PUT", "DELETE")
        if is_change and (path == CAPTURES or path.startswith(f"{CAPTURES}/")):
            # Process 0 changes one after the other, so that all have the same in the end.
            if self.front_ends.number == 0:
                return self._change_all
            return None if PEER in scope else self._leave_to_first
        if PEER not in scope and path.startswith((_ROWS, _REQUESTS)):
            return self._find
        return None

    async def each(
        self, scope: Scope, method: str = "GET", path: str = ""
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the JSON of each other process's answer; nothing for a request from one of them."""
        for number in () if PEER in scope else self._others:
            answer = await self._ask(number, scope, method, path)
            if answer is not None and answer.status_code == 200:
                yield json.loads(answer.content)
            elif answer is not None and answer.status_code != 404:  # it has nothing of that name
                raise rejection(answer)

    async def refresh_metrics(self, scope: Scope) -> None:
        """Have the other processes update what they contribute to the metrics."""
        for number in () if PEER in scope else self._others:
            with suppress(HttpError):
                await self._ask(number, scope, "GET", "")

    def read_rows(self, scope: Scope, name: str) -> bytes | None:
        """Return cached rows as safetensors from the process that has them, or None. Blocks."""
        # Those of the body that names the rows are not of this request.
        own = (b"range", b"content-")
        headers = [header for header in _headers(scope) if not header[0].startswith(own)]
        for number in self._started(self._others):
            transport = httpx.HTTPTransport(verify=False, uds=str(self._path(number)))
            http = httpx.Client(transport=transport, timeout=_SECONDS)
            with peer_errors(_SECONDS), http:
                answer = http.get(_url(scope, f"{_ROWS}{name}"), headers=headers)
            if answer.status_code == 200:
                return answer.content
            if answer.status_code != 404:
                raise rejection(answer)
        return None

    async def _find(self, answer: Answer, scope: Scope, body: bytes, send: Send) -> None:
        """Answer, or where this process has nothing of the id, have the one answer that has."""
        held: list[Message] = []

        async def unless_missing(message: Message) -> None:
            if held or message.get("status") == 404:
                held.append(message)
            else:
                await send(message)

        await answer(unless_missing)
        if not held:
            return
        for number in self._started(self._others):
            if await self._pass_on(number, scope, body, send, but=404):
                return
        for message in held:
            await send(message)

    async def _leave_to_first(self, answer: Answer, scope: Scope, body: bytes, send: Send) -> None:
        self._check_all()
        await self._pass_on(0, scope, body, send)

    async def _change_all(self, answer: Answer, scope: Scope, body: bytes, send: Send) -> None:
        """Change this process, and if that succeeds all others, and answer then."""
        held: list[Message] = []

        async def hold(message: Message) -> None:
            held.append(message)

        try:
            async with locked(self._changing, _SECONDS * len(self._others)):
                self._check_all()
                await answer(hold)
                if held[0]["status"] < 300:
                    for number in self._others:
                        other = await self._ask(number, scope, scope["method"], "", body)
                        if other is not None and other.status_code >= 300:
                            raise rejection(other, "; other processes have the change: repeat it")
        except asyncio.TimeoutError:
            why = "changes of other clients have not ended in time; try again later"
            raise HttpError(503, why, retry_after=_RETRY_SECONDS) from None
        for message in held:
            await send(message)

    async def _pass_on(
        self, number: int, scope: Scope, body: bytes, send: Send, but: int | None = None
    ) -> bool:
        """Send another process's answer; return False, and send nothing, for the status `but`."""
        has_begun = False
        try:
            url = _url(scope)
            async with (
                self._client(number) as http,
                http.stream(scope["method"], url, headers=_headers(scope), content=body) as answer,
            ):
                if answer.status_code == but:
                    return False
                headers = [
                    (name.lower(), value)
                    for name, value in answer.headers.raw
                    if name.lower() not in (b"connection", b"transfer-encoding", b"date", b"server")
                ]
                start = {"type": "http.response.start", "status": answer.status_code}
                has_begun = True
                await send({**start, "headers": headers})
                async for part in answer.aiter_raw():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            if has_begun:
                raise  # uvicorn closes the connection
            raise failure_of(error, _SECONDS) from error
        return True

    async def _ask(
        self, number: int, scope: Scope, method: str, path: str, body: bytes = b""
    ) -> httpx.Response | None:
        """Return the answer of another process; None: it has not started yet."""
        if not self._started([number]):
            return None
        with peer_errors(_SECONDS):
            async with self._client(number) as http:
                url = _url(scope, path)
                return await http.request(method, url, headers=_headers(scope), content=body)

    def _client(self, number: int) -> httpx.AsyncClient:
        # A socket of this machine has no certificate; to read those of the authorities takes 20 ms.
        transport = httpx.AsyncHTTPTransport(verify=False, uds=str(self._path(number)))
        return httpx.AsyncClient(transport=transport, timeout=_SECONDS)

    def _check_all(self) -> None:
        if len(self._started(self._others)) < len(self._others):
            raise HttpError(
                503,
                "not all API server processes of this server are ready; try again later",
                retry_after=_RETRY_SECONDS,
            )

    def _started(self, numbers: Iterable[int]) -> list[int]:
        return [number for number in numbers if self._path(number).exists()]

    def _path(self, number: int) -> Path:
        return self._folder / f"api-{number}"


def add_kept(own: Iterable[dict[str, Any]], other: Iterable[dict[str, Any]]) -> None:
    """Add what another process keeps of server-wide captures to what this one does, by name."""
    by_name = {description["name"]: description for description in other}
    for capture in own:
        kept = by_name.get(capture["name"], {}).get("kept")
        if kept is not None and "kept" in capture:
            capture["kept"] = {name: count + kept[name] for name, count in capture["kept"].items()}


class _Listener(uvicorn.Server):
    """A server beside vLLM's, which handles the signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextmanager
def peer_errors(seconds: float) -> Iterator[None]:
    """Convert what httpx raises while a process is asked, of which a part may take `seconds`."""
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise failure_of(error, seconds) from error


def failure_of(error: Exception, seconds: float) -> HttpError:
    """Return the answer to a client in place of another process's, which had `seconds` for it."""
    number, text = _os_error(error)
    if number in _NO_MEMORY:
        return HttpError(507, f"this process cannot ask {_OTHER}: {text}")
    if isinstance(error, (httpx.LocalProtocolError, httpx.UnsupportedProtocol, httpx.InvalidURL)):
        return HttpError(400, f"the request cannot be sent on to {_OTHER}: {str(error)[:_SHOWN]}")
    if isinstance(error, httpx.TimeoutException):
        return HttpError(
            504,
            f"{_OTHER} runs, but did not answer within {seconds:g} s; it may carry the request out "
            "nevertheless",
        )
    if number in _NO_QUEUE:
        return _later(503, "accepts no connection now")
    if isinstance(error, httpx.ConnectError):
        if number in _NO_LISTENER:
            return _later(503, "does not answer: it has ended")
        return HttpError(500, f"{_OTHER} cannot be reached: {text or str(error)[:_SHOWN]}")
    return _later(502, "ended the connection in the middle of its answer")


def rejection(answer: httpx.Response, what: str = "") -> HttpError:
    """Return the answer to a client whose request another process rejected."""
    try:
        error = ServerError.of(answer.status_code, answer.json())
    except ValueError:
        error = ServerError.of(answer.status_code, answer.text)
    problem = str(error).partition(": ")[2]
    retry = answer.headers.get("retry-after", "")
    return HttpError(
        answer.status_code,
        f"{_OTHER} answered: {problem}{what}",
        error.param,
        int(retry) if retry.isdecimal() else None,
    )


def _later(status: int, problem: str) -> HttpError:
    return HttpError(status, f"{_OTHER} {problem}; try again later", retry_after=_RETRY_SECONDS)


def _os_error(error: BaseException | None) -> tuple[int | None, str]:
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno, error.strerror or str(error)
        error = error.__cause__ or error.__context__
    return None, ""


def _headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Return the headers of a client's request, and its address."""
    client = scope.get("client")
    own = [(name, value) for name, value in scope["headers"] if name not in _DROPPED]
    return [*own, (_CLIENT, client[0].encode("latin-1"))] if client else own


def _url(scope: Scope, path: str = "") -> httpx.URL:
    if path:
        root: str = scope.get("root_path", "")
        return httpx.URL(f"http://peer{root}{path}")
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope.get("query_string", b"")
    return httpx.URL("http://peer", raw_path=raw + (b"?" + query if query else b""))
