"""Which steps ran on which weights, and what counts as a change of them."""

from types import SimpleNamespace

import pytest
import torch

from midstream.runtime.protocol.results import WeightState
from midstream.runtime.worker.model_runner.weight_changes import watch_weights
from midstream.runtime.worker.step.weight_states import MOST_STATES, WeightStates


def numbers(states, first, last):
    return [state.number for state in states.of_steps(first, last)]


def test_a_request_has_the_states_of_its_steps():
    states = WeightStates()
    for step in range(1, 11):
        if step in (4, 8):
            states.change()
            states.change()  # without a step in between: the same state
        states.begin_step(step)
    assert states.current.number == 2
    assert states.of_steps(1, 3) == []  # those of the start
    assert numbers(states, 1, 4) == [0, 1]
    assert numbers(states, 4, 7) == [1]
    assert numbers(states, 7, 8) == [1, 2]
    assert numbers(states, 2, 10) == [0, 1, 2]
    assert numbers(states, 11, 10) == [2]  # it ended before its first step


def test_the_next_step_runs_on_weights_that_have_changed_by_now():
    states = WeightStates()
    states.begin_step(1)
    states.change()
    assert states.current == WeightState(1)
    assert states.of_steps(1, 1) == []
    states.begin_step(2)
    assert states.current == WeightState(1)


def test_a_name_belongs_to_the_state_of_the_next_step():
    states = WeightStates()
    states.name("start")
    states.begin_step(1)
    assert states.of_steps(1, 1) == [WeightState(0, "start")]
    states.change()
    assert states.current == WeightState(1)
    states.name("one")
    states.name("one")
    states.begin_step(2)
    states.name("two")  # another name: other weights
    assert states.current == WeightState(2, "two")
    states.begin_step(3)
    assert states.of_steps(2, 3) == [WeightState(1, "one"), WeightState(2, "two")]


def test_as_many_states_are_told_apart_as_is_said():
    states = WeightStates()
    for step in range(1, MOST_STATES + 10):
        states.change()
        states.name(str(step))
        states.begin_step(step)
    assert len(states._begins) == MOST_STATES
    assert len(states._names) == MOST_STATES
    assert numbers(states, MOST_STATES + 9, MOST_STATES + 9) == [MOST_STATES + 9]
    assert len(states.of_steps(1, MOST_STATES + 9)) == MOST_STATES


class Model:
    def load_weights(self, weights):
        return set(weights)


class Adapters:
    def __init__(self):
        self.value = 1.0

    def _load_adapter(self, request):
        layers = [torch.full((2, 3), self.value, dtype=torch.bfloat16), None]
        layer = SimpleNamespace(lora_a=layers, lora_b=torch.ones(3, 2))
        return SimpleNamespace(loras={"model.layers.0": layer})


@pytest.fixture
def watched():
    model = Model()
    runner = SimpleNamespace(
        get_model=lambda: model,
        model=model,
        reload_weights=lambda **_: None,
        lora_manager=Adapters(),
    )
    worker = SimpleNamespace(
        model_runner=runner, sleep=lambda level=1: level, update_weights=lambda update_info: None
    )
    states, forgotten = WeightStates(), []
    watch_weights(worker, states, lambda: forgotten.append(states.current.number))
    return worker, states, forgotten


@pytest.mark.parametrize(
    ("change", "changes"),
    [
        (lambda worker: worker.model_runner.model.load_weights(["a"]), True),
        (lambda worker: worker.model_runner.reload_weights(is_checkpoint_format=False), True),
        (lambda worker: worker.update_weights(update_info={}), True),
        (lambda worker: worker.sleep(1), False),
        (lambda worker: worker.sleep(), False),
        (lambda worker: worker.sleep(level=2), True),
    ],
)
def test_what_writes_or_drops_weights_is_a_change(watched, change, changes):
    worker, states, forgotten = watched
    change(worker)
    assert states.current.number == len(forgotten) == int(changes)


def test_an_adapter_counts_if_its_name_had_other_weights(watched):
    worker, states, _ = watched
    adapters = worker.model_runner.lora_manager
    request = SimpleNamespace(lora_name="a", lora_int_id=7)
    for value, name, number in [
        (1.0, "a", 0),
        (1.0, "a", 0),  # evicted, and loaded again
        (2.0, "b", 0),  # the first of its name
        (2.0, "a", 1),
        (2.0, "a", 1),
    ]:
        adapters.value, request.lora_name = value, name
        adapters._load_adapter(request)
        assert states.current.number == number
    assert states.loads == {7: 5}
