"""Which stored tokens count for a loss: the assistant's, where the roles of a prompt are stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from midstream.errors import StoreError
from midstream.store.format.layout import MAX_POSITION
from midstream.store.format.shard import Shard
from midstream.store.tokens import TokenSegment
from midstream.validation import is_int, show

# Field of a request's metadata: ranges [start, stop) of positions in the prompt, by role.
ROLES = "roles"
ASSISTANT = "assistant"
_STRIDE = MAX_POSITION + 1
_Ints = NDArray[np.int64]


class LossMasks:
    """Loss masks of the tokens of shards.

    Of a request with stored roles, the tokens of the assistant's messages and generated tokens
    count; of another request all do.
    """

    def __init__(self) -> None:
        # Of each shard: request · 2²⁶ + position of where tokens begin and cease to count.
        self._bounds: dict[str, _Ints | None] = {}

    def of(self, segment: TokenSegment, at: _Ints) -> NDArray[np.bool_]:
        """Return bool [n], of tokens of a segment by index.

        Raises:
            StoreError: the roles of a request are malformed.
        """
        shard = segment.shard
        if shard.name not in self._bounds:
            self._bounds[shard.name] = loss_bounds(shard)
        bounds = self._bounds[shard.name]
        if bounds is None:
            return np.ones(len(at), np.bool_)
        keys = segment.column("request", at) * _STRIDE + segment.column("position", at)
        counts: NDArray[np.bool_] = np.searchsorted(bounds, keys, side="right") % 2 == 1
        return counts


def loss_bounds(shard: Shard) -> _Ints | None:
    """Return where tokens of a shard begin and cease to count, in turn; None: all count."""
    # Other metadata of a caller's own may have this name.
    roles = {
        request: value
        for request, value in shard.metadata_with(ROLES)
        if isinstance(value, Mapping)
    }
    if not roles:
        return None
    bounds: list[int] = []
    for request, line in enumerate(shard.lines):
        own = [0, _STRIDE]
        if request in roles:
            with shard.named():
                own = [*_assistant(roles[request], line.prompt_tokens), line.prompt_tokens, _STRIDE]
        bounds += [request * _STRIDE + bound for bound in own]
    return np.array(bounds, np.int64)


def _assistant(roles: Mapping[str, Any], prompt_tokens: int) -> list[int]:
    bounds = []
    last = 0
    spans = roles.get(ASSISTANT, [])
    for span in spans if isinstance(spans, list) else [spans]:
        is_pair = isinstance(span, list) and len(span) == 2 and all(map(is_int, span))
        if not is_pair or not last <= span[0] <= span[1] <= prompt_tokens:
            raise StoreError(
                f"metadata.{ROLES}.{ASSISTANT}: expected ascending ranges [start, stop) of a "
                f"prompt of {prompt_tokens} tokens, got {show(repr(span))}"
            )
        bounds += span
        last = span[1]
    return bounds
