"""Readers of the sink `tcp`, in the process of a trainer: torch is needed, vLLM is not."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import socket
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from torch.utils.data import IterableDataset, get_worker_info

from midstream.errors import BusyError, ServerError, SpecError
from midstream.plan.control.controller import read_seconds
from midstream.results.activations import Activations
from midstream.results.serialization import unpack
from midstream.sinks.daemon_threads import begin
from midstream.sinks.tcp.nixl import Agent
from midstream.sinks.tcp.sink import MOST_HELLO, NUMBER, PLACE, VERSION, keep_alive, shut
from midstream.sinks.tcp.spool import CRC, LENGTHS, MOST_HEADER, MOST_ROWS
from midstream.validation import at, kind, read_count, show

WINDOW_BYTES = 256 << 20
REMEMBERED = 1_000_000
MOST_PLACE = 16 << 20
_PART_BYTES = 64 << 20
_PAUSE_SECONDS = 0.2
_CONNECT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Received:
    """The rows of one completion.

    Attributes:
        id: tag, name and completion; a request that is sent again under one `request_id` of its
            capture has the same.
        activations: the rows.
        positions: ranges [first, stop) of the positions with rows, by tap, `resid_post.12`.
        header: what the sender says besides: `request_id`, `name`, `tag`, `metadata`, `completion`,
            `prompt_tokens`, `generated_token_ids`, `finish_reason`, `status` and `problems` of the
            receipt, `model`.
    """

    id: str
    activations: Activations = field(repr=False)
    positions: Mapping[str, list[list[int]]]
    header: Mapping[str, Any] = field(repr=False)


class TcpRows(IterableDataset[Received]):
    """The completions that sinks `tcp` send, each once.

    Connects again when the sender is away or was restarted. Several readers share what is sent.
    With `DataLoader`, use `batch_size=None` and no workers.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str = "",
        manual: bool = False,
        window_bytes: int = WINDOW_BYTES,
        remember: int = REMEMBERED,
        wait_seconds: float | None = None,
    ) -> None:
        """Args:
        host, port: of the sink.
        token: its secret.
        manual: False: a completion is acknowledged when the next one is asked for. True: by
            `acknowledge`, as after a checkpoint that has `state_dict()`; what came since the last
            one comes again if this process is killed.
        window_bytes: most bytes that are sent ahead of their acknowledgement, or one completion.
        remember: number of ids that are known, the last ones; doubles of others come twice.
        wait_seconds: the iteration ends when nothing came for so long; None: it does not.

        Raises:
            SpecError: an argument is malformed.
        """
        self._address, self._token, self._manual = (host, port), token, manual
        with at("window_bytes"):
            self._window = read_count(window_bytes)
        with at("remember"):
            self._most = read_count(remember)
        with at("wait_seconds"):
            self._wait = None if wait_seconds is None else read_seconds(wait_seconds)
        self._known: dict[str, None] = {}  # digests of ids, oldest first
        self._since: set[str] = set()  # of these, yielded and not acknowledged
        self._open: dict[int, int] = {}  # bytes of records without acknowledgement, by number
        self._socket: socket.socket | None = None
        self._agent: Agent | None = None  # where the sink's transport is NIXL
        self.doubles = 0

    def state_dict(self) -> dict[str, Any]:
        """Return what a later reader needs to drop what this one has yielded; JSON values."""
        return {"known": list(self._known)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Drop what the reader of a state has yielded.

        Raises:
            SpecError: it is no such state.
        """
        known = state.get("known")
        if not isinstance(known, list) or not all(isinstance(one, str) for one in known):
            raise SpecError("state", f"expected a state of state_dict, got {kind(state)}")
        self._known = dict.fromkeys(known[-self._most :])

    def know(self, ids: Iterable[str]) -> None:
        """Drop completions with these ids, as of rows that a trainer has stored."""
        for name in ids:
            self._remember(self._digest(name))

    def acknowledge(self) -> None:
        """Let the sender delete all completions that were yielded."""
        self._since.clear()
        self._send([*self._open])

    def _send(self, numbers: list[int]) -> None:
        """Acknowledge records; if the sender is away, they come again and are dropped."""
        for number in numbers:
            del self._open[number]
        if self._socket is not None:
            try:
                self._socket.sendall(b"".join(map(NUMBER.pack, numbers)))
            except OSError:
                self._disconnect()

    def __iter__(self) -> Iterator[Received]:
        if get_worker_info() is not None:
            raise SpecError("num_workers", "expected 0: a reader takes rows in one process")
        self._disconnect()
        return self._received()

    def _received(self) -> Iterator[Received]:
        last = time.monotonic()
        try:
            while True:
                try:
                    for number, header, data in self._records(self._connected()):
                        self._open[number] = len(data)
                        if self._is_new(number, header):
                            yield Received(header["id"], unpack(data), header["positions"], header)
                            self._after()
                        last = time.monotonic()
                except (OSError, EOFError, futures.TimeoutError):
                    self._disconnect()
                if self._wait is not None and time.monotonic() - last >= self._wait:
                    return
                time.sleep(_PAUSE_SECONDS)
        finally:
            self._disconnect()

    def _records(self, file: BinaryIO) -> Iterator[tuple[int, dict[str, Any], bytes]]:
        """Yield the records of a connection; a thread receives the next one meanwhile, and ends
        with the connection.
        """
        receive = functools.partial(self._record, file)
        coming = begin(receive)
        while self._socket is not None:
            record = coming.result(self._wait)
            coming = begin(receive)
            yield record

    def _record(self, file: BinaryIO) -> tuple[int, dict[str, Any], bytes]:
        """Return number, header and rows of the next record; see `_parsed`."""
        (number,) = NUMBER.unpack(_exactly(file, NUMBER.size))
        if self._agent is None:
            return number, *_parsed(number, file)
        (length,) = PLACE.unpack(_exactly(file, PLACE.size))
        if length > MOST_PLACE:
            raise ServerError(500, f"record {number}: {length} bytes say where it is")
        record = self._agent.read(json.loads(_exactly(file, length)))
        return number, *_parsed(number, io.BytesIO(record))

    def _is_new(self, number: int, header: Mapping[str, Any]) -> bool:
        """Return whether a record's id is unknown, and know it. A double is acknowledged, unless
        its first waits for that. One that lacks rows is no double of a later one that has them.
        """
        name, status = header["id"], header.get("status", "ok")
        whole = self._digest(name)
        digest = whole if status == "ok" else self._digest(f"{name} {status}")
        if digest not in self._known and whole not in self._known:
            self._remember(digest)
            self._since.add(digest)
            return True
        self.doubles += 1
        if digest not in self._since and whole not in self._since:
            self._send([number])
        return False

    def _after(self) -> None:
        """Acknowledge what was yielded, or see that the sender can go on without."""
        if not self._manual:
            self.acknowledge()
        elif sum(self._open.values()) >= self._window:
            raise BusyError("acknowledge what was yielded: it fills `window_bytes`", 1)

    def _connected(self) -> BinaryIO:
        """Return the stream of a new connection after the greetings."""
        end = socket.create_connection(self._address, _CONNECT_SECONDS)
        self._socket = end
        keep_alive(end)
        hello = {"midstream": VERSION, "token": self._token, "window": self._window}
        end.sendall(json.dumps(hello).encode() + b"\n")
        file: BinaryIO = end.makefile("rb")
        line = file.readline(MOST_HELLO)
        if not line.endswith(b"\n"):
            raise EOFError
        transport = ""
        try:
            greeting = json.loads(line)
            problem, transport = greeting["error"], greeting["transport"]
        except (ValueError, TypeError, KeyError):
            problem = f"expected a sink tcp, got {show(line[:100].decode(errors='replace'))}"
        if problem:
            raise ServerError(403, f"{self._address[0]}:{self._address[1]}: {problem}")
        if transport == "nixl" and self._agent is None:
            self._agent = Agent()
        end.settimeout(None)
        return file

    def _disconnect(self) -> None:
        if self._socket is not None:
            shut(self._socket)
            self._socket.close()
        self._socket = None
        self._open.clear()

    @staticmethod
    def _digest(name: str) -> str:
        return hashlib.blake2b(name.encode(), digest_size=12).hexdigest()

    def _remember(self, digest: str) -> None:
        self._known[digest] = None
        while len(self._known) > self._most:
            del self._known[next(iter(self._known))]


def _parsed(number: int, file: BinaryIO) -> tuple[dict[str, Any], bytes]:
    """Return header and rows of a record.

    Raises:
        EOFError: the connection ended.
        ServerError: the record is damaged.
    """
    header_bytes, row_bytes = LENGTHS.unpack(_exactly(file, LENGTHS.size))
    if header_bytes > MOST_HEADER or row_bytes > MOST_ROWS:
        raise ServerError(500, f"record {number} has {header_bytes} and {row_bytes} bytes")
    text = _exactly(file, header_bytes)
    data = _exactly(file, row_bytes)
    (crc,) = CRC.unpack(_exactly(file, CRC.size))
    if zlib.crc32(data, zlib.crc32(text)) != crc:
        raise ServerError(500, f"record {number} is damaged: its checksum differs")
    header: dict[str, Any] = json.loads(text)
    if not isinstance(header.get("id"), str) or not isinstance(header.get("positions"), dict):
        raise ServerError(500, f"record {number} has no id or positions")
    return header, data


def _exactly(file: BinaryIO, count: int) -> bytes:
    """Return so many bytes; memory is taken for those that came, whatever a length says."""
    parts = []
    while count:
        part = file.read(min(count, _PART_BYTES))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
