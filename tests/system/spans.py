"""Receiver of the spans of a server under test."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@contextmanager
def collecting() -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """Where spans are sent to, and the attributes of those that came, by vLLM's id of a request."""
    found: dict[str, dict[str, Any]] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for span in (one for scope in resource.scope_spans for one in scope.spans):
                    attributes = {
                        one.key: getattr(one.value, one.value.WhichOneof("value"))
                        for one in span.attributes
                    }
                    found[attributes.get("gen_ai.request.id", "")] = attributes
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", found
        server.shutdown()


def wait_for(found: dict[str, dict[str, Any]], request_id: str) -> dict[str, Any]:
    """The attributes of the span of a request, by the id of its answer."""
    end = time.monotonic() + 30
    while not (came := [name for name in list(found) if name.startswith(request_id)]):
        assert time.monotonic() < end, sorted(found)
        time.sleep(0.1)
    return found[came[0]]
