"""The RPC that the front end calls on workers, and its operations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from midstream.runtime.vllm.attributes import ENDPOINT

RPC = ENDPOINT.name


def place_of(worker: Mapping[str, Any]) -> str:
    """A worker's place, for people: its replica, its pipeline stage, its tensor-parallel rank.

    Args:
        worker: what it said of itself, or of its use.
    """
    return f"{worker['replica']}.{worker['stage']}.{worker['tensor_rank']}"
