"""What a worker reports about itself when the front end starts."""

from __future__ import annotations

import os
import socket
import uuid
from typing import Any

import msgspec

from midstream.runtime.protocol.codec import ProtocolMessage
from midstream.runtime.protocol.segments import Room
from midstream.sites import Tap
from midstream.transport.leases import Address


def place_of(replica: int, stage: int, tensor_rank: int) -> str:
    return f"{replica}.{stage}.{tensor_rank}"


def this_process() -> str:
    return f"{socket.gethostname()} {uuid.getnode()} {os.getpid()}"


class WorkerRank(ProtocolMessage, frozen=True, array_like=True):
    """A worker's position within its replica."""

    stage: int
    tensor_rank: int


class MissingTap(ProtocolMessage, frozen=True, array_like=True):
    """A tap that the model does not have."""

    site: str
    layer: int
    reason: str


class WorkerInfo(ProtocolMessage, frozen=True, kw_only=True, cache_hash=True):
    """A worker's part of the model, its limits and its settings."""

    stage: int
    tensor_rank: int
    tensor_ranks: int
    num_layers: int
    hidden_size: int
    taps: tuple[Tap, ...]  # in the order in which a forward pass reaches them
    widths: tuple[int, ...]  # of the vectors of each tap on this rank
    parts: tuple[int, ...]  # of each tap's vectors over the ranks, in order; 1: whole
    heads: tuple[int, ...]  # of each tap on this rank; 0: it is not of heads
    # Of a router's tap, how many of the largest logits are chosen, or why others may be; 0: the tap
    # is of no router.
    routing: tuple[int | str, ...]
    lacking: tuple[MissingTap, ...]  # taps that the settings select and the model does not have
    dtype: str  # of the model, for example `bfloat16`
    capture_limit: int  # most vectors of the stream's width that one token may have captured
    step_tokens: int  # most tokens of one step, padding included
    buffer_bytes: int
    room: Room
    edits_per_site: int  # most instructions for one token at one site
    runner: str  # vLLM's model runner, `v1` or `v2`
    codec: str
    return_: str  # ranks that transfer the rows of captures that do not say so
    arena: Address
    arena_bytes: int
    device: str  # type, for example `cuda`
    replica: int = 0  # number of its engine among those of the front end, which sets it
    functions: str = ""  # identity of its process, if it calls functions of `Local`; else empty

    @property
    def rank(self) -> WorkerRank:
        return WorkerRank(self.stage, self.tensor_rank)

    @property
    def place(self) -> str:
        return place_of(self.replica, self.stage, self.tensor_rank)

    def __getitem__(self, name: str) -> Any:
        """Return a field as plain JSON values, by its name without a final underscore.

        Descriptions of workers were dicts once, and documents showed `workers[0]["codec"]`.
        """
        names = self.__struct_fields__
        if name not in names and f"{name}_" not in names:
            raise KeyError(name)
        return msgspec.to_builtins(getattr(self, name if name in names else f"{name}_"))
