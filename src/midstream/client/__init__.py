"""For programs that ask a server: `Client`, `AsyncClient`, and what goes beside other clients.

Needs httpx, and no vLLM.
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
