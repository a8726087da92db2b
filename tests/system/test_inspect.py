"""Evaluations by Inspect: its models `midstream/MODEL` send plans, and logs have what came back."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog, read_eval_log
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import Score, accuracy, scorer
from support import serving, tiny
from support.compared import same_receipt
from support.serving import NAME, Running

import midstream.lab.harness.inspect_entry  # noqa: F401  (an installed package has an entry point)
from midstream import Client, Probe, Steer
from midstream.plan import Named
from midstream.results.serialization import unpack

U = torch.randn(tiny.HIDDEN, generator=torch.Generator().manual_seed(3)) * 4
NOWHERE = "http://127.0.0.1:9/v1"
QUESTIONS = ["How are you?", "Seven and two?"]
EDIT = {"op": "steer", "vector": {"name": "happy"}, "layer": 1, "scale": 2.0}
PROBE = {"direction": {"name": "happy"}, "layer": 1, "name": "mood"}


@pytest.fixture(scope="module")
def server(talking_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving.running(
        serving.command(talking_llama), tmp_path_factory.mktemp("inspect")
    ) as found:
        with Client(found.url) as client:
            client.vectors.register("happy", U)
        yield found


@scorer(metrics=[accuracy()])
def rows_of_the_handle(url: str = "") -> Any:
    """1 if the rows of the answer's handle can be fetched while the sample runs."""

    async def score(state: Any, target: Any) -> Score:
        handle = state.output.metadata["midstream"]["activations"]
        async with httpx.AsyncClient() as http:
            rows = unpack((await http.get(url + handle["url"])).content)
        return Score(value=int(list(rows) == [("resid_post", 1)]))

    return score


def run(
    server: Running, folder: Path, config: dict[str, Any] | None = None, **given: Any
) -> EvalLog:
    model = get_model(
        f"midstream/{NAME}",
        base_url=f"{server.url}/v1",
        memoize=False,
        config=GenerateConfig(max_tokens=6, temperature=0, max_retries=1, **(config or {})),
        **given,
    )
    scorers = [rows_of_the_handle(server.url)] if "capture" in given else None
    task = Task(dataset=[Sample(input=each) for each in QUESTIONS], scorer=scorers)
    [log] = eval(task, model=model, log_dir=str(folder), display="none")
    return read_eval_log(log.location)


def direct(server: Running, **given: Any) -> list[Any]:
    with Client(server.url) as client:
        return [
            client.chat(
                [{"role": "user", "content": each}],
                model=NAME, max_tokens=6, temperature=0, **given,
            )
            for each in QUESTIONS
        ]  # fmt: skip


def test_an_evaluation_is_steered_and_its_log_has_scores_receipts_and_handles(server, tmp_path):
    log = run(server, tmp_path, edits=[EDIT], probes=[PROBE], capture={"layers": [1]})
    assert log.status == "success", log.error
    expected = direct(
        server,
        edits=Steer(Named("happy"), 1, 2.0),
        probes=Probe(Named("happy"), 1, name="mood"),
    )
    plain = direct(server)
    assert log.samples is not None
    for sample, one, unsteered in zip(log.samples, expected, plain, strict=True):
        assert sample.output.completion == one.text != unsteered.text
        results = sample.output.metadata["midstream"]
        assert results["receipt"]["status"] == "ok"
        edited = {"edited": one.receipt.to_dict()["edited"]}
        assert same_receipt({"edited": results["receipt"]["edited"]}, edited, 1e-5)
        torch.testing.assert_close(torch.tensor(results["probes"]["mood"]["scores"]),
                                   torch.as_tensor(one.probes["mood"]))  # fmt: skip
        assert set(results["activations"]) >= {"id", "url", "bytes", "rows"}
        assert sample.scores["rows_of_the_handle"].value == 1
    text = Path(log.location.removeprefix("file://")).read_bytes()
    assert len(text) < 100_000


