"""What a probe does when its scores meet a condition: `Stop`, `Switch` and `Flag`, and the rule."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

from midstream.errors import SpecError
from midstream.plan.argument_names import FrozenFields, read_named
from midstream.plan.classifiers.classes import read_output
from midstream.plan.operation import read_scalar
from midstream.plan.operations import (
    Edit,
    Gate,
    Local,
    Steer,
    bind_edit,
    expand_edits,
    has_captured,
    is_placed_vector,
    parse_edit,
)
from midstream.plan.scores.pools import (
    MOST_TOKENS,
    NO_POOL,
    NOTHING_POOLED,
    PoolState,
    pooled,
    read_pool,
)
from midstream.plan.scores.rule import NO_TOKENS, RuleState
from midstream.plan.vectors.named_lookup import Lookup
from midstream.validation import MAX_PARTS, at, kind, listed, read_int, show

_DEFAULTS: dict[str, Any] = {
    "above": None, "below": None, "for": 1, "pool": NO_POOL, "output": None,
}  # fmt: skip


C = TypeVar("C", bound="Condition")


@dataclass(frozen=True, slots=True, init=False)
class Condition(FrozenFields):
    """A condition on the scores of a probe, in the order of the tokens that it selects.

    It is met at a token if the pooled score there, and at the `for_` − 1 selected tokens before it,
    is above or below the threshold. The pooled score of a token is, by `pool`:

    - "none": its score;
    - "max": the largest score so far;
    - "mean:n": the mean of the last n scores, or of all while there are fewer;
    - "ema:d": m ← d · m + (1 − d) · score, where m is the first score at first.

    A score that is not finite meets no condition.

    Attributes:
        above: the pooled score must be greater; None: see `below`.
        below: the pooled score must be less; None: see `above`.
        for_: how many tokens in a row, 1 to 4096.
        pool: how scores are pooled, beside the `pool` of the probe.
        output: of a probe with classes, the name or index of the one whose scores count.
    """

    above: float | None
    below: float | None
    for_: int
    pool: str
    output: str | int | None
    word: ClassVar[str] = ""

    def __init__(
        self,
        *,
        above: float | None = None,
        below: float | None = None,
        for_: int = 1,
        pool: str = NO_POOL,
        output: str | int | None = None,
    ) -> None:
        """Create it; either `above` or `below` is given.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        if (above is None) == (below is None):
            raise SpecError(
                "above" if above is None else "below",
                "missing: give `above` or `below`" if above is None else "give `above` or `below`",
            )
        self._read_given(read_scalar, above=above, below=below)
        with at("for"):
            count = read_int(for_)
            if not 1 <= count <= MOST_TOKENS:
                raise SpecError("", f"expected 1 to {MOST_TOKENS} tokens, got {count}")
        self._set(for_=count)
        self._read(read_pool, pool=pool)
        self._read_given(read_output, output=output)

    def at_output(self: C, index_of: Callable[[str | int], int]) -> C:
        """Return the same with the index of its output in place of a name."""
        return self if self.output is None else self._changed(output=index_of(self.output))

    def emit(self) -> dict[str, Any]:
        """Return the JSON form, such as `{"stop": {"above": 2.0, "for": 3}}`."""
        fields: dict[str, Any] = {"above": self.above, "below": self.below, "for": self.for_}
        fields |= {"pool": self.pool, "output": self.output}
        set_fields = {name: part for name, part in fields.items() if part != _DEFAULTS[name]}
        return {self.word: set_fields}


@dataclass(frozen=True, slots=True, init=False)
class Stop(Condition):
    """End the completion at the token whose score meets the condition: that is its last token.

    The finish reason is "stop", the stop reason "probe:" and the probe's name. See `Condition` for
    the arguments. A token's score is known when the next one is sampled; that one is dropped, and
    no output shows it. A stop in the prompt leaves no generated token. `min_tokens` does not
    prevent it; a stop token, stop string or `max_tokens` at the same token comes first.
    """

    word: ClassVar[str] = "stop"


@dataclass(frozen=True, slots=True, init=False)
class Flag(Condition):
    """State in the receipt at which token the scores met the condition first. See `Condition`."""

    word: ClassVar[str] = "flag"


