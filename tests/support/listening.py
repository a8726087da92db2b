"""A server of this process, in a thread: real connections to an app with a fake engine."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import uvicorn

from support.serving_fake import Site, make


class Listening:
    """A server in a thread.

    Attributes:
        site: its app and its engine.
    """

    def __init__(self, *, loop: str = "auto", http: str = "auto", **settings: Any) -> None:
        """Args:
        loop: uvicorn's event loop: asyncio, uvloop or auto.
        http: uvicorn's parser of HTTP: h11, httptools or auto.
        **settings: as for `make`.
        """
        self.site: Site = asyncio.run(make(**settings))
        config = uvicorn.Config(
            self.site.app, port=0, log_level="critical", lifespan="off", loop=loop, http=http
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        (server,) = self._server.servers
        found: tuple[str, int] = server.sockets[0].getsockname()
        return found

    @property
    def url(self) -> str:
        """Where it answers."""
        return "http://{}:{}".format(*self.address)

    def __enter__(self) -> Listening:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self.site.server.close()