def test_the_configuration_of_a_call_replaces_the_plan_of_the_model(server, tmp_path):
    other = {**EDIT, "scale": -3.0}
    config = {"extra_body": {"midstream": {"edits": [other]}}}
    log = run(server, tmp_path, config, edits=[EDIT], probes=[PROBE])
    expected = direct(server, edits=Steer(Named("happy"), 1, -3.0))
    assert log.samples is not None
    assert [one.output.completion for one in log.samples] == [one.text for one in expected]
    assert "mood" in log.samples[0].output.metadata["midstream"]["probes"]


def test_a_wrong_argument_is_an_error_of_the_model():
    from inspect_ai._util.error import PrerequisiteError

    for given, message in (
        ({"edits": [{**EDIT, "vector": U.tolist()}]}, "a vector by value, which would be in the"),
        ({"edits": [{**EDIT, "skale": 1}]}, "skale"),
        ({"capture": {"layers": [1]}, "activations": "inline"}, "rows in the answer would be in"),
        ({"settings": {"sites": ["resid_post"]}}, "settings: a running server is used"),
        ({"enforce_eager": True}, "enforce_eager: a running server is used"),
    ):
        with pytest.raises(PrerequisiteError, match=message):
            get_model("midstream/x", base_url=NOWHERE, memoize=False, **given)


def test_a_plan_that_the_server_rejects_fails_the_evaluation_with_its_words(server, tmp_path):
    log = run(server, tmp_path, edits=[{**EDIT, "layer": 99}])
    assert log.status == "error"
    assert log.error is not None
    assert "layer 99 is out of range" in log.error.message


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests of models whose server knows nothing of midstream."""
    from inspect_ai.model import ModelOutput
    from inspect_ai.model._model_call import ModelCall
    from inspect_ai.model._providers.vllm import VLLMAPI

    found: list[Any] = []

    async def generate(api: Any, *asked: Any) -> Any:
        found.append((api, asked[-1]))
        answer = {"choices": [{"index": 0, "message": {"content": "plain"}}]}
        return ModelOutput.from_content("x", "plain"), ModelCall.create({}, answer)

    monkeypatch.setattr(VLLMAPI, "generate", generate)
    return found


def test_a_server_without_midstream_fails_the_evaluation(sent, tmp_path):
    model = get_model("midstream/x", base_url=NOWHERE, memoize=False, edits=[EDIT])
    task = Task(dataset=[Sample(input="x")])
    [log] = eval(task, model=model, log_dir=str(tmp_path), display="none")
    assert log.status == "error"
    assert log.error is not None
    assert "the server has ignored the plan" in log.error.message


def test_a_call_whose_arguments_ask_for_nothing_has_no_plan(sent):
    for given, body in (
        ({"edits": None}, None),
        ({}, {"midstream": None}),
        ({"edits": [EDIT]}, {"midstream": {"edits": None}}),
    ):
        config = GenerateConfig(extra_body=body)
        model = get_model("midstream/x", base_url=NOWHERE, memoize=False, config=config, **given)
        assert asyncio.run(model.generate("hi")).completion == "plain"
        api, asked = sent[-1]
        params = api.completion_params(asked, tools=False)
        assert "midstream" not in params.get("extra_body", {})


@pytest.mark.nightly
def test_a_model_without_a_server_starts_its_own(talking_llama, tmp_path):
    from safetensors.torch import save_file

    save_file({"1": U}, tmp_path / "happy.safetensors")
    model = get_model(
        f"midstream/{talking_llama}",
        memoize=False,
        config=GenerateConfig(max_tokens=6, temperature=0),
        settings={"vectors": {"happy": str(tmp_path / "happy.safetensors")}},
        edits=[EDIT],
        **serving.ENGINE,
    )
    task = Task(dataset=[Sample(input=each) for each in QUESTIONS])
    try:
        [log] = eval(task, model=model, log_dir=str(tmp_path), display="none")
    finally:
        model.api.close()  # or its server would outlive the tests
    assert log.status == "success", log.error
    assert log.samples is not None
    for sample in log.samples:
        assert sample.output.metadata["midstream"]["receipt"]["edited"]["applied"] > 0
