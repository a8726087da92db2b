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
    """Return a worker's place, for messages and metrics."""
    return f"{replica}.{stage}.{tensor_rank}"


def this_process() -> str:
    """Return an identity of this process."""
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
    """A worker's part of the model, its limits and its settings.

    Attributes:
        taps: the worker's taps, in the order in which a forward pass reaches them.
        widths: width of the vectors of each tap on this rank.
        parts: number of parts in which the ranks of the group have the vectors of each tap, in the
            order of the ranks; 1: each rank has whole vectors.
        heads: number of attention heads on this rank that they are of; 0: they are not of heads.
        routing: of a router's tap, how many of the largest logits are chosen, or why others may be;
            0: the tap is of no router.
        lacking: taps that the settings select and the model does not have.
        dtype: name of the model's dtype, for example `bfloat16`.
        capture_limit: most vectors of the stream's width that one token may have captured.
        step_tokens: most tokens of one step, padding included.
        edits_per_site: most instructions for one token at one site.
        runner: vLLM's model runner, `v1` or `v2`.
        return_: ranks that transfer the rows of captures that do not say so.
        device: device type, for example `cuda`.
        replica: number of the worker's engine among those of the front end, which sets it.
        functions: identity of its process, if it calls functions of `Local`; empty: it does not.
    """

    stage: int
    tensor_rank: int
    tensor_ranks: int
    num_layers: int
    hidden_size: int
    taps: tuple[Tap, ...]
    widths: tuple[int, ...]
    parts: tuple[int, ...]
    heads: tuple[int, ...]
    routing: tuple[int | str, ...]
    lacking: tuple[MissingTap, ...]
    dtype: str
    capture_limit: int
    step_tokens: int
    buffer_bytes: int
    room: Room
    edits_per_site: int
    runner: str
    codec: str
    return_: str
    arena: Address
    arena_bytes: int
    device: str
    replica: int = 0
    functions: str = ""

    @property
    def rank(self) -> WorkerRank:
        """The worker's position within its replica."""
        return WorkerRank(self.stage, self.tensor_rank)

    @property
    def place(self) -> str:
        """The worker's place, for messages and metrics."""
        return place_of(self.replica, self.stage, self.tensor_rank)

    def __getitem__(self, name: str) -> Any:
        """Return a field as plain JSON values, by its name without a final underscore.

        Descriptions of workers were dicts once, and documents showed `workers[0]["codec"]`.
        """
        names = self.__struct_fields__
        if name not in names and f"{name}_" not in names:
            raise KeyError(name)
        return msgspec.to_builtins(getattr(self, name if name in names else f"{name}_"))
