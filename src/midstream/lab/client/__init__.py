"""Clients of a midstream server, with sweeps and fits: `Client`, `AsyncClient`."""

from midstream.lab.client.async_client import AsyncClient
from midstream.lab.client.client import Client

__all__ = ["AsyncClient", "Client"]
