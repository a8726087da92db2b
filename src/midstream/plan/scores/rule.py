"""`ScoreRule`: how a probe's scores are made of the numbers that the device computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from midstream.plan.scores.attention import (
    AttentionState,
    largest_so_far,
    mean_in_window,
    mean_so_far,
)
from midstream.plan.scores.pools import NO_POOL, NOTHING_POOLED, PoolState, pooled
from midstream.plan.scores.units import UnitLayer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LINKS = ("none", "sigmoid", "softmax")
# Over the tokens so far: nothing, an attention probe, MultiMax.
EACH, SOFTMAX, MAX = "none", "softmax", "max"
_ROWS = 1 << 14  # that are computed at once


class RuleState(NamedTuple):
    """What a rule keeps of a request's tokens so far. It never changes: a later one is made."""

    attention: AttentionState = AttentionState()
    pool: PoolState = NOTHING_POOLED


NO_TOKENS = RuleState()


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """How the scores of a probe are made of its numbers, `columns` of each token, in order.

    Tokens may come in parts of any size: the scores are the same to the last bit.

    Attributes:
        columns: of a token; `terms` are these, or what `units` makes of them. Of `over` "none" they
            are one for each output; of "softmax" the logits of all heads and then their values; of
            "max" the values.
        over: what is done over the tokens so far: "none", "softmax" or "max"; then heads are added.
        window: of "softmax", the number of tokens, the last ones; 0: all.
        bias: added to the sum of heads.
        link: of the outputs: "none", "sigmoid" or "softmax".
        pool: of the outputs after their link; see `pooled`.
        output: the only output that is wanted, as a number; None: all.
        units: what follows a hidden layer, whose sums are the columns; None: there is none.
    """

    columns: int = 1
    over: str = EACH
    window: int = 0
    bias: float = 0.0
    link: str = "none"
    pool: str = NO_POOL
    output: int | None = None
    units: UnitLayer | None = None

    @property
    def is_plain(self) -> bool:
        """Whether each score is the number of its token."""
        return self == PLAIN

    @property
    def outputs(self) -> int:
        """Number of outputs of a score [rows, outputs]; 0: it is a number, [rows]."""
        has_several = self.terms > 1 and self.over == EACH and self.output is None
        return self.terms if has_several else 0

    @property
    def terms(self) -> int:
        return self.columns if self.units is None else self.units.outputs

    def follow(
        self, state: RuleState, numbers: NDArray[np.float32]
    ) -> tuple[RuleState, NDArray[np.float32]]:
        """Return the state after the next tokens, and their scores.

        Args:
            state: after the tokens before; `NO_TOKENS` at first.
            numbers: float32 [n, columns], or [n] of one column.

        Returns:
            The scores float32 [n], or [n, outputs] of several. They are computed in float64.
        """
        import numpy as np

        if self.is_plain:
            return state, numbers.reshape(-1)
        rows = numbers.reshape(-1, self.columns)
        shape = (len(rows), self.outputs) if self.outputs else (len(rows),)
        scores = np.empty(shape, np.float32)
        with np.errstate(all="ignore"):  # what is not finite is a score like others
            for start in range(0, len(rows), _ROWS):
                part = rows[start : start + _ROWS].astype(np.float64)
                if self.units is not None:
                    part = self.units.follow(part)
                attention, values = self._over_tokens(state.attention, part)
                pool, values = self._pooled(state.pool, self._linked(values))
                scores[start : start + _ROWS] = values
                state = RuleState(attention, pool)
        return state, scores

    def _over_tokens(self, state: AttentionState, numbers: Any) -> tuple[AttentionState, Any]:
        """Return [n, outputs or 1] of numbers [n, terms]. A token whose numbers are not all
        finite has the score NaN, and does not count for later ones.
        """
        import numpy as np

        if self.over == EACH:
            return state, numbers
        finite = np.isfinite(numbers)
        if finite.all():
            return self._heads(state, numbers)
        rows = finite.all(1)
        sums = np.full((len(numbers), 1), np.nan)
        if rows.any():
            state, sums[rows] = self._heads(state, numbers[rows])
        return state, sums

    def _heads(self, state: AttentionState, numbers: Any) -> tuple[AttentionState, Any]:
        """Return the sums of the heads, [n, 1], of finite numbers."""
        import numpy as np

        half = self.terms // 2
        if self.over == MAX:
            state, heads = largest_so_far(state, numbers)
        elif self.window:
            size = self.window
            state, heads = mean_in_window(state, numbers[:, :half], numbers[:, half:], size)
        else:
            state, heads = mean_so_far(state, numbers[:, :half], numbers[:, half:])
        # One head after the other: a sum of NumPy's depends on how many there are.
        return state, np.add.accumulate(heads, 1)[:, -1:] + self.bias

    def _linked(self, values: Any) -> Any:
        import numpy as np

        if self.link == "sigmoid":
            return 1 / (1 + np.exp(-values))
        if self.link == "softmax":
            weights = np.exp(values - values.max(1, keepdims=True))
            return weights / weights.sum(1, keepdims=True)
        return values

    def _pooled(self, state: PoolState, values: Any) -> tuple[PoolState, Any]:
        """Return [n], or [n, outputs] of several, of values [n, outputs or 1]."""
        values = values if self.outputs else values[:, self.output or 0]
        if self.pool == NO_POOL:
            return state, values
        return pooled(self.pool, state, values if self.outputs else values.tolist())


PLAIN = ScoreRule()
