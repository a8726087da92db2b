"""States of gates of conversations, from the end of one request to the beginning of the next."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from midstream.errors import SpecError
from midstream.spec import Plan
from midstream.spec.operations import Gate
from midstream.spec.operations.gate_memory import ScanStart, State

# Most states that are kept, those used last.
MAX_STATES = 16384


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
    """The states of one front end. Thread-safe."""

    def __init__(self, most: int = MAX_STATES) -> None:
        """Args:
        most: the most states that are kept.
        """
        self._most = most
        self._kept: OrderedDict[tuple[object, ...], KeptState] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of states."""
        return len(self._kept)

    def of(self, request: Any, own: Plan | None) -> Recollection | None:
        """Return what a request may recall; None: none of its gates holds for a conversation.

        Args:
            request: vLLM's EngineCoreRequest. Requests with different cache salts have different
                conversations.
            own: its own plan, as given; None: it has none.

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
        return Recollection(self, request.cache_salt, ids)

    def find(self, key: tuple[object, ...]) -> KeptState | None:
        """Return a state that was kept, and count it as used; None: there is none any more."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def keep(self, states: Iterable[tuple[tuple[object, ...], KeptState]]) -> None:
        """Keep the states that a request left, in place of earlier ones."""
        with self._lock:
            for key, state in states:
                self._kept[key] = state
                self._kept.move_to_end(key)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)


class Recollection:
    """What the gates of one request recall of their conversations. All versions of its plan have
    the same.
    """

    def __init__(
        self, conversations: Conversations, salt: object, prompt: Sequence[int] | None
    ) -> None:
        """Args:
        conversations: the states of earlier requests.
        salt: the request's cache salt.
        prompt: its token ids; None: it has embeddings.
        """
        self._conversations = conversations
        self._salt = salt
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
            kept = self._conversations.find((self._salt, *name))
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
                (self._salt, conversation, gate),
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


def digest(tokens: Sequence[int]) -> bytes:
    """Return a digest of token ids."""
    return hashlib.sha256(np.array(tokens, np.int64).tobytes()).digest()
