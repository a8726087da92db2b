"""States of gates of conversations, from the end of one request to the beginning of the next."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from midstream.errors import SpecError
from midstream.spec import Plan
from midstream.spec.operations import Gate
from midstream.spec.operations.gate_memory import ScanStart, State

# Most states that are kept, those used last.
MAX_STATES = 16384
_LOCK_SECONDS = 20.0
# Nobody reads a file whose processes have ended, so it need not survive them.
_TABLE = """
PRAGMA journal_mode = MEMORY;
PRAGMA synchronous = OFF;
CREATE TABLE IF NOT EXISTS states (
    key BLOB PRIMARY KEY, length INTEGER, tokens BLOB, first REAL, last REAL, used INTEGER UNIQUE
);
"""
_NEXT = "(SELECT coalesce(max(used), 0) + 1 FROM states)"
_FIND = "SELECT length, tokens, first, last FROM states WHERE key = ?"
_USE = f"UPDATE states SET used = {_NEXT} WHERE key = ?"
_KEEP = f"REPLACE INTO states VALUES (?, ?, ?, ?, ?, {_NEXT})"
_EVICT = "DELETE FROM states WHERE used IN (SELECT used FROM states ORDER BY used LIMIT ?)"

# (owner, cache salt), conversation and gate.
Key = tuple[tuple[str, str | None], str, str]


@dataclass(frozen=True, slots=True)
class KeptState:
    """What a gate of a conversation left at the end of a request.

    Attributes:
        length: number of rows of the request, P + G − 1.
        tokens: digest of their token ids; empty: the ids do not tell the prompt.
        first: state in front of the first of these rows.
        last: state after the last of them.
    """

    length: int
    tokens: bytes
    first: State
    last: State


class Conversations:
    """The states of one front end, or of all of a server. Thread-safe."""

    def __init__(self, most: int = MAX_STATES) -> None:
        """Args:
        most: the most states that are kept.
        """
        self._most = most
        self._lock = threading.Lock()
        self._open(":memory:")

    def share(self, file: Path) -> None:
        """Have the states of a file from now on, which several processes of this machine share."""
        with self._lock:
            self._open(str(file))

    def _open(self, name: str) -> None:
        self._database = sqlite3.connect(
            name, timeout=_LOCK_SECONDS, isolation_level="IMMEDIATE", check_same_thread=False
        )
        weakref.finalize(self, self._database.close)
        self._database.executescript(_TABLE)

    def __len__(self) -> int:
        """Return the number of states."""
        (found,) = self._database.execute("SELECT count(*) FROM states").fetchone()
        return int(found)

    def of(self, request: Any, own: Plan | None, owner: str = "") -> Recollection | None:
        """Return what a request may recall; None: none of its gates holds for a conversation.

        Args:
            request: vLLM's EngineCoreRequest. Requests with different cache salts have different
                conversations.
            own: its own plan, as given; None: it has none.
            owner: whose conversations it knows; see `CallPlan`.

        Raises:
            SpecError: it has several completions.
        """
        nth = first_of_conversation(own)
        if own is None or nth is None:
            return None
        n = request.sampling_params.n
        if n > 1:
            raise SpecError(
                f"edits[{own.origin(nth)}].hold",
                f"a conversation goes on with one completion, and n is {n}; use n=1",
            )
        ids = request.prompt_token_ids
        if not all(getattr(request, "prompt_is_token_ids", None) or (True,)):
            ids = None
        return Recollection(self, (owner, request.cache_salt), ids)

    def find(self, key: Key) -> KeptState | None:
        """Return a state that was kept, and count it as used; None: there is none any more."""
        with self._lock, self._database as database:
            database.execute(_USE, (_digest(key),))
            found = database.execute(_FIND, (_digest(key),)).fetchall()
        return KeptState(*found[0]) if found else None

    def keep(self, states: Iterable[tuple[Key, KeptState]]) -> None:
        """Keep the states that a request left, in place of earlier ones."""
        with self._lock, self._database as database:
            for key, one in states:
                row = (_digest(key), one.length, one.tokens, one.first, one.last)
                database.execute(_KEEP, row)
            database.execute(_EVICT, (max(0, len(self) - self._most),))


class Recollection:
    """What the gates of one request recall of their conversations. All versions of its plan have
    the same.
    """

    def __init__(
        self,
        conversations: Conversations,
        whose: tuple[str, str | None],
        prompt: Sequence[int] | None,
    ) -> None:
        """Args:
        conversations: the states of earlier requests.
        whose: the owner of the conversations, and the request's cache salt.
        prompt: its token ids; None: it has embeddings.
        """
        self._conversations = conversations
        self._whose = whose
        self._prompt = prompt
        self._starts: dict[tuple[str, str], tuple[ScanStart, bool]] = {}
        self._digests: dict[int, bytes] = {}

    def start(self, conversation: str, gate: str) -> ScanStart:
        """Return what a gate starts from.

        Args:
            conversation: the id.
            gate: its key, see `spec.resolve.gates.gate_key`.
        """
        name = conversation, gate
        if name not in self._starts:
            kept = self._conversations.find((self._whose, *name))
            start = ScanStart() if kept is None else self._start_from(kept)
            self._starts[name] = start, kept is not None
        return self._starts[name][0]

    def _start_from(self, kept: KeptState) -> ScanStart:
        prompt = self._prompt
        if prompt is not None and kept.tokens and len(prompt) >= kept.length:
            if kept.length not in self._digests:
                self._digests[kept.length] = digest(prompt[: kept.length])
            if self._digests[kept.length] == kept.tokens:
                return ScanStart(kept.length, kept.first, kept.last)
        return ScanStart(0, None, kept.last)

    def is_new(self, conversation: str, gate: str) -> bool:
        """Return whether a gate that was started had no state of an earlier request."""
        return not self._starts[conversation, gate][1]

    def keep(
        self, states: Iterable[tuple[str, str, ScanStart, State]], tokens: Sequence[int]
    ) -> None:
        """Keep what the request has left.

        Args:
            states: of each gate the conversation, its key, what it started from, and its state
                after the last row.
            tokens: token id of each row, prompt first.
        """
        made = b"" if self._prompt is None else digest(tokens)
        self._conversations.keep(
            (
                (self._whose, conversation, gate),
                KeptState(len(tokens), made, start.before if start.position else start.after, last),
            )
            for conversation, gate, start, last in states
        )


def first_of_conversation(plan: Plan | None) -> int | None:
    """Return the index of the first gate of a conversation; None: the plan has none."""
    for nth, edit in enumerate(() if plan is None else plan.edits):
        if isinstance(edit, Gate) and edit.memory.conversation is not None:
            return nth
    return None


def _digest(key: Key) -> bytes:
    return hashlib.sha256(json.dumps(key).encode()).digest()


def digest(tokens: Sequence[int]) -> bytes:
    """Return a digest of token ids."""
    return hashlib.sha256(np.array(tokens, np.int64).tobytes()).digest()
