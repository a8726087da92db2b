"""The fixtures of the clients' tests."""

from unit.client.conftest import anyio_backend, both, site

__all__ = ["anyio_backend", "both", "site"]
