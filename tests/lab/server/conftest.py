"""The fixtures of the server's tests."""

from unit.server.conftest import anyio_backend

__all__ = ["anyio_backend"]
