"""Rewards of completions from the scores of a probe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from midstream.errors import SpecError
from midstream.lab.rl.rollout import SCORES, Rollout
from midstream.plan import Probe
from midstream.validation import listed, show

Scores = NDArray[np.float32]
Reduce = Callable[[Scores], float]

_REDUCTIONS: Mapping[str, Reduce] = {
    "mean": lambda scores: float(scores.mean(dtype=np.float64)),
    "sum": lambda scores: float(scores.sum(dtype=np.float64)),
    "max": lambda scores: float(scores.max()),
    "min": lambda scores: float(scores.min()),
    "last": lambda scores: float(scores[-1]),
}


class ProbeReward:
    """A reward function of TRL's `GRPOTrainer`; see `probe_reward`.

    Attributes:
        rollout: the trainer's `rollout_func`, which samples completions with the probe.
    """

    def __init__(self, rollout: Rollout, probe: Probe, reduce: Reduce, scale: float) -> None:
        self.rollout = rollout
        self.__name__ = probe.name  # by which TRL logs its mean
        self._reduce, self._scale = reduce, scale
        rollout.add(probe)

    def __call__(
        self, prompts: Any, completions: Any, completion_ids: Any = None, **fields: Any
    ) -> list[float | None]:
        """Return the reward of each completion; None, of which TRL makes no reward, if the probe
        selects none of its rows.

        Raises:
            SpecError: the completions were not sampled by `rollout`.
        """
        scores = fields.get(SCORES)
        if scores is None or len(scores) != len(completions):
            raise SpecError(
                "rollout_func",
                "these completions have no scores: give the trainer rollout_func=reward.rollout, "
                "of each of its rewards the same",
            )
        return [self._reward(of_probes) for of_probes in scores]

    def _reward(self, of_probes: Mapping[str, Sequence[Any]]) -> float | None:
        if self.__name__ not in of_probes:
            raise SpecError("rollout_func", f"no probe {show(self.__name__)} was read by it")
        scores = np.asarray(of_probes[self.__name__], np.float32)
        return self._scale * float(self._reduce(scores)) if len(scores) else None


def probe_reward(
    engine: Any, probe: Probe, reduce: str | Reduce = "mean", *, scale: float = 1.0
) -> ProbeReward:
    """Return a reward function of TRL's `GRPOTrainer`: scale · reduce(scores of the probe).

    The scores are of the rows of the policy's own forward pass, in which the completion was
    sampled. No second one is run: the trainer samples with `rollout_func=reward.rollout`. A
    probe's `positions="generated"` leave the prompt out. The last sampled token is never computed
    on, so it has no score.

    Args:
        engine: a `midstream.LLM` or `vllm.LLM` of this process, a `midstream.Client` of a server
            that TRL updates (`vllm_mode="server"`), or None: the engine that the trainer starts
            itself (`vllm_mode="colocate"`, with `MIDSTREAM=1` in the environment). The `rollout` of
            another reward: both read the same completions.
        probe: a probe with one output and a name.
        reduce: "mean", "sum", "max", "min" or "last" of a completion's scores, or a function of
            these, float32 [rows], to a number.
        scale: factor on it; −1 for what the policy is to avoid.

    Raises:
        SpecError: the probe has classes, or there is no such reduction.
    """
    if probe.classes is not None and not callable(reduce):
        raise SpecError("reduce", "expected a function of [rows, classes]: the probe has classes")
    if not callable(reduce) and reduce not in _REDUCTIONS:
        names = listed(tuple(_REDUCTIONS))
        raise SpecError("reduce", f"expected a function or one of {names}, got {show(reduce)}")
    rollout = engine if isinstance(engine, Rollout) else Rollout(engine)
    return ProbeReward(rollout, probe, reduce if callable(reduce) else _REDUCTIONS[reduce], scale)
