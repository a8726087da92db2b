"""The fixtures of the clients' tests."""

from unit.client.conftest import both, site

__all__ = ["both", "site"]
