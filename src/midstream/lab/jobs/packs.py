"""Packs: prompts of a fixed length that documents are joined to."""

from __future__ import annotations

from collections.abc import Iterator

from midstream.lab.jobs.documents import Document
from midstream.lab.jobs.prompt_tokens import (
    DocumentPart,
    PromptParts,
    PromptTokens,
    joined,
    shifted,
)
from midstream.plan.positions.range_set import subtract


class Packer:
    """Joins documents, with a separator between two, and cuts the result into prompts.

    Every token of a document is in one prompt; a long document goes on in the next. All prompts but
    the last have `length` tokens. They depend on the documents before alone.
    """

    def __init__(self, length: int, separator: int, without_first: bool) -> None:
        """Start; `without_first`: the first token of each prompt is not captured."""
        self._length, self._separator = length, separator
        self._without_first = without_first
        self._clear()

    def add(self, document: Document) -> Iterator[PromptTokens]:
        """Add a document; yield the prompts that are full."""
        if self._ids:
            yield from self._make_room()
            self._ids.append(self._separator)
        offset = 0
        while offset < len(document.token_ids):
            yield from self._make_room()
            start = len(self._ids)
            end = min(len(document.token_ids), offset + self._length - start)
            self._ids += document.token_ids[offset:end]
            self._parts.append(DocumentPart(document.line, start, offset, end - offset))
            moved = offset, end, start - offset
            self._positions += shifted(document.positions or (), *moved)
            for role, spans in (document.roles or {}).items():
                self._roles.setdefault(role, []).extend(shifted(spans, *moved))
            self._has_roles = document.roles is not None
            offset = end

    def rest(self) -> PromptTokens:
        """Return the last prompt, which may be shorter, and empty if there was no document."""
        positions = joined(self._positions)
        if self._without_first:
            positions = tuple(shifted(subtract(positions, ((0, 1),)), 0, self._length, 0))
        roles = {role: joined(spans) for role, spans in self._roles.items()}
        parts = PromptParts(tuple(self._parts), roles if self._has_roles else None)
        return PromptTokens(tuple(self._ids), positions, parts)

    def _make_room(self) -> Iterator[PromptTokens]:
        if len(self._ids) == self._length:
            yield self.rest()
            self._clear()

    def _clear(self) -> None:
        self._ids: list[int] = []
        self._parts: list[DocumentPart] = []
        self._positions: list[tuple[int, int]] = []
        self._roles: dict[str, list[tuple[int, int]]] = {}
        self._has_roles = False
