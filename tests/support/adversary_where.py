"""Position selections of every form, and independent lists of the selected positions."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from midstream import Span, TokenIds, Window

Says = Callable[[int, int], bool]


@dataclass(frozen=True)
class Place:
    """Some positions of one request."""

    written: dict[str, Any]  # the arguments of a capture, an edit or a probe that say so
    says: Says  # of a position and the id of its token, whether it is one of them
    last_only: bool = False  # whether it is the final row and no other, wherever that comes to be

    def chosen(self, ids: Sequence[int]) -> list[int]:
        """The positions, given the ids of all tokens that were computed; ascending."""
        if self.last_only:
            return [len(ids) - 1]
        return [position for position, token in enumerate(ids) if self.says(position, token)]


class Places:
    """Draws places for a request of a prompt and at most so many generated tokens."""

    def __init__(self, draw: random.Random, prompt: Sequence[int], max_tokens: int) -> None:
        self.draw = draw
        self.prompt = prompt
        self.size = len(prompt)
        self.rows = self.size + max_tokens - 1
        self.generates = max_tokens > 1

    def any(self, *, for_edit: bool) -> Place:
        """Of any form; an edit cannot be at "last_row"."""
        forms = [self._all, self._prompt, self._last_prompt, self._one, self._from_the_end]
        forms += [
            partial(self._some, for_edit),
            self._bounded,
            self._open,
            self._stepped,
            self._window,
            self._range,
        ]
        forms += [self._tokens, self._but, self._phase_of_a_slice]
        if self.generates:
            forms += [self._generated, self._generated_but, self._generated_tokens]
        if not for_edit:
            forms.append(self._last)
        return self.draw.choice(forms)()

    def run(self, count: int) -> Place | None:
        """So many positions in a row, or apart; None where there are not as many."""
        if count > self.rows:
            return None
        start = self.draw.randrange(self.rows - count + 1)
        if self.draw.random() < 0.5:
            return _slice(start, start + count)
        listed = self.draw.sample(range(self.rows), count)
        return Place({"positions": listed}, lambda p, _: p in listed)

    # -- forms, each valid for the request that it is drawn for ---------------------------------

    def _all(self) -> Place:
        return Place({}, lambda p, _: True)

    def _prompt(self) -> Place:
        size = self.size
        written = self.draw.choice([{"positions": "prompt"}, {"phase": "prompt"}])
        return Place(written, lambda p, _: p < size)

    def _generated(self) -> Place:
        size = self.size
        written = self.draw.choice([{"positions": "generated"}, {"phase": "generated"}])
        return Place(written, lambda p, _: p >= size)

    def _last_prompt(self) -> Place:
        last = self.size - 1
        return Place({"positions": "last_prompt"}, lambda p, _: p == last)

    def _last(self) -> Place:
        return Place({"positions": "last_row"}, lambda p, _: False, last_only=True)

    def _one(self) -> Place:
        at = self.draw.randrange(self.rows)
        return Place({"positions": at}, lambda p, _: p == at)

    def _from_the_end(self) -> Place:
        back = self.draw.randint(1, self.size)
        at = self.size - back
        return Place({"positions": -back}, lambda p, _: p == at)

    def _some(self, for_edit: bool) -> Place:
        """In any order; rows that are read have the order of their positions, which is checked."""
        count = min(self.rows, self.draw.randint(2, 5))
        listed = self.draw.sample(range(self.rows), count)
        if not for_edit:
            listed.sort()
        # Some of the prompt's are counted from its end.
        written = [
            p - self.size if p < self.size and self.draw.random() < 0.4 else p for p in listed
        ]
        return Place({"positions": written}, lambda p, _: p in listed)

    def _bounded(self) -> Place:
        start = self.draw.randrange(self.rows)
        stop = self.draw.randint(start + 1, self.rows)
        found = _slice(start, stop)
        if start < self.size and self.draw.random() < 0.4:
            return Place({"positions": slice(start - self.size, stop)}, found.says)
        return found

    def _open(self) -> Place:
        start = self.draw.randrange(self.size)
        written = self.draw.choice([slice(start, None), slice(start - self.size, None)])
        return Place({"positions": written}, lambda p, _: p >= start)

    def _stepped(self) -> Place:
        start, step = self.draw.randrange(self.size), self.draw.randint(2, 7)
        if self.draw.random() < 0.5:
            return Place(
                {"positions": slice(start, None, step)},
                lambda p, _: p >= start and (p - start) % step == 0,
            )
        stop = self.draw.randint(start + 1, self.rows)
        return Place(
            {"positions": Span(start, stop, step)},
            lambda p, _: start <= p < stop and (p - start) % step == 0,
        )

    def _window(self) -> Place:
        start = -self.draw.randint(1, min(8, self.size))
        most = self.rows - self.size
        stop = self.draw.randint(start + 1, min(6, most)) if most > start else start + 1
        first, end = self.size + start, self.size + stop
        return Place({"positions": Window(start, stop)}, lambda p, _: first <= p < end)

    def _range(self) -> Place:
        start = self.draw.randrange(self.rows)
        stop = self.draw.randint(start + 1, self.rows)
        return Place({"positions": range(start, stop)}, lambda p, _: start <= p < stop)

    def _ids(self) -> list[int]:
        """About half of the prompt's tokens and of the first few hundred."""
        known = sorted({*range(200), *self.prompt})
        ids = {token for token in known if self.draw.random() < 0.5}
        return sorted(ids | {self.draw.choice(self.prompt)})

    def _tokens(self) -> Place:
        ids = self._ids()
        known = frozenset(ids)
        return Place({"positions": TokenIds(ids)}, lambda _, token: token in known)

    def _generated_tokens(self) -> Place:
        ids, size = self._ids(), self.size
        known = frozenset(ids)
        return Place(
            {"positions": TokenIds(ids), "phase": "generated"},
            lambda p, token: p >= size and token in known,
        )

    def _generated_but(self) -> Place:
        ids, size = self._ids(), self.size
        known = frozenset(ids)
        return Place(
            {"positions": "generated", "exclude": TokenIds(ids)},
            lambda p, token: p >= size and token not in known,
        )

    def _but(self) -> Place:
        if self.rows == 1:
            return self._all()
        out = self.draw.randrange(min(self.rows, self.size + 1))
        written = out - self.size if out < self.size and self.draw.random() < 0.5 else out
        return Place({"exclude": written}, lambda p, _: p != out)

    def _phase_of_a_slice(self) -> Place:
        start, size = self.draw.randrange(self.size), self.size
        if self.generates and self.draw.random() < 0.5:
            return Place(
                {"positions": slice(start, None), "phase": "generated"}, lambda p, _: p >= size
            )
        return Place(
            {"positions": slice(start, None), "phase": "prompt"}, lambda p, _: start <= p < size
        )


def _slice(start: int, stop: int) -> Place:
    return Place({"positions": slice(start, stop)}, lambda p, _: start <= p < stop)
