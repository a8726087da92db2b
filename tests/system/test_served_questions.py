"""Questions to a running server about rows that it keeps, and to an async engine, against
transformers with hooks.
"""

import asyncio

import pytest
import torch
from support import asking_model
from support.asking_model import Hooked, placing
from support.async_calls import results_of
from support.serving import NAME, command, running

from midstream import AsyncClient, Capture, Client
from midstream.client import ServerError
from midstream.errors import ReceiptError

LENGTH, FROM, INTO = 6, 3, 1
QUESTIONS = ["What is it thinking of?", "Who?", "Where, and when?"]
ASKED = {"model": NAME, "max_tokens": LENGTH, "logprobs": True, "ignore_eos": True,
         "return_token_ids": True}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return asking_model.make(tmp_path_factory.mktemp("asking"))


@pytest.fixture(scope="module")
def url(model, tmp_path_factory):
    options = ("--enable-prefix-caching", "--max-model-len=256")
    with running(command(model, *options), tmp_path_factory.mktemp("server")) as server:
        yield server.url


def assert_answer(answer, hooked, rows, question):
    ids = hooked.prompt(f"Layer: {FROM}\n{' ?' * len(rows)} \n{question}")
    where = ids.index(hooked.tokenizer.convert_tokens_to_ids(" ?"))
    tokens, scores = hooked.answer(ids, INTO, placing(rows, where), LENGTH)
    (choice,) = answer.raw["choices"]
    found = [step["logprob"] for step in choice["logprobs"]["content"]]
    assert found == pytest.approx(scores, rel=1e-3, abs=1e-3)
    assert choice["token_ids"] == tokens
    assert answer.receipt.status == "ok"
    assert answer.receipt.edited.expected == len(rows)


def test_a_server_answers_about_the_rows_of_a_handle_as_hooks_do(url, model):
    hooked = Hooked(model)
    subject = hooked.prompt("the parrot sleeps")
    rows = hooked.rows(subject, FROM)
    with Client(url) as client:
        kept = client.complete(
            subject, model=NAME, max_tokens=1, activations="keep",
            capture=Capture([FROM], positions="prompt"),
        )  # fmt: skip
        for answer, question in zip(
            client.ask(kept, QUESTIONS, FROM, **ASKED), QUESTIONS, strict=True
        ):
            assert_answer(answer, hooked, rows, question)
        some = client.ask(kept, QUESTIONS[0], FROM, positions=[7, 2], **ASKED)[0]
        assert_answer(some, hooked, rows[[7, 2]], QUESTIONS[0])
        (one,) = client.ask(kept, QUESTIONS[0], FROM, positions=4, **ASKED)
        assert_answer(one, hooked, rows[[4]], QUESTIONS[0])
        with pytest.raises(ReceiptError, match="1 rows were placed at 4 tokens"):
            client.ask(kept, QUESTIONS[0], FROM, positions=4, placeholder="wxyz", **ASKED)

        async def ask():
            async with AsyncClient(url) as other:
                return await other.ask(kept, QUESTIONS, FROM, **ASKED)

        for answer, question in zip(asyncio.run(ask()), QUESTIONS, strict=True):
            assert_answer(answer, hooked, rows, question)
        client.delete(kept.outputs[0].captured)
        with pytest.raises(ServerError, match="there are no rows"):
            client.ask(kept, QUESTIONS[0], FROM, positions=4, **ASKED)


def test_rows_of_a_handle_stay_on_the_device_and_are_freed_with_it(url, model):
    hooked = Hooked(model)
    subject = hooked.prompt("the parrot sleeps")
    rows = hooked.rows(subject, FROM)
    on_device = Capture([FROM], positions="prompt", reduce="device")
    plain = {"model": NAME, "max_tokens": 1}
    with Client(url) as client:
        kept = client.complete(subject, activations="keep", capture=on_device, **plain)
        for answer, question in zip(
            client.ask(kept, QUESTIONS, FROM, **ASKED), QUESTIONS, strict=True
        ):
            assert_answer(answer, hooked, rows, question)
        some = client.ask(kept, QUESTIONS[0], FROM, positions=[7, 2], **ASKED)[0]
        assert_answer(some, hooked, rows[[7, 2]], QUESTIONS[0])

        async def ask():
            async with AsyncClient(url) as other:
                return await other.ask(kept, QUESTIONS, FROM, **ASKED)

        for answer, question in zip(asyncio.run(ask()), QUESTIONS, strict=True):
            assert_answer(answer, hooked, rows, question)
        # A client has half of the room for 1024.
        many = Capture([FROM], positions="prompt", reduce="device")
        others = [
            client.complete(list(range(5, 205)), activations="keep", capture=many, **plain)
            for _ in range(2)
        ]
        full = r"200 rows are to stay on the device, and \d+ of the 512 of this client"
        with pytest.raises(ServerError, match=full) as caught:
            client.complete(list(range(200)), activations="keep", capture=many, **plain)
        assert caught.value.status == 503
        assert_answer(client.ask(kept, QUESTIONS[0], FROM, **ASKED)[0], hooked, rows, QUESTIONS[0])
        client.delete(kept.outputs[0].captured)
        client.delete(others[0].outputs[0].captured)
        with pytest.raises(ServerError, match="there are no rows"):
            client.ask(kept, QUESTIONS[0], FROM, positions=4, **ASKED)
        again = client.complete(subject, activations="keep", capture=on_device, **plain)
        assert_answer(client.ask(again, QUESTIONS[1], FROM, **ASKED)[0], hooked, rows, QUESTIONS[1])
        refused = {"capture": on_device, "activations": "inline", **plain}
        with pytest.raises(ServerError, match='expected "handle"'):
            client.complete(subject, **refused)


def test_an_async_engine_answers_questions_beside_other_requests_as_hooks_do(model, tmp_path):
    found, hooked = results_of("system.questions_async", model, tmp_path), Hooked(model)
    rows = hooked.rows(hooked.prompt("the parrot sleeps"), FROM)
    assert len(found["answers"]) == len(QUESTIONS)
    for (tokens, edited), question in zip(found["answers"], QUESTIONS, strict=True):
        ids = hooked.prompt(f"Layer: {FROM}\n{' ?' * len(rows)} \n{question}")
        where = ids.index(hooked.tokenizer.convert_tokens_to_ids(" ?"))
        assert tokens == hooked.answer(ids, INTO, placing(rows, where), LENGTH)[0]
        assert edited == len(rows)
    for ids, tokens in found["others"]:
        assert tokens == hooked.answer(ids, INTO, lambda h: torch.Tensor(), LENGTH)[0]
    assert found["refused"] == [
        "layers: ask() has no such argument",
        "into: layer 99 is out of range: the model has 4 layers, expected 0 to 3",
    ]
