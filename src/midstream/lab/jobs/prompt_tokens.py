"""Prompts as token ids, and which document and role each of their tokens is of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from midstream.plan.positions.ranges import Ranges
from midstream.store.loss_mask import ASSISTANT, ROLES

# Field of a request's metadata in the store; the other is ROLES.
DOCUMENTS = "documents"


class DocumentPart(NamedTuple):
    """A part of a document in a prompt. Tokens of no part are separators."""

    line: int  # of the document, in the data, from 1
    start: int  # position in the prompt of its first token
    offset: int  # position in the document of that token
    length: int  # in tokens


@dataclass(frozen=True, slots=True)
class PromptParts:
    """The documents of a prompt, and which tokens are of messages of each role.

    Attributes:
        documents: parts of documents, ascending; empty: the prompt is its line.
        roles: ranges of positions [start, stop) in the prompt, by role; None: they are not known.
            Tokens of the chat template are of no role.
    """

    documents: tuple[DocumentPart, ...] = ()
    roles: Mapping[str, tuple[tuple[int, int], ...]] | None = None

    @staticmethod
    def read(metadata: Mapping[str, Any]) -> PromptParts:
        """Return the parts of a stored request, from its metadata."""
        roles = metadata.get(ROLES)
        return PromptParts(
            tuple(DocumentPart(*part) for part in metadata.get(DOCUMENTS, ())),
            None
            if roles is None
            else {
                role: tuple((start, stop) for start, stop in spans) for role, spans in roles.items()
            },
        )

    def to_metadata(self) -> dict[str, Any]:
        """Return the fields of a request's metadata, as JSON values; none if nothing is known."""
        fields: dict[str, Any] = {}
        if self.documents:
            fields[DOCUMENTS] = [list(part) for part in self.documents]
        if self.roles is not None:
            fields[ROLES] = {
                role: [list(span) for span in spans] for role, spans in self.roles.items()
            }
        return fields

    def origin(self, positions: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the line of each position's document, and its position in that document.

        Args:
            positions: positions in the prompt, [n].

        Returns:
            two arrays [n]; of a separator −1 both.

        Raises:
            ValueError: the prompt is not packed, so it has no parts.
        """
        if not self.documents:
            raise ValueError("this prompt is not packed: it is the document of its line")
        parts = np.array(self.documents, np.int64)
        places = np.asarray(positions, np.int64)
        index = np.searchsorted(parts[:, 1], places, side="right") - 1
        line, start, offset, length = parts[np.maximum(index, 0)].T
        inside = (index >= 0) & (places < start + length)
        return np.where(inside, line, -1), np.where(inside, offset + places - start, -1)

    def loss_mask(self, positions: Any, role: str = ASSISTANT) -> NDArray[np.bool_]:
        """Return whether each position is of a message of a role.

        Args:
            positions: positions in the prompt, [n].

        Returns:
            an array [n].

        Raises:
            ValueError: the roles were not stored.
        """
        if self.roles is None:
            raise ValueError("the roles were not stored: capture with roles=True")
        places = np.asarray(positions, np.int64)
        bounds = np.array([bound for span in self.roles.get(role, ()) for bound in span], np.int64)
        inside: NDArray[np.bool_] = np.searchsorted(bounds, places, side="right") % 2 == 1
        return inside


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A prompt as token ids; `positions` to capture, None: those of the job."""

    token_ids: tuple[int, ...]
    positions: tuple[tuple[int, int], ...] | None = None
    parts: PromptParts = field(default_factory=PromptParts)
    text: str | None = None  # to keep with the rows


def shifted(ranges: Ranges, start: int, stop: int, by: int) -> list[tuple[int, int]]:
    """Return the positions of bounded ranges that are in [start, stop), moved by some tokens."""
    moved = []
    for first, end in ranges:
        assert end is not None
        if first < stop and end > start:
            moved.append((max(first, start) + by, min(end, stop) + by))
    return moved


def joined(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return ascending spans with adjacent ones as one."""
    merged: list[tuple[int, int]] = []
    for start, stop in spans:
        if merged and merged[-1][1] == start:
            merged[-1] = merged[-1][0], stop
        else:
            merged.append((start, stop))
    return tuple(merged)
