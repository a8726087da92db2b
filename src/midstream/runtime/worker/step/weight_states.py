"""States of a worker's weights, by the steps that ran on them."""

from __future__ import annotations

import bisect
from collections import Counter

from midstream.runtime.protocol.results import WeightState

# States that are told apart; a request that ran on more shows the last ones.
MOST_STATES = 1024


class WeightStates:
    """Numbers the states of the weights. Changes without a step in between make one state, so that
    a model loaded parameter by parameter rises by one.
    """

    def __init__(self) -> None:
        self._first = 0  # number of the first state in `_begins`
        self._begins = [0]  # of each state, the last step before it
        self._names: dict[int, str] = {}
        self._is_changed = False  # since the last step
        self.loads: Counter[int] = Counter()  # of adapters, by vLLM's number

    @property
    def current(self) -> WeightState:
        """The state that the next step runs on."""
        return self._state(self._last + self._is_changed)

    @property
    def _last(self) -> int:
        return self._first + len(self._begins) - 1

    def change(self) -> None:
        """Note that weights are other ones from the next step on."""
        self._is_changed = True

    def name(self, name: str) -> None:
        """Call the state `name`. Weights that have another name already count as changed."""
        if self.current.name not in ("", name):
            self._is_changed = True
        self._names[self.current.number] = name

    def begin_step(self, step: int) -> None:
        """Note the number of a step whose forward pass is about to be queued."""
        if not self._is_changed:
            return
        self._is_changed = False
        self._begins.append(step - 1)
        if len(self._begins) > MOST_STATES:
            del self._begins[0]
            self._names.pop(self._first, None)
            self._first += 1

    def of_steps(self, first: int, last: int) -> list[WeightState]:
        """Return the states that steps [first, last] ran on; none if the only one is that of the
        start, without a name.
        """
        begin = bisect.bisect_left(self._begins, first) - 1
        end = bisect.bisect_left(self._begins, max(first, last))
        numbers = range(self._first + max(0, begin), self._first + end)
        states = [self._state(number) for number in numbers]
        return [] if states == [WeightState(0)] else states

    def _state(self, number: int) -> WeightState:
        return WeightState(number, self._names.get(number, ""))
