"""Vectors go to the workers once, ahead of the requests that name them; plans name them."""

import pickle
from typing import Any

import pytest
import torch
from support.engines import generated, greedy, tokens

from midstream import Steer
from midstream.errors import ReceiptError
from midstream.plan import Vector
from midstream.runtime.protocol.rpc import RPC, UpdateVectors, arguments_of, read_request
from midstream.runtime.protocol.vector_update import VectorUpdate

HIDDEN = 64
LAYERS = 3


class Messages:
    """What the engine core gives its executor: vectors, and sizes of steps' messages."""

    def __init__(self, executor: Any, patch: pytest.MonkeyPatch) -> None:
        self.updates: list[VectorUpdate] = []
        self.steps: list[bytes] = []
        call, execute = executor.collective_rpc, executor.execute_model

        def collective_rpc(method: Any, *args: Any, **kwargs: Any) -> Any:
            if method == RPC and "args" in kwargs:
                request = read_request(*kwargs["args"])
                if isinstance(request, UpdateVectors):
                    self.updates += request.updates
            return call(method, *args, **kwargs)

        def execute_model(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            new = [one.sampling_params for one in scheduled.scheduled_new_reqs]
            self.steps.append(pickle.dumps(new))
            return execute(scheduled, *args, **kwargs)

        patch.setattr(executor, "collective_rpc", collective_rpc)
        patch.setattr(executor, "execute_model", execute_model)


@pytest.fixture
def messages(llm, monkeypatch):
    return Messages(llm.llm_engine.engine_core.engine_core.model_executor, monkeypatch)


def vector(nth: int) -> torch.Tensor:
    return torch.randn(HIDDEN, generator=torch.Generator().manual_seed(9000 + nth))


def data(nth: int) -> bytes:
    return vector(nth).numpy().tobytes()


def steer(nth: int) -> Steer:
    """A vector that many layers add: it is sent once."""
    return Steer(vector(nth), layer=list(range(LAYERS)), scale=3.0)


def ask(llm, edits, prompt=range(5, 60), max_tokens=6):
    """Outputs of one prompt with each of some edits, at once."""
    each = [one if one is None or isinstance(one, list) else [one] for one in edits]
    prompts = [tokens(prompt)] * len(edits)
    return llm.generate(prompts, greedy(max_tokens), edits=each, use_tqdm=False)


def added(messages: Messages) -> list[bytes]:
    found = [data for update in messages.updates for data in update.added]
    messages.updates.clear()
    return found


def test_vectors_are_sent_once_and_no_steps_message_has_their_numbers(llm, messages):
    edits = [steer(0), steer(1), None, steer(0)]
    expected = [generated(one) for one in ask(llm, edits)]
    assert added(messages) == [data(0), data(1)]
    assert [generated(one) for one in ask(llm, edits)] == expected
    ask(llm, edits, range(5, 90))
    assert added(messages) == []
    numbers = [data(nth)[at : at + 16] for nth in (0, 1) for at in (0, 100)]
    assert not [1 for step in messages.steps for part in numbers if part in step]
    assert max(len(step) for step in messages.steps) > 1000, "plans were in no message"


def test_a_request_whose_vectors_the_worker_lost_while_it_waited_fails_and_no_other(
    llm, monkeypatch
):
    edits = [steer(60), steer(61)]
    expected = [generated(one) for one in ask(llm, edits)]
    llm.reset_prefix_cache()
    digest = Vector(data(60)).digest
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    execute = executor.execute_model

    def forgetful(*args, **kwargs):
        monkeypatch.setattr(executor, "execute_model", execute)
        change(executor, VectorUpdate((digest,), ()))
        return execute(*args, **kwargs)

    monkeypatch.setattr(executor, "execute_model", forgetful)
    with pytest.raises(ReceiptError, match=f"no vector with the digest '{digest}'") as caught:
        ask(llm, edits)
    bad, good = caught.value.outputs
    assert (bad.outputs[0].finish_reason, bad.receipt.status) == ("error", "error")
    assert len(generated(bad)) <= 1
    assert generated(good) == expected[1]
    change(executor, VectorUpdate((), (data(60),)))
    llm.reset_prefix_cache()
    assert [generated(one) for one in ask(llm, edits)] == expected


def change(executor: Any, update: VectorUpdate) -> None:
    executor.collective_rpc(RPC, args=arguments_of(UpdateVectors([update])))
