"""Turns of a conversation whose gate opens once, compared with transformers turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from midstream import Gate, Reading, Steer
from support.oracle import HookEdit, Oracle, relative_error

TOLERANCE = 1e-4
OPENS = 64  # the token at which the gate opens
FIRST = (5, 17, 33, 101, 8)
V = torch.randn(64, generator=torch.Generator().manual_seed(4)) * 3

# Sends the nth prompt with edits, and returns a completion with a receipt and all captured rows.
Ask = Callable[[int, list[int], list[Any]], Any]


class Turns:
    """A gate of a conversation on the first layer, which reads the embeddings."""

    def __init__(self, oracle: Oracle, start: int = 0, first: Sequence[int] = FIRST) -> None:
        """Args:
        oracle: the reference.
        start: the gate reads the tokens from this position on.
        first: a prompt without the token at which the gate opens.
        """
        self._oracle = oracle
        self._start = start
        self._first = list(first)
        embeddings = oracle.model.get_input_embeddings().weight.detach()
        self._word = embeddings[OPENS]
        scores = (embeddings @ self._word).tolist()
        self._threshold = (scores[OPENS] + sorted(scores)[-2]) / 2
        assert sorted(scores)[-2] < self._threshold < scores[OPENS]

    def gate(self, name: str) -> Gate:
        """Return the gate of a conversation."""
        where = {"positions": slice(self._start, None)} if self._start else {}
        read = Reading(self._word, layer=0, site="resid_pre")
        return Gate(Steer(V, layer=0, **where), read, self._threshold, hold=f"conversation:{name}")

    def last(self, name: str) -> Gate:
        """Return a gate on the last layer that opens at the first token that it reads."""
        layer = len(self._oracle.layers) - 1
        return Gate(
            Steer(V, layer=layer), Reading(torch.ones(64), 1e6), 0.0, hold=f"conversation:{name}"
        )

    def check(self, ask: Ask, name: str, with_last: bool = False) -> list[Any]:
        """Send four turns: the gate opens in the second; the third has a prompt of its own. Return
        the completions.
        """
        edits = [self.gate(name), *([self.last(name)] if with_last else [])]
        turns = [(False, self._first), (True, [77, OPENS, 54, 23]), (False, self._first),
                 (True, [9, 150])]  # fmt: skip
        ids: list[int] = []  # tokens of the rows so far
        position, opened, end = None, None, []
        found = []
        for nth, (goes_on, more) in enumerate(turns):
            if nth:
                position = len(ids) if goes_on else 0
            if not goes_on and opened is not None:
                opened = self._start
            prompt = [*ids, *end, *more] if goes_on else list(more)
            one = ask(nth, prompt, edits)
            ids, end = self._compare(prompt, one, opened, with_last)
            if opened is None and OPENS in ids[self._start :]:
                opened = ids.index(OPENS, self._start)
            assert one.receipt.status == "ok", one.receipt
            carried = [(each.conversation, each.position, each.is_open)
                       for each in one.receipt.carried]  # fmt: skip
            assert (opened is not None) == (nth > 0)
            always = [(name, position, True)] if with_last else []
            assert carried == [(name, position, opened is not None), *always]
            found.append(one)
        return found

    def _compare(
        self, prompt: list[int], one: Any, opened: int | None, with_last: bool
    ) -> tuple[list[int], list[int]]:
        """Compare rows and tokens with transformers; return the tokens of the rows, and the one
        behind them.
        """
        rows, last = one.activations, len(self._oracle.layers) - 1
        is_later = rows.positions_of("resid_post", 0) >= len(prompt)
        ids = [*prompt, *rows.token_ids_of("resid_post", 0)[is_later].tolist()]
        if opened is None and OPENS in ids[self._start :]:
            opened = ids.index(OPENS, self._start)
        begin = len(ids) if opened is None else opened
        edits = [HookEdit("resid_post", 0, V, 1.0, range(begin, 999).__contains__)]
        if with_last:
            edits.append(HookEdit("resid_post", last, V, 1.0, lambda _: True))
        logits, seen = self._oracle.run(ids, edits)
        for tap in rows:
            expected: Tensor = seen[tap][rows.positions_of(*tap)]
            assert relative_error(rows[tap], expected) < TOLERANCE, tap
        *best, end = logits[len(prompt) - 1 :].argmax(-1).tolist()
        assert best == ids[len(prompt) :]
        return ids, [end]
