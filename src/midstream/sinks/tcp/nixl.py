"""Records read from the sender's memory by NIXL: over RDMA where it is, else TCP.

Addresses are sent as numbers: NIXL's own form of them is pickled. What a receiver gets of an
agent is parsed by NIXL, and the memory that it may read is that of its records.
"""

from __future__ import annotations

import base64
import json
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

from midstream.errors import MissingExtraError, ServerError
from midstream.validation import read_count

_MEMORY = "DRAM"
_READ_SECONDS = 120.0
_PAUSE_SECONDS = 0.0002
_DEVICE = 0


class Agent:
    """One end's NIXL agent; its calls are made from one thread at a time."""

    def __init__(self) -> None:
        """Raise MissingExtraError: NIXL is not installed."""
        try:
            import nixl
            from nixl._api import nixl_agent, nixl_agent_config
        except ModuleNotFoundError as error:
            raise MissingExtraError.of(error, "the transport nixl") from None
        config = nixl_agent_config(enable_prog_thread=True, backends=["UCX"])
        self._agent = nixl_agent(f"midstream-{uuid.uuid4().hex}", config)
        self._errors = tuple(vars(nixl)[name] for name in vars(nixl) if name.endswith("Error"))
        # Memory by reader and number of a record, and its registration.
        self._offered: dict[tuple[object, int], tuple[Any, Any]] = {}

    def offer(self, key: tuple[object, int], file: BinaryIO) -> bytes:
        """Return where a reader finds a record, as JSON. Its memory, by reader and number, is kept
        until `release`.
        """
        import torch

        memory = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
        with self._as_connection():
            self._offered[key] = memory, self._agent.register_memory([memory])
            metadata = self._agent.get_agent_metadata()
        about = {
            "address": memory.data_ptr(),
            "nbytes": memory.numel(),
            "agent": base64.b64encode(metadata).decode(),
        }
        return json.dumps(about).encode()

    def release_all(self, reader: object) -> None:
        """Free the memory of all records of a reader."""
        for key in [key for key in self._offered if key[0] is reader]:
            self.release(key)

    def release(self, key: tuple[object, int]) -> None:
        """Free the memory of a record."""
        _, registered = self._offered.pop(key, (None, None))
        if registered is not None:
            with self._as_connection():
                self._agent.deregister_memory(registered)

    def read(self, about: Mapping[str, Any]) -> bytes:
        """Return a record from where `offer` says that it is.

        Raises:
            ServerError: it is malformed.
            OSError: it was not read in time.
        """
        import torch

        try:
            address, nbytes = read_count(about["address"]), read_count(about["nbytes"])
            metadata = base64.b64decode(about["agent"], validate=True)
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(500, f"expected where a record is: {error!r}") from None
        memory = torch.empty(nbytes, dtype=torch.uint8)
        with self._as_connection():
            registered = self._agent.register_memory([memory])
            try:
                sender = self._agent.add_remote_agent(metadata)
                places = self._agent.get_xfer_descs([(address, nbytes, _DEVICE)], _MEMORY)
                self._transfer(registered.trim(), places, sender)
                self._agent.remove_remote_agent(sender)
            finally:
                self._agent.deregister_memory(registered)
        return memory.numpy().tobytes()

    def _transfer(self, target: Any, places: Any, sender: str) -> None:
        transfer = self._agent.initialize_xfer("READ", target, places, sender)
        try:
            state, until = self._agent.transfer(transfer), time.monotonic() + _READ_SECONDS
            while state not in ("DONE", "ERR") and time.monotonic() < until:
                time.sleep(_PAUSE_SECONDS)
                state = self._agent.check_xfer_state(transfer)
            if state != "DONE":
                raise ConnectionError(f"NIXL did not read a record: {state}")
        finally:
            self._agent.release_xfer_handle(transfer)

    @contextmanager
    def _as_connection(self) -> Iterator[None]:
        """Let NIXL's errors be of the connection: the record is sent again."""
        try:
            yield
        except self._errors as error:
            raise ConnectionError(f"NIXL: {type(error).__name__}: {error}") from error
