"""Whether a store is what was written: every byte of every shard is looked at."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import torch

from midstream.codecs import Raw
from midstream.errors import CodecError, StoreError
from midstream.sites import Tap
from midstream.store.backends.local import Folder, folder_of
from midstream.store.format.entry_rows import check_positions
from midstream.store.format.shard import Shard

_AT_ONCE = 8 << 20  # bytes of rows that are looked at together


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with a shard.

    Attributes:
        shard: its name.
        problem: what is wrong, and where.
    """

    shard: str
    problem: str


@dataclass(frozen=True, slots=True)
class Verification:
    """What was looked at, and what is wrong with it.

    Attributes:
        root: where the store is.
        shards: how many there are.
        requests: how many completions the shards list that are right.
        nbytes: how long these shards are together.
        findings: one for each shard that is not right.
    """

    root: str
    shards: int
    requests: int
    nbytes: int
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    def __str__(self) -> str:
        wrong = "".join(f"\n{each.shard}: {each.problem}" for each in self.findings)
        right = self.shards - len(self.findings)
        return (
            f"{self.root}: {right} of {self.shards} shards are right, {self.requests} requests, "
            f"{self.nbytes / 1e6:.1f} MB{wrong}"
        )


def verify(root: str | os.PathLike[str]) -> Verification:
    """Looks at every byte of a store.

    Of each shard: its header, version and lengths, that its tensors follow each other, every
    checksum, its list of requests, that each row is of the request that it is said to be of, that
    positions ascend, that metadata is JSON, and that the rows are some that their codec writes.

    Args:
        root: the store's directory, or `s3://bucket/prefix`.

    Raises:
        StoreError: there is no store.
    """
    return look_at(folder_of(root))


def look_at(folder: Folder) -> Verification:
    """`verify`, of a folder."""
    names = folder.names()
    findings = []
    requests = nbytes = shards = 0
    replaced: dict[str, str] = {}
    for name in names:
        try:
            shard = Shard(folder, name)
            check_shard(shard)
            for source in shard.layout.replaces:
                if source in replaced and source in names:
                    raise StoreError(f"it stands for {source}, and so does {replaced[source]}")
                replaced[source] = name
        except StoreError as error:
            # It may have been merged into another since the names were read.
            if name not in folder.names():
                continue
            problem = str(error).removeprefix(f"{folder}/{name}: ")
            findings.append(Finding(name, problem))
        else:
            requests += len(shard.lines)
            nbytes += shard.size
        shards += 1
    return Verification(str(folder), shards, requests, nbytes, tuple(findings))


def check_shard(shard: Shard) -> None:
    """Looks at every byte of a shard.

    Raises:
        StoreError: something is wrong with it.
    """
    shard.check()
    for request in range(len(shard.lines)):
        shard.metadata(request)
    for number, group in enumerate(shard.groups):
        owners, bounds = shard.owners(number)
        wanted = np.repeat(owners, np.diff(bounds))
        if not np.array_equal(shard.column(number, "request"), wanted):
            raise StoreError(f"group {number}: its rows are not those that the requests have")
        positions = shard.column(number, "position")
        for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            check_positions(positions[start:stop], f"group {number}, rows {start} to {stop}")
        for tap in group.taps:
            _check_rows(shard, number, tap)


def _check_rows(shard: Shard, group: int, tap: Tap) -> None:
    """Whether the codec can have written a tap's rows."""
    header = shard.header
    codec = header.open_codec()
    if isinstance(codec, Raw):
        return
    rows = shard.groups[group].rows
    step = max(1, _AT_ONCE // header.row_bytes)
    for start in range(0, rows, step):
        # A copy: torch takes no memory that cannot be written to.
        data = shard.rows(group, tap, start, min(start + step, rows)).copy()
        try:
            codec.check(torch.from_numpy(data), header.hidden_size, header.torch_dtype)
        except CodecError as error:
            raise StoreError(f"{tap[0]} of layer {tap[1]}, rows from {start}: {error}") from None
