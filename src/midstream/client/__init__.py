"""Clients of a midstream server: `Client`, `AsyncClient`, and `extra_body` for OpenAI clients.

Needs neither vLLM nor torch: without torch, rows are NumPy arrays.
"""

from midstream.client.async_client import AsyncClient
from midstream.client.client import Client
from midstream.client.outputs import ServedCompletion, ServedOutput
from midstream.client.request_body import extra_body
from midstream.errors import ServerError

__all__ = [
    "AsyncClient",
    "Client",
    "ServedCompletion",
    "ServedOutput",
    "ServerError",
    "extra_body",
]
