"""`Automaton`: which tokens are selected by the tokens up to them, as those between two marks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from midstream.errors import SpecError
from midstream.plan.positions.ranges import Range, Ranges, merge

# Transitions of an automaton: states times kinds of tokens.
MAX_MOVES = 1 << 12
# Its states: a worker composes the moves of them all.
MAX_STATES = 128
# Marks and lists of token ids that it reads: their combinations are at least two to their power.
MAX_READERS = 16

# A state of one reader: what it has seen of its marks, or whether the last token is listed.
State = tuple[int, int]
_OUTSIDE, _AT_MARK, _INSIDE = range(3)


@dataclass(frozen=True, slots=True)
class Automaton:
    """A finite automaton that reads the tokens of a request from position `start` on.

    It is in state 0 before the first of them. Whether a token is selected depends on no later one.

    Attributes:
        ids, kinds: token ids, ascending, and the kind of each, from 1; any other token has kind 0.
        moves: the next state, by state and kind of the token.
        selects: whether the token that led to a state is selected, by state.
    """

    start: int
    ids: tuple[int, ...]
    kinds: tuple[int, ...]
    moves: tuple[tuple[int, ...], ...]
    selects: tuple[bool, ...]

    def selected(
        self,
        token: Callable[[int], int],
        start: int,
        stop: int,
        reached: dict[Automaton, tuple[int, int]] | None = None,
    ) -> list[int]:
        """Return the selected positions of [start, stop), of a request with these tokens.

        `reached` has the position up to which tokens were read before, and the state there: tokens
        before it are not read again. It is updated.
        """
        position, state = self.start, 0
        known = None if reached is None else reached.get(self)
        if known is not None and known[0] <= start:
            position, state = known
        kinds, chosen = dict(zip(self.ids, self.kinds, strict=True)), []
        for place in range(position, stop):
            state = self.moves[state][kinds.get(token(place), 0)]
            if place >= start and self.selects[state]:
                chosen.append(place)
        if reached is not None:
            reached[self] = max(position, stop), state
        return chosen

    def check(self) -> None:
        """Check an automaton that came in a message: each state and kind exists."""
        states, kinds = len(self.moves), {0, *self.kinds}
        if len(self.ids) != len(self.kinds) or list(self.ids) != sorted(set(self.ids)):
            raise SpecError("ids", "expected ascending ids, and a kind for each")
        if kinds != set(range(len(kinds))) or states * len(kinds) > MAX_MOVES:
            raise SpecError("kinds", "expected kinds from 0, and not more moves than the budget")
        if not 0 < states <= MAX_STATES or len(self.selects) != states:
            raise SpecError("selects", f"expected one for each of {states} states")
        if any(len(row) != len(kinds) or not 0 <= min(row) <= max(row) < states
               for row in self.moves):  # fmt: skip
            raise SpecError("moves", "expected a known state for each kind of token")


@dataclass(frozen=True, slots=True)
class Marks:
    """Reads two marks, each a sequence of token ids. Without a start mark it begins inside, without
    an end mark it stays there. What is matched of one mark is no part of another.
    """

    start: tuple[int, ...] | None
    end: tuple[int, ...] | None

    @property
    def alphabet(self) -> frozenset[int]:
        """The token ids that matter."""
        return frozenset((*(self.start or ()), *(self.end or ())))

    @property
    def first(self) -> State:
        return (_INSIDE if self.start is None else _OUTSIDE), 0

    def letter(self, token: int) -> int:
        """Return the token if it matters, else −1."""
        return token if token in self.alphabet else -1

    def step(self, state: State, letter: int) -> State:
        side, matched = state
        side = _INSIDE if side == _AT_MARK else side
        mark = self.start if side == _OUTSIDE else self.end
        if mark is None:
            return side, 0
        matched = _matched((*mark[:matched], letter), mark)
        if matched < len(mark):
            return side, matched
        return (_AT_MARK if side == _OUTSIDE else _OUTSIDE), 0

    def selects(self, state: State) -> bool:
        return state[0] == _INSIDE

    def read(self, tokens: Sequence[int], places: Ranges) -> tuple[Ranges, State]:
        """Return the selected positions of a prompt, and the state at its end.

        `places` are the positions of the tokens that matter.
        """
        ranges: list[Range] = []
        state, reached = self.first, 0
        for start, stop in (*places, (len(tokens), len(tokens))):
            assert stop is not None
            if start > reached:
                # After a token that does not matter, others like it change nothing.
                state = self.step(state, -1)
                ranges += [(reached, start)] if self.selects(state) else []
            for position in range(start, stop):
                state = self.step(state, tokens[position])
                ranges += [(position, position + 1)] if self.selects(state) else []
            reached = stop
        return merge(ranges), state


@dataclass(frozen=True, slots=True)
class Listed:
    """Reads whether the last token is one of some ids."""

    alphabet: frozenset[int]

    def letter(self, token: int) -> int:
        return 1 if token in self.alphabet else -1

    def step(self, state: State, letter: int) -> State:
        return letter, 0

    def selects(self, state: State) -> bool:
        return state[0] > 0


# A reader, and its state before the first generated token.
Started = tuple["Marks | Listed", State]


def listed(ids: frozenset[int]) -> list[Started]:
    """Return the reader of some token ids; none without ids."""
    return [(Listed(ids), (-1, 0))] if ids else []


def automaton_of(
    start: int, included: Sequence[Started] | None, excluded: Sequence[Started]
) -> Automaton:
    """Return the automaton of tokens that some reader selects and none of `excluded` does; without
    `included` it selects all others.
    """
    parts = [*(included or ()), *excluded]
    _check_size(len(parts), 0, 0)
    readers = [reader for reader, _ in parts]
    kinds: dict[tuple[int, ...], int] = {(-1,) * len(readers): 0}
    kind_of: dict[int, int] = {}
    for token in sorted({token for reader in readers for token in reader.alphabet}):
        letters = tuple(reader.letter(token) for reader in readers)
        kind_of[token] = kinds.setdefault(letters, len(kinds))
    numbers = {tuple(state for _, state in parts): 0}
    states, moves, selects = list(numbers), [], []
    for current in states:  # which grows
        row = []
        for letters in kinds:
            steps = zip(readers, current, letters, strict=True)
            after = tuple(reader.step(state, letter) for reader, state, letter in steps)
            if after not in numbers:
                numbers[after] = len(states)
                states.append(after)
            row.append(numbers[after])
        moves.append(tuple(row))
        on = [reader.selects(state) for reader, state in zip(readers, current, strict=True)]
        count = len(included or ())
        selects.append((included is None or any(on[:count])) and not any(on[count:]))
        _check_size(len(parts), len(states), len(kinds))
    return Automaton(start, tuple(kind_of), tuple(kind_of.values()), tuple(moves), tuple(selects))


def _check_size(readers: int, states: int, kinds: int) -> None:
    if readers > MAX_READERS or states > MAX_STATES or states * kinds > MAX_MOVES:
        raise SpecError(
            "",
            "too many marks in one selection, or too long ones: their combinations exceed the "
            f"budget of {MAX_STATES} states or {MAX_MOVES} transitions; use fewer or shorter "
            "marks, or several edits, captures or probes",
        )


def _matched(seen: tuple[int, ...], mark: tuple[int, ...]) -> int:
    """Return how many tokens of a mark the last ones that were seen are."""
    return next(n for n in range(len(seen), -1, -1) if seen[len(seen) - n :] == mark[:n])