@dataclass(frozen=True, slots=True, init=False)
class Switch(Condition):
    """Give the completion other edits once the scores meet the condition, until it ends.

    The edits replace those of the request from the next position on that no step was scheduled
    with. `Switch([])` turns the request's own edits off. Each probe switches once. See `Condition`
    for the other arguments, and `Version` for where the edits held.

    Attributes:
        edits: the request's own edits from then on; their positions are those of the whole request.
        origins: after `bind`, each edit's index before binding; empty: unchanged.
    """

    edits: tuple[Edit, ...]
    origins: tuple[int, ...]
    word: ClassVar[str] = "switch"

    def __init__(
        self,
        edits: object,
        *,
        above: float | None = None,
        below: float | None = None,
        for_: int = 1,
        pool: str = NO_POOL,
        output: str | int | None = None,
    ) -> None:
        """Create it; either `above` or `below` is given.

        Args:
            edits: an edit or its dict, or a list or tuple of these, which may be empty.
            above, below, for_, pool, output: see `Condition`.

        Raises:
            SpecError: a field is malformed, or an edit cannot be switched on.
        """
        Condition.__init__(self, above=above, below=below, for_=for_, pool=pool, output=output)
        self._set(edits=read_later_edits(edits), origins=())

    def emit(self) -> dict[str, Any]:
        """Return the JSON form, such as `{"switch": {"edits": [{…}], "above": 2.0}}`."""
        fields = Condition.emit(self)[self.word]
        return {self.word: {"edits": [edit.to_dict() for edit in self.edits], **fields}}

    def names(self) -> tuple[str, ...]:
        """Return the names of the registered vectors in use, each once."""
        return tuple(dict.fromkeys(name for edit in self.edits for name in edit.names()))

    @property
    def is_bound(self) -> bool:
        """Whether `bind` would return edits that are the same."""
        return all(edit.is_bound for edit in self.edits)

    def bind(self, lookup: Lookup, num_layers: int | None = None) -> Switch:
        """Return a copy with names replaced by their registered vectors; see `Plan.bind`."""
        bind = functools.partial(bind_edit, lookup=lookup, num_layers=num_layers)
        edits, origins = expand_edits(self.edits, self.origins, bind)
        return self._changed(edits=edits, origins=origins)


def read_later_edits(value: object) -> tuple[Edit, ...]:
    """Read edits for a running request: one or its dict, or a list of these, maybe empty."""
    is_list = isinstance(value, (list, tuple)) and not is_placed_vector(value)
    forms: Any = value if is_list else (value,)
    if len(forms) > MAX_PARTS:
        raise SpecError("edits", f"expected at most {MAX_PARTS}, got {len(forms)}")
    edits = []
    for index, form in enumerate(forms):
        with at(f"edits[{index}]" if forms is value else "edits"):
            edit = parse_edit(form)
            _check_switched(edit)
            edits.append(edit)
    return tuple(edits)


def _check_switched(edit: Edit) -> None:
    """Check that an edit needs nothing that is found or computed when a request begins."""
    if isinstance(edit, Local):
        raise SpecError("", "a Python function (Local) cannot be switched on; give another edit")
    if has_captured(edit):
        raise SpecError("rows", "captured rows cannot be switched on; give the rows by value")
    inner = edit.edit if isinstance(edit, Gate) else edit
    if isinstance(inner, Steer) and inner.token is not None:
        raise SpecError("token", "a token cannot be switched on; register its direction as a name")


Act = Stop | Flag | Switch
_ACTS: dict[str, type[Act]] = {act.word: act for act in (Stop, Flag, Switch)}


def read_act(value: object) -> Act:
    if isinstance(value, Act):
        return value
    if not isinstance(value, Mapping) or len(value) != 1:
        forms = 'Stop(…), Flag(…), Switch(…) or {"stop": {…}}'
        raise SpecError("", f"expected {forms}, got {kind(value)}")
    ((word, fields),) = value.items()
    if word not in _ACTS:
        raise SpecError("", f"unknown act {show(str(word))}; known: {listed(_ACTS)}")
    with at(word):
        own = ("edits",) if word == Switch.word else ()
        if not isinstance(fields, Mapping):
            known = listed((*own, *_DEFAULTS))
            raise SpecError("", f"expected a dict of {known}, got {kind(fields)}")
        arguments = read_named(fields, own, tuple(_DEFAULTS))
        if "for" in arguments:
            arguments["for_"] = arguments.pop("for")
        return _ACTS[word](**arguments)


class Progress(NamedTuple):
    """How far a condition is: the number of tokens in a row whose pooled score is beyond the
    threshold, what its pool keeps, and the state of the rule that made the scores.
    """

    run: int = 0
    pool: PoolState = NOTHING_POOLED
    state: RuleState = NO_TOKENS


class Met(NamedTuple):
    """Where a condition is met: the nth score, from 0, and the pooled score there."""

    nth: int
    pooled: float


def follow(
    condition: Condition, progress: Progress, scores: Iterable[float]
) -> tuple[Progress, Met | None]:
    """Return the progress after the next scores, and where they meet the condition first, if so."""
    run = progress.run
    pool, values = pooled(condition.pool, progress.pool, scores)
    for index, value in enumerate(values):
        run = run + 1 if _beyond(condition, value) else 0
        if run == condition.for_:
            return Progress(run, pool, progress.state), Met(index, value)
    if run == progress.run and pool is progress.pool:
        return progress, None
    return Progress(run, pool, progress.state), None


def _beyond(condition: Condition, value: float) -> bool:
    if not math.isfinite(value):
        return False
    if condition.above is not None:
        return value > condition.above
    assert condition.below is not None
    return value < condition.below
