"""What the hooks of both adapters make of the scheduler's decisions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from midstream.runtime.worker.assembly import _ahead
from midstream.runtime.worker.model_runner.hooks import Hooks


class NoRequests:
    """The request table of a worker without requests."""

    def finish(self, request_ids):
        assert not request_ids

    def pop_nonfinite(self, request_ids):
        return set(request_ids)


NO_SESSION = SimpleNamespace(requests=NoRequests())
ONE_MODEL = SimpleNamespace(prepare=lambda: None, use=lambda _: None)


def schedule(**drafts):
    """A scheduler's decision in which these requests have so many drafted tokens."""
    tokens = {name: [-1] * count for name, count in drafts.items()}
    return SimpleNamespace(
        finished_req_ids=(), scheduled_new_reqs=(), scheduled_spec_decode_tokens=tokens
    )


def slack(hooks, *ids):
    unknown = hooks.unknown_positions(ids, lambda: torch.arange(3))
    return None if unknown is None else unknown.slack().tolist()


def test_counts_may_be_too_high_by_the_drafts_of_the_step_before():
    hooks = Hooks(NO_SESSION, ONE_MODEL, 1)
    hooks.on_schedule(schedule(a=3))
    assert slack(hooks, "a", "b") is None, "this step's own drafts come after its first rows"
    hooks.on_schedule(schedule(b=2))
    assert slack(hooks, "b", "a") == [0, 3]
    hooks.on_schedule(schedule())
    assert slack(hooks, "b", "a") == [2, 0]
    hooks.on_schedule(schedule())
    assert slack(hooks, "b", "a") is None


def test_counts_may_be_too_high_by_the_drafts_of_every_step_that_is_under_way():
    hooks = Hooks(NO_SESSION, ONE_MODEL, 2)
    for drafts in ({"a": 3}, {"a": 1, "b": 2}, {}):
        hooks.on_schedule(schedule(**drafts))
    assert slack(hooks, "a", "b", "c") == [4, 2, 0]


def test_the_drafts_are_counted_before_the_runner_trims_them():
    hooks = Hooks(NO_SESSION, ONE_MODEL, 1)
    decision = schedule(a=3)
    hooks.on_schedule(decision)
    decision.scheduled_spec_decode_tokens["a"].clear()
    hooks.on_schedule(schedule())
    assert slack(hooks, "a") == [3]


def test_where_no_step_is_scheduled_ahead_counts_are_exact():
    hooks = Hooks(NO_SESSION, ONE_MODEL, 0)
    for _ in range(3):
        hooks.on_schedule(schedule(a=3))
        assert slack(hooks, "a") is None


def test_positions_are_those_that_the_adapter_gives():
    hooks = Hooks(NO_SESSION, ONE_MODEL, 1)
    hooks.on_schedule(schedule(a=3))
    hooks.on_schedule(schedule())
    assert hooks.unknown_positions(["a"], lambda: torch.arange(3)).positions().tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("is_async", "batches", "ahead"), [(False, 1, 0), (False, 4, 0), (True, 2, 1), (True, 5, 4)]
)
def test_the_scheduler_is_ahead_by_the_steps_under_way_if_it_does_not_wait(
    is_async, batches, ahead
):
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=is_async),
        max_concurrent_batches=batches,
    )
    assert _ahead(config) == ahead
