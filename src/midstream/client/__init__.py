"""For programs that ask a server: `Client`, `AsyncClient`, and what goes beside other clients.

Needs httpx, and no vLLM.
"""

from midstream.client.asking import extra_body
from midstream.client.asynchronous import AsyncClient
from midstream.client.errors import ServerError
from midstream.client.outputs import ServedCompletion, ServedOutput
from midstream.client.synchronous import Client

__all__ = [
    "AsyncClient",
    "Client",
    "ServedCompletion",
    "ServedOutput",
    "ServerError",
    "extra_body",
]
