"""The attributes that midstream sets on vLLM's objects."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Attribute(Generic[T]):
    """An attribute of an object that belongs to vLLM."""

    name: str

    def get(self, owner: Any) -> T | None:
        """Return the value; None if the owner has none."""
        value: T | None = getattr(owner, self.name, None)
        return value

    def set(self, owner: Any, value: T) -> None:
        setattr(owner, self.name, value)


# On an engine and its InputProcessor, in the front end's process: the engine's BaseFrontEnd.
FRONT_END: Attribute[Any] = Attribute("midstream_front_end")
# On an OutputProcessor, in the front end's process: the function that returns the list of delayed
# spans of a request, by vLLM's id.
SPANS_OF_REQUEST: Attribute[Any] = Attribute("midstream_spans_of_request")
# On a ModelRunnerOutput, from the worker to the engine core: why requests failed, by vLLM's id.
FAILURES: Attribute[dict[str, Any]] = Attribute("midstream_failures")
# On a ModelRunnerOutput, from the worker to the engine core: the step's StepScores.
STEP_SCORES: Attribute[Any] = Attribute("midstream_step_scores")
# On a Request in the engine core: as `Watched`, if its scores are evaluated.
WATCHED: Attribute[Any] = Attribute("midstream_watched")
# On a Request in the engine core: the RunningController of its controller.
CONTROLLED: Attribute[Any] = Attribute("midstream_controlled")
# On an EngineCore and its Scheduler: its declared controllers by name.
DECLARED: Attribute[dict[str, Any]] = Attribute("midstream_declared_controllers")
# On an EngineCore: changes of the workers' vectors that arrived and were not sent yet, in order.
VECTOR_UPDATES: Attribute[deque[Any]] = Attribute("midstream_vector_updates")
# On a Request in the engine core: of each of its kept scores, the number in `ScoredBlocks`.
SCORE_NUMBERS: Attribute[tuple[int, ...]] = Attribute("midstream_score_numbers")
# On a Request in the engine core: which scores the blocks that it fills have.
SCORES_FILLED: Attribute[Any] = Attribute("midstream_scores_filled")
# On a BlockPool: its ScoredBlocks, if the workers keep scores with its blocks.
SCORED_BLOCKS: Attribute[Any] = Attribute("midstream_scored_blocks")
# On a KVCacheManager: how often its prefix cache was reset, if the front end keeps rows.
RESETS: Attribute[int] = Attribute("midstream_resets")
# On a KVCacheManager: the WeightEpochs of its engine core.
WEIGHT_EPOCHS: Attribute[Any] = Attribute("midstream_weight_epochs")
# On a Request in the engine core: the key of the weights that its first block is hashed with.
WEIGHT_KEY: Attribute[str] = Attribute("midstream_weight_key")
# On a Scheduler: the executor of its engine core, by which workers learn of changed plans.
EXECUTOR: Attribute[Any] = Attribute("midstream_executor")
# On a Scheduler: by vLLM's id of requests that end with the next step, their stop reasons and
# whether they end with an error.
STOPS: Attribute[dict[str, tuple[str, bool]]] = Attribute("midstream_stops")
# On a vLLM Request in the engine core whose plan was changed: its ChangedKeys since.
CHANGED_KEYS: Attribute[Any] = Attribute("midstream_changed_keys")
# On a Request in the engine core: its sampling parameters, if no block has a key of their plan.
UNKEYED: Attribute[Any] = Attribute("midstream_unkeyed")
# On a vLLM worker: its WorkerEndpoint, which vLLM's `collective_rpc` calls by this name.
ENDPOINT: Attribute[Any] = Attribute("midstream_rpc")
# On a graph manager of vLLM's V2 model runner: its GraphSets.
GRAPHS: Attribute[Any] = Attribute("midstream_graphs")
