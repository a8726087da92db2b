"""Receiver of the spans of a server under test."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Spans:
    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/v1/traces"
        self._found: dict[str, dict[str, Any]] = {}

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for span in (one for scope in resource.scope_spans for one in scope.spans):
                attributes = {
                    one.key: getattr(one.value, one.value.WhichOneof("value"))
                    for one in span.attributes
                }
                if "gen_ai.request.id" in attributes:
                    self._found[attributes["gen_ai.request.id"]] = attributes

    def wait_for(self, request_id: str, seconds: float = 30) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for name, attributes in list(self._found.items()):
                if name.startswith(request_id):
                    return attributes
            time.sleep(0.1)
        raise AssertionError(f"no span of {request_id}; there are {sorted(self._found)}")


@contextmanager
def collecting() -> Iterator[Spans]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            spans.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    spans = Spans(server.server_port)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield spans
    finally:
        server.shutdown()
        server.server_close()
