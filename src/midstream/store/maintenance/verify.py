"""Verification of a store: checks every byte of every shard."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import torch

from midstream.codecs import Raw
from midstream.errors import CodecError, StoreError
from midstream.sites import Tap
from midstream.store.backends.base import Folder, check_store
from midstream.store.backends.local import folder_of
from midstream.store.format.entry_rows import check_positions
from midstream.store.format.shard import Shard

_CHUNK_BYTES = 8 << 20  # bytes of rows per codec check


@dataclass(frozen=True, slots=True)
class Finding:
    """A damaged shard.

    Attributes:
        shard: its name.
        problem: the first error and its location.
    """

    shard: str
    problem: str


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of `verify`.

    Attributes:
        root: path or URL of the store.
        shards: number of shards.
        requests: number of completions in the intact shards.
        nbytes: total length of the intact shards in bytes.
        findings: one for each damaged shard.
    """

    root: str
    shards: int
    requests: int
    nbytes: int
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether all shards are intact."""
        return not self.findings

    def __str__(self) -> str:
        wrong = "".join(f"\n{finding.shard}: {finding.problem}" for finding in self.findings)
        intact = self.shards - len(self.findings)
        return (
            f"{self.root}: {intact} of {self.shards} shards are intact, {self.requests} requests, "
            f"{self.nbytes / 1e6:.1f} MB{wrong}"
        )


def verify(root: str | os.PathLike[str]) -> Verification:
    """Check every byte of a store.

    For each shard this checks the header, version and lengths, the order of tensors, every
    checksum, the list of requests, the request of each row, that positions ascend, that metadata
    is JSON, and that the rows are valid for their codec.

    Args:
        root: the store's directory, or `s3://bucket/prefix`.

    Raises:
        StoreError: the store does not exist.
    """
    return verify_folder(check_store(folder_of(root)))


def verify_folder(folder: Folder) -> Verification:
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
                    raise StoreError(f"it replaces {source}, and so does {replaced[source]}")
                replaced[source] = name
        except StoreError as error:
            # The shard may have been merged after the names were read.
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
    shard.check()
    for request in range(len(shard.lines)):
        shard.metadata(request)
    for number, group in enumerate(shard.groups):
        owners, bounds = shard.owners(number)
        wanted = np.repeat(owners, np.diff(bounds))
        if not np.array_equal(shard.column(number, "request"), wanted):
            raise StoreError(f"group {number}: column `request` differs from the list of requests")
        positions = shard.column(number, "position")
        for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            check_positions(positions[start:stop], f"group {number}, rows {start} to {stop}")
        for tap in group.taps:
            _check_rows(shard, number, tap)


def _check_rows(shard: Shard, group: int, tap: Tap) -> None:
    header = shard.header
    codec = header.open_codec()
    if isinstance(codec, Raw):
        return
    rows = shard.groups[group].rows
    step = max(1, _CHUNK_BYTES // header.row_bytes(tap))
    for start in range(0, rows, step):
        # A copy: torch does not accept read-only memory.
        data = shard.rows(group, tap, start, min(start + step, rows)).copy()
        try:
            codec.check(torch.from_numpy(data), header.width(tap), header.torch_dtype)
        except CodecError as error:
            raise StoreError(f"{tap[0]} of layer {tap[1]}, rows from {start}: {error}") from None
