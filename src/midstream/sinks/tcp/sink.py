"""The sink `tcp`: a spool, and a server from which readers take its records."""

from __future__ import annotations

import errno
import hmac
import ipaddress
import json
import logging
import os
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Any, BinaryIO

import numpy as np

from midstream.plan.control.controller import read_seconds
from midstream.results.receipt import CaptureResult
from midstream.results.serialization import PackedRows
from midstream.sinks.base import Delivery, Origin, Sink
from midstream.sinks.tcp.nixl import Agent
from midstream.sinks.tcp.spool import Spool, number_of
from midstream.validation import at, read_count

VERSION = 1
NUMBER = struct.Struct(">Q")  # of a record, before it and as its acknowledgement
PLACE = struct.Struct(">I")  # length of where NIXL reads a record
TRANSPORTS = ("tcp", "nixl")
MOST_HELLO = 4096
MOST_READERS = 64
SPOOL_BYTES = 8 << 30
WAIT_SECONDS = 3600.0
_HELLO_SECONDS = 10.0
_LOOK_SECONDS = 0.5
_LOGGER = logging.getLogger(__name__)


class TcpSink(Sink):
    """Sends the rows of each completion to readers, see `TcpRows`, at least once.

    A write ends when the record is on disk. While the spool is full, writes wait for readers, so
    that deliveries, then the engine's memory of rows, then new requests do.
    """

    group_seconds = 0.01

    def __init__(
        self,
        root: str,
        port: int,
        host: str = "127.0.0.1",
        token_file: str = "",
        spool_bytes: int = SPOOL_BYTES,
        wait_seconds: float = WAIT_SECONDS,
        linger_seconds: float = 0.0,
        transport: str = "tcp",
    ) -> None:
        """Args:
        root: folder of the spool, of this sink alone.
        port: where readers connect; 0: any, see `address`.
        host: address to listen at.
        token_file: file with the secret that readers send; needed if others than this host reach
            `host`.
        spool_bytes: most bytes that wait for readers on disk, or one record.
        wait_seconds: how long a write waits for room; then its request fails.
        linger_seconds: how long closing waits for readers to take what is left.
        transport: how rows travel: "tcp", or "nixl", which readers have too.
        """
        if not isinstance(root, str) or not root:
            raise ValueError(f"root: expected the path of a folder, got {root!r}")
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 65536:
            raise ValueError(f"port: expected 0 to 65535, got {port!r}")
        if not token_file and not _is_of_this_host(host):
            raise ValueError(
                f"token_file: missing; other hosts reach {host!r}: name a file with a secret that "
                "readers send, or listen at 127.0.0.1"
            )
        if transport not in TRANSPORTS:
            raise ValueError(f"transport: expected {' or '.join(TRANSPORTS)}, got {transport!r}")
        self._transport = transport
        self._agent: Agent | None = None
        self._agent_lock = threading.Lock()
        self._root = os.path.abspath(os.path.expanduser(root))
        self._host, self._port, self._token_file = host, port, token_file
        with at("spool_bytes"):
            self._most = read_count(spool_bytes)
        with at("wait_seconds"):
            self.wait_seconds = read_seconds(wait_seconds)
        with at("linger_seconds"):
            self._linger = read_seconds(linger_seconds) if linger_seconds else 0.0
        self._readers: set[socket.socket] = set()
        self._strangers: dict[socket.socket, None] = {}  # connections before their greeting
        self._token = ""

    @property
    def address(self) -> tuple[str, int]:
        """Where readers connect."""
        host, port = self._server.getsockname()[:2]
        return host, port

    def open(self, origin: Origin) -> None:
        if self._token_file:
            with open(os.path.expanduser(self._token_file), encoding="utf-8") as file:
                self._token = file.read().strip()
            if not self._token:
                raise ValueError(f"token_file: {self._token_file} is empty")
        import torch

        self._agent = Agent() if self._transport == "nixl" else None
        self._origin = origin
        self._dtype = getattr(torch, origin.dtype)
        self._spool = Spool(self._root, self._most)
        try:
            self._server = socket.create_server((self._host, self._port))
        except OSError:
            self._spool.close()
            raise
        self._start(self._accept)

    def write(self, delivery: Delivery) -> CaptureResult | None:
        packed = PackedRows(delivery.activations, self._origin.hidden_size, self._dtype)
        header = header_of(delivery, self._origin)
        self._spool.write(header, packed.parts(), self.wait_seconds)
        return CaptureResult(manifest={"id": header["id"]})

    def flush(self) -> None:
        self._spool.publish()

    def close(self) -> None:
        super().close()
        if self._linger:
            self._spool.wait_empty(self._linger)
        self._spool.close()
        shut(self._server)
        self._server.close()
        for reader in (*self._readers, *self._strangers):
            shut(reader)

    def _start(self, work: Any, *arguments: Any) -> None:
        threading.Thread(target=work, args=arguments, name="midstream tcp", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                reader, _ = self._server.accept()
            except OSError as error:
                if self._server.fileno() < 0 or error.errno == errno.EINVAL:
                    return  # it is closed
                _LOGGER.warning("the sink tcp accepts no reader now: %s", error)
                time.sleep(_LOOK_SECONDS)
                continue
            # Who has no token takes no place of those who have it.
            for oldest in [*self._strangers][: len(self._strangers) - MOST_READERS + 1]:
                shut(oldest)
                self._strangers.pop(oldest, None)
            self._strangers[reader] = None
            self._start(self._serve, reader)

    def _serve(self, reader: socket.socket) -> None:
        """Send records to a reader until it goes; then others get those without acknowledgement."""
        try:
            keep_alive(reader)
            window = self._greeted(reader)
            if not window:
                return
            if len(self._readers) >= MOST_READERS:
                _LOGGER.warning("the sink tcp has %d readers; one more is refused", MOST_READERS)
                return
            self._readers.add(reader)
            self._spool.begin(reader)
            self._start(self._acknowledge, reader)
            while True:
                file = self._spool.take(reader, window, _LOOK_SECONDS)
                if file is not None:
                    with file:
                        self._send(reader, file)
        except (OSError, KeyError) as error:
            _LOGGER.info("a reader of the sink tcp is gone: %r", error)
        finally:
            self._readers.discard(reader)
            self._strangers.pop(reader, None)
            self._end(reader)
            if self._agent is not None:
                with self._agent_lock:
                    self._agent.release_all(reader)
            reader.close()

    def _send(self, reader: socket.socket, file: BinaryIO) -> None:
        number = number_of(file)
        if self._agent is None:
            reader.sendall(NUMBER.pack(number))
            reader.sendfile(file)
            return
        with self._agent_lock:
            place = self._agent.offer((reader, number), file)
        reader.sendall(NUMBER.pack(number) + PLACE.pack(len(place)) + place)

    def _end(self, reader: socket.socket) -> None:
        """Let other readers have what one has not acknowledged."""
        for number in self._spool.end(reader):
            self._release(reader, number)

    def _release(self, reader: socket.socket, number: int) -> None:
        if self._agent is not None:
            with self._agent_lock:
                self._agent.release((reader, number))

    def _greeted(self, reader: socket.socket) -> int:
        """Return a reader's window in bytes after its greeting; 0: it is refused."""
        line = _first_line(reader)
        self._strangers.pop(reader, None)
        problem, window = "", 0
        try:
            hello = json.loads(line)
            if hello["midstream"] != VERSION:
                problem = f"expected version {VERSION}"
            elif not hmac.compare_digest(str(hello["token"]).encode(), self._token.encode()):
                problem = "the token is wrong"
            window = read_count(hello["window"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            problem = f"expected a reader's greeting: {error}"
        about = {"midstream": VERSION, "error": problem, "transport": self._transport}
        if not problem:
            about["model"] = self._origin.model
        reader.sendall(json.dumps(about).encode() + b"\n")
        return 0 if problem else window

    def _acknowledge(self, reader: socket.socket) -> None:
        """Delete records that a reader acknowledges, until it goes."""
        try:
            with reader.makefile("rb") as file:
                while len(data := file.read(NUMBER.size)) == NUMBER.size:
                    number = NUMBER.unpack(data)[0]
                    self._spool.acknowledge(reader, number)
                    self._release(reader, number)
        except (OSError, KeyError) as error:
            _LOGGER.info("a reader of the sink tcp is gone: %r", error)
        finally:
            self._end(reader)
            shut(reader)


def _first_line(end: socket.socket) -> bytes:
    """Return what the other side sends first, up to the end of the line."""
    data, until = b"", time.monotonic() + _HELLO_SECONDS
    while not data.endswith(b"\n") and len(data) < MOST_HELLO:
        end.settimeout(max(until - time.monotonic(), 0.01))
        part = end.recv(MOST_HELLO)
        if not part:
            break
        data += part
    end.settimeout(None)
    return data


def header_of(delivery: Delivery, origin: Origin) -> dict[str, Any]:
    """Return the header of a delivery's record, JSON values; see `Received`."""
    ranges: dict[bytes, list[list[int]]] = {}  # most taps have rows at the same positions
    positions = {}
    for site, layer in delivery.activations:
        places = delivery.activations.positions_of(site, layer).numpy()
        key = places.tobytes()
        if key not in ranges:
            parts = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
            ranges[key] = [[int(part[0]), int(part[-1]) + 1] for part in parts if len(part)]
        positions[f"{site}.{layer}"] = ranges[key]
    return {
        "id": f"{delivery.tag}/{delivery.name}/{delivery.completion}",
        "request_id": delivery.request_id,
        "name": delivery.name,
        "tag": delivery.tag,
        "metadata": dict(delivery.metadata),
        "completion": delivery.completion,
        "prompt_tokens": delivery.prompt_tokens,
        "generated_token_ids": list(delivery.generated_token_ids),
        "finish_reason": delivery.finish_reason,
        "status": delivery.receipt.status,
        "problems": list(delivery.receipt.problems),
        "model": origin.model,
        "positions": positions,
    }


def keep_alive(end: socket.socket) -> None:
    """Let a connection end within two minutes of the other host's silence."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, option):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def shut(end: socket.socket) -> None:
    """End a connection, and calls of other threads that wait for it; its owner closes it."""
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


def _is_of_this_host(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
