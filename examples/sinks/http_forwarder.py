"""A sink that posts rows to a service on this machine, such as a dashboard, as npz bodies.

midstream serve MODEL --sinks 'forward:class=http_forwarder:HttpForwarder,port=9000'
"""

from __future__ import annotations

import http.client
import io

import numpy as np

from midstream.results.receipt import CaptureResult
from midstream.sinks import Delivery, Sink


class HttpForwarder(Sink):
    """Posts one npz per completion to 127.0.0.1; arrays are `{site}.{layer}` as float32."""

    def __init__(self, port: int, path: str = "/rows", timeout: float = 10.0) -> None:
        """Args:
        port: port of the service.
        path: path of its endpoint.
        timeout: seconds after which a request fails.
        """
        if not 0 < port < 65536:
            raise ValueError(f"port: expected 1 to 65535, got {port}")
        self._port = port
        self._path = path
        self._timeout = timeout

    def write(self, delivery: Delivery) -> CaptureResult:
        body = io.BytesIO()
        rows = delivery.activations.items()
        np.savez(body, **{f"{site}.{layer}": one.float().numpy() for (site, layer), one in rows})
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=self._timeout)
        headers = {"content-type": "application/octet-stream", "x-request-id": delivery.name}
        try:
            connection.request("POST", self._path, body.getvalue(), headers)
            status = connection.getresponse().status
        finally:
            connection.close()
        if status >= 300:
            return CaptureResult("error", f"the service answered {status}")
        return CaptureResult()
