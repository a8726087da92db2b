"""vLLM endpoint plugin that adds midstream's routes and middleware to vLLM's server."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from fastapi import FastAPI

from midstream import entries
from midstream.config.event_sinks import read_events
from midstream.config.http import admin_key, divided, read_http
from midstream.runtime.vllm.additional_config import key_of_environment, settings_of
from midstream.server.app import fingerprint
from midstream.server.app.admin_auth import Guard
from midstream.server.app.openapi import add_fields
from midstream.server.middleware import Middleware
from midstream.server.routes import (
    activations,
    captures,
    compat_steering,
    guards,
    parameters,
    requests,
    status,
    steering,
    studio,
    tokens,
    vectors,
)
from midstream.server.server import Server
from midstream.sinks.events import EventLog

_ROUTES = (
    activations, captures, vectors, steering, guards, parameters, status, compat_steering, tokens,
    requests,
)  # fmt: skip


class Endpoints:
    """Endpoint plugin, which vLLM calls when it builds its app and when its engine is ready."""

    name = "midstream"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._server: Server | None = None
        self._app: FastAPI | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Add routes and middleware, which vLLM's check of keys surrounds, if they are enabled."""
        args = app.state.args
        own = settings_of(args)
        settings = None if own is None else read_http(own.http)
        if own is None or settings is None:
            return
        fingerprint.install()
        has_key = _has_key(args)
        guard = app.state.midstream_guard = Guard(
            allowed=settings.admin,
            admin_key=admin_key(),
            has_key=has_key,
            # A Unix domain socket is as local as loopback.
            host="localhost" if getattr(args, "uds", None) else args.host,
            origins=args.allowed_origins,
        )
        self._app = app
        # Each API server process has its part of the limits.
        processes = getattr(args, "api_server_count", None) or 1
        self._server = app.state.midstream = Server(
            divided(settings, processes),
            admin=guard.is_open,
            has_key=has_key,
            check_host=guard.check_host,
            events=EventLog(read_events(own.events)),
        )
        for router in (*(module.router for module in _ROUTES), *entries.routers()):
            app.include_router(router)
        if settings.studio:
            app.include_router(studio.router)
        app.add_middleware(Middleware, server=self._server)
        add_fields(app)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Connect the server to the engine, which is ready."""
        if self._server is None:
            return
        names = ("chat_template", "chat_template_content_format")
        template = {name: getattr(args, name, None) for name in names}
        await self._server.start(engine_client, template)
        if self._server.peers is not None and self._app is not None:
            self._server.peers.listen(self._app)


def _has_key(args: Namespace) -> bool:
    return any(args.api_key or [key_of_environment()])
