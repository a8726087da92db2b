"""What the hooks of both adapters make of the scheduler's decisions."""

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


NO_SESSION = SimpleNamespace(requests=NoRequests(), keeps_scores=False)
ONE_MODEL = SimpleNamespace(prepare=lambda: None, use=lambda _: None)


def schedule(**drafts):
    """A scheduler's decision in which these requests have so many drafted tokens."""
    tokens = {name: [-1] * count for name, count in drafts.items()}
    return SimpleNamespace(
        finished_req_ids=(), scheduled_new_reqs=(), scheduled_spec_decode_tokens=tokens
    )


@pytest.mark.parametrize(
    ("ahead", "steps", "expected"),
    [
        # A step's own drafts come after its first rows.
        (1, [{"a": 3}], None),
        (1, [{"a": 3}, {"b": 2}], [3, 0]),
        (1, [{"a": 3}, {"b": 2}, {}], [0, 2]),
        (1, [{"a": 3}, {"b": 2}, {}, {}], None),
        (2, [{"a": 3}, {"a": 1, "b": 2}, {}], [4, 2]),
        (0, [{"a": 3}, {"a": 3}], None),
    ],
)
def test_counts_may_be_too_high_by_the_drafts_of_the_steps_under_way(ahead, steps, expected):
    hooks = Hooks(NO_SESSION, ONE_MODEL, ahead)
    for drafts in steps:
        decision = schedule(**drafts)
        hooks.on_schedule(decision)
        for tokens in decision.scheduled_spec_decode_tokens.values():
            tokens.clear()  # as the runner trims them
    unknown = hooks.unknown_positions(["a", "b"], lambda: torch.arange(3))
    assert (None if unknown is None else unknown.slack().tolist()) == expected


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
        scheduler_config=SimpleNamespace(async_scheduling=is_async), max_concurrent_batches=batches
    )
    assert _ahead(config) == ahead
