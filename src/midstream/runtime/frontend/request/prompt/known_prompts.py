"""Prompts that several requests have, by their tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

from midstream.plan import Prompt

# Tokens of all prompts that are kept; a token takes some 200 bytes.
MAX_TOKENS = 1 << 17
# The tokens of a prompt, and what identifies its chat, if it was made from one, and its media.
Key = tuple[tuple[int, ...], Hashable]


class KnownPrompts:
    """Recent prompts. All requests with the same tokens share one. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prompts: dict[Key, Prompt] = {}
        self._num_tokens = 0

    def get(self, key: Key, make: Callable[[], Prompt]) -> Prompt:
        with self._lock:
            prompt = self._prompts.pop(key, None)
            if prompt is None:
                prompt = make()
                self._num_tokens += prompt.length
            self._prompts[key] = prompt  # as the last one that was used
            while self._num_tokens > MAX_TOKENS and len(self._prompts) > 1:
                oldest = next(iter(self._prompts))
                self._num_tokens -= self._prompts.pop(oldest).length
        return prompt
