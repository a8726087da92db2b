"""Metrics of a sweep: one number for each run, from its next-token distribution."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from midstream.errors import SpecError
from midstream.validation import INT_LIMIT, at, kind, listed, read_int, show

Token = int | str

_WORDS = ("logprob", "logit_diff", "kl", "recovered")


@dataclass(frozen=True, slots=True)
class NextToken:
    """What is known of the next-token distribution of one run: natural logarithms."""

    logprobs: Mapping[int, float] = field(default_factory=dict)
    every: NDArray[np.float32] | None = None  # float32 [vocabulary]


@dataclass(frozen=True)
class Metric(ABC):
    """One number for a run, from the distribution of the token that follows its prompt."""

    @abstractmethod
    def value(self, run: NextToken, reference: NextToken) -> float:
        """Return the metric of a run; the reference is the clean run, or else the unpatched one."""

    @abstractmethod
    def emit(self) -> object:
        """Return the JSON form, which `read_metric` reads."""

    @property
    def tokens(self) -> tuple[Token, ...]:
        """The tokens whose log-probabilities it reads."""
        return ()

    @property
    def reads_all(self) -> bool:
        """Whether it reads the log-probabilities of all tokens."""
        return False

    def with_ids(self, _id_of: Callable[[str], int]) -> Metric:
        """Return the metric with ids of tokens; `_id_of` raises SpecError if a text is not one."""
        return self


@dataclass(frozen=True)
class LogProb(Metric):
    """The log-probability of a token, in nats.

    Attributes:
        token: an id, or a text that is one token, such as `" Paris"`.

    Raises:
        SpecError: `token` is malformed.
    """

    token: Token

    def __post_init__(self) -> None:
        with at("token"):
            object.__setattr__(self, "token", _read_token(self.token))

    @property
    def tokens(self) -> tuple[Token, ...]:
        return (self.token,)

    def with_ids(self, id_of: Callable[[str], int]) -> Metric:
        with at("logprob"):
            return LogProb(_id(self.token, id_of))

    def value(self, run: NextToken, reference: NextToken) -> float:
        return run.logprobs[_known(self.token)]

    def emit(self) -> object:
        return {"logprob": self.token}


@dataclass(frozen=True)
class LogitDiff(Metric):
    """The logit of one token minus that of another, which is the logarithm of the ratio of their
    probabilities: Wang et al. 2022 (arXiv:2211.00593).

    Attributes:
        a: an id, or a text that is one token: usually the answer of the clean prompt.
        b: likewise: usually the answer of the corrupt prompt.

    Raises:
        SpecError: a token is malformed, or both are the same.
    """

    a: Token
    b: Token

    def __post_init__(self) -> None:
        for name in ("a", "b"):
            with at(name):
                object.__setattr__(self, name, _read_token(getattr(self, name)))
        if self.a == self.b:
            raise SpecError("b", f"expected another token than `a`, got {self.b!r} for both")

    @property
    def tokens(self) -> tuple[Token, ...]:
        return (self.a, self.b)

    def with_ids(self, id_of: Callable[[str], int]) -> Metric:
        with at("logit_diff"):
            with at("[0]"):
                a = _id(self.a, id_of)
            with at("[1]"):
                b = _id(self.b, id_of)
                if a == b:
                    raise SpecError("", f"{self.a!r} and {self.b!r} are the same token, {a}")
            return LogitDiff(a, b)

    def value(self, run: NextToken, reference: NextToken) -> float:
        return run.logprobs[_known(self.a)] - run.logprobs[_known(self.b)]

    def emit(self) -> object:
        return {"logit_diff": [self.a, self.b]}


@dataclass(frozen=True)
class KL(Metric):
    """KL(P ‖ Q) = Σ P · (ln P − ln Q) in nats, P the next-token distribution of the clean run and Q
    that of the patched one. Where the source is no prompt, P is the unpatched run.
    """

    @property
    def reads_all(self) -> bool:
        return True

    def value(self, run: NextToken, reference: NextToken) -> float:
        assert run.every is not None
        assert reference.every is not None
        p = reference.every.astype(np.float64)
        q = run.every.astype(np.float64)
        possible = ~np.isneginf(p)  # other tokens contribute nothing
        return float((np.exp(p[possible]) * (p[possible] - q[possible])).sum())

    def emit(self) -> object:
        return "kl"


@dataclass(frozen=True)
class Recovered(Metric):
    """How much of the difference between the two unpatched runs a patch recovers:
    (patched − corrupt) / (clean − corrupt) of another metric. 0: nothing; 1: all of it.

    Attributes:
        metric: a `LogProb`, `LogitDiff` or `KL`.

    Raises:
        SpecError: it is something else.
    """

    metric: Metric

    def __post_init__(self) -> None:
        if not isinstance(self.metric, Metric) or isinstance(self.metric, Recovered):
            raise SpecError(
                "metric", f"expected LogProb(…), LogitDiff(…) or KL(), got {kind(self.metric)}"
            )

    @property
    def tokens(self) -> tuple[Token, ...]:
        return self.metric.tokens

    @property
    def reads_all(self) -> bool:
        return self.metric.reads_all

    def with_ids(self, id_of: Callable[[str], int]) -> Metric:
        with at("recovered"):
            return Recovered(self.metric.with_ids(id_of))

    def value(self, run: NextToken, reference: NextToken) -> float:
        return self.metric.value(run, reference)

    def emit(self) -> object:
        return {"recovered": self.metric.emit()}


# A function of vLLM's output of one run, with midstream's attributes.
MetricFunction = Callable[[Any], float]


def read_metric(value: object) -> Metric:
    """Read a metric, or its JSON form, in which tokens are ids, or texts of one token each."""
    if isinstance(value, Metric):
        return value
    if value == "kl":
        return KL()
    if isinstance(value, Mapping) and len(value) == 1:
        (name, argument), *_ = value.items()
        if name == "logprob":
            with at("logprob"):
                return LogProb(_read_token(argument))
        if name == "logit_diff":
            with at("logit_diff"):
                return _read_difference(argument)
        if name == "recovered":
            with at("recovered"):
                return Recovered(read_metric(argument))
        if name == "kl" and argument in ({}, None):
            return KL()
    got = f"{show(value)}" if isinstance(value, str) else kind(value)
    raise SpecError(
        "",
        "expected LogProb(token), LogitDiff(a, b), KL(), Recovered(metric), or a dict with one of "
        f"{listed(_WORDS)}, got {got}",
    )


def check_logprobs_mode(mode: Any) -> None:
    """Check that an engine with this `logprobs_mode` returns log-probabilities."""
    if "logprobs" not in str(getattr(mode, "value", mode)):
        raise SpecError(
            "metric",
            f"needs log-probabilities, and this engine has logprobs_mode={mode!r}; start it with "
            '"raw_logprobs"',
        )


def _read_difference(value: object) -> LogitDiff:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        got = f"{len(value)} entries" if isinstance(value, (list, tuple)) else kind(value)
        raise SpecError("", f"expected two tokens, [a, b], got {got}")
    tokens = []
    for index, token in enumerate(value):
        with at(f"[{index}]"):
            tokens.append(_read_token(token))
    if tokens[0] == tokens[1]:
        raise SpecError("[1]", f"expected another token than the first, got {tokens[1]!r} for both")
    return LogitDiff(*tokens)


def _read_token(value: object) -> Token:
    if isinstance(value, str):
        if not value:
            raise SpecError("", "expected a token's text, got an empty one")
        return value
    token = read_int(value)
    if not 0 <= token < INT_LIMIT:
        raise SpecError("", f"expected token ids from 0, got {token}")
    return token


def _id(token: Token, id_of: Callable[[str], int]) -> int:
    return id_of(token) if isinstance(token, str) else token


def _known(token: Token) -> int:
    assert isinstance(token, int), "texts are replaced by ids before a run"
    return token
