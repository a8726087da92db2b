"""The adapter of vLLM's V2 runner, which runs on GPUs alone, on vLLM's own batches."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from midstream.runtime.worker.model_runner import v2

batches = pytest.importorskip("vllm.v1.worker.gpu.input_batch")


class ModelState:
    """In place of vLLM's: what the runner calls with the inputs of a real batch."""

    def __init__(self):
        self.num_batches = 0

    def preprocess_state(self, batch):
        self.num_batches += 1
        return len(batch.req_ids)


class RecordingHooks:
    def __init__(self):
        self.calls, self.batches = [], []

    def on_schedule(self, output):
        self.calls.append(("scheduled", output))

    def before_forward(self, batch):
        self.calls.append("before")
        self.batches.append(batch)

    def after_forward(self):
        self.calls.append("after")

    def unknown_positions(self, request_ids, positions):
        return list(request_ids), positions()

    def drafts(self, request_ids):
        return np.zeros(len(request_ids), np.int64)

    def on_output(self, output):
        return output


class Runner:
    def __init__(self):
        self.model_state = ModelState()
        self.block_tables = SimpleNamespace(
            block_sizes=[16, 32], input_block_tables=[torch.zeros(2, 3), torch.ones(2, 3)]
        )

    def execute_model(self, scheduled, dummy_run=False):
        return None if dummy_run else self.model_state.preprocess_state(scheduled)

    def sample_tokens(self, grammar):
        return grammar


@pytest.fixture
def batch():
    """Three requests of 2, 3 and 3 tokens, in buffers for 16."""
    buffers = batches.InputBuffers(4, 16, torch.device("cpu"))
    made = batches.InputBatch.make_dummy(3, 8, buffers)
    made.input_ids.copy_(torch.arange(100, 108))
    made.positions.copy_(torch.arange(8))
    return dataclasses.replace(
        made,
        req_ids=["a", "b", "c"],
        input_ids=buffers.input_ids,
        positions=buffers.positions,
        num_scheduled_tokens=np.array([2, 3, 3, 0], np.int32),
        num_computed_tokens_np=np.array([7, 0, 32, 99], np.int32),
    )


def test_a_step_has_the_requests_of_the_batch_and_none_of_its_padding(batch):
    runner, hooks = Runner(), RecordingHooks()
    v2.attach(runner, hooks)
    assert runner.execute_model(batch) == 3, "what vLLM's own method gives"
    assert hooks.calls == [("scheduled", batch), "before", "after"]
    (step,) = hooks.batches
    assert list(step.request_ids) == ["a", "b", "c"]
    assert step.scheduled.tolist() == [2, 3, 3]
    assert step.computed.tolist() == [7, 0, 32]
    assert step.num_tokens == 8
    assert step.token_ids().tolist() == list(range(100, 108))
    names, positions = step.unknown
    assert names == ["a", "b", "c"]
    assert positions.tolist() == list(range(8))


def test_a_dummy_run_is_no_step_of_a_request(batch):
    runner, hooks = Runner(), RecordingHooks()
    v2.attach(runner, hooks)
    runner.execute_model(batch, dummy_run=True)
    assert hooks.calls == ["after"]


def test_the_state_stays_an_instance_of_its_class_whose_attributes_the_runner_writes(batch):
    runner = Runner()
    state = runner.model_state
    v2.attach(runner, RecordingHooks())
    assert runner.model_state is state
    assert isinstance(state, ModelState)
    runner.execute_model(batch)
    runner.model_state.num_batches += 1
    assert state.num_batches == 2


def test_blocks_are_those_of_the_group():
    runner = Runner()
    assert v2.block_size(runner, 1) == 32
    assert v2.block_table(runner, 1) is runner.block_tables.input_block_tables[1]
