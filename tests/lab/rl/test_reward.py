"""A probe's score as a reward: TRL's signatures, without TRL."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from midstream import Client, Probe
from midstream.errors import SpecError, UnsupportedError
from midstream.lab.rl import Rollout, probe_reward, rollout
from midstream.results.probe_scores import Probes
from midstream.results.receipt import Receipt, WeightVersion

PROBE = Probe(torch.ones(4), 1, name="kind", positions="generated")
SCORES = [[1.0, -2.0, 4.0], [0.5], [-1.0, -3.0]]


def reward_of(reduce="mean", scale=1.0, probe=PROBE):
    return probe_reward(SimpleNamespace(), probe, reduce, scale=scale)


def rewards(reward, scores=SCORES):
    fields = {"probe_scores": [{"kind": list(each)} for each in scores], "trainer_state": None}
    texts = ["a"] * len(scores)
    return reward(prompts=texts, completions=texts, completion_ids=[[1]] * len(scores), **fields)


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [
        ("mean", [1.0, 0.5, -2.0]),
        ("sum", [3.0, 0.5, -4.0]),
        ("max", [4.0, 0.5, -1.0]),
        ("min", [-2.0, 0.5, -3.0]),
        ("last", [4.0, 0.5, -3.0]),
        (lambda scores: float(np.median(scores)), [1.0, 0.5, -2.0]),
    ],
)
def test_a_reward_is_the_reduced_score_times_the_scale(reduce, expected):
    assert rewards(reward_of(reduce)) == pytest.approx(expected)
    assert rewards(reward_of(reduce, -2.0)) == pytest.approx([-2 * value for value in expected])


def test_trl_logs_a_reward_by_the_name_of_its_probe():
    assert reward_of().__name__ == "kind"


def test_a_completion_without_a_row_has_no_reward():
    assert rewards(reward_of(), [[1.0], []]) == [1.0, None]


def test_completions_that_were_sampled_otherwise_are_refused():
    reward = reward_of()
    for fields in ({}, {"probe_scores": [{"kind": [1.0]}]}):
        with pytest.raises(SpecError, match=r"rollout_func=reward\.rollout"):
            reward(prompts=["a", "b"], completions=["c", "d"], completion_ids=[[1], [2]], **fields)
    with pytest.raises(SpecError, match="no probe 'kind'"):
        reward(prompts=["a"], completions=["c"], probe_scores=[{"other": [1.0]}])


def test_what_cannot_be_reduced_is_refused():
    with pytest.raises(SpecError, match=r"reduce: expected a function or one of .*got 'median'"):
        reward_of("median")


def test_two_rewards_read_the_completions_of_one_rollout():
    first = reward_of()
    second = probe_reward(first.rollout, PROBE.replace(name="short"), "min")
    assert second.rollout is first.rollout
    probe_reward(first.rollout, PROBE, "max")  # the same probe, reduced otherwise
    with pytest.raises(SpecError, match="another probe is called kind"):
        probe_reward(first.rollout, PROBE.replace(bias=2.0))


class Tokenizer:
    def __call__(self, text):
        return {"input_ids": [ord(letter) for letter in text]}

    def apply_chat_template(self, messages, **options):
        assert options == {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
        return {"input_ids": [len(messages), 7]}


@dataclass
class State:
    """Of one run of a trainer."""

    global_step: int


def trainer_of(step=0, model=None, llm=None):
    args = SimpleNamespace(
        temperature=0.7, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0,
        max_completion_length=5,
    )  # fmt: skip
    return SimpleNamespace(
        args=args,
        processing_class=Tokenizer(),
        state=State(step),
        model=model,
        accelerator=SimpleNamespace(unwrap_model=lambda model: model),
        vllm_generation=SimpleNamespace(llm=llm),
    )


class Engine:
    """An engine of this process that returns two tokens, scored by their numbers."""

    def __init__(self):
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=None))
        self.loaded, self.asked = [], []

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights"
        self.loaded.append([name for name, _ in kwargs["weights_iterator"]])

    def generate(self, prompts, params, use_tqdm):
        self.asked.append((prompts, params))
        return [self.output(nth) for nth in range(len(prompts))]

    def output(self, nth):
        tokens = [nth, nth + 1]
        receipt = Receipt("r", 1, 2, (), None, weight_versions=(WeightVersion(len(self.loaded)),))
        completion = SimpleNamespace(
            token_ids=tokens,
            logprobs=[
                {token: SimpleNamespace(logprob=-float(token)), 99: None} for token in tokens
            ],
            probes=Probes(
                {"kind": torch.tensor([float(nth)])}, {"kind": torch.tensor([1])}, [1, *tokens]
            ),
            receipt=receipt,
            activations=f"rows of {nth}",
        )
        return SimpleNamespace(outputs=[completion])


def test_a_rollout_samples_one_completion_for_each_prompt_with_its_scores():
    engine = Engine()
    reward = probe_reward(engine, PROBE)
    model = torch.nn.Linear(2, 2)
    prompts = ["ab", [{"role": "user", "content": "x"}]]
    fields = reward.rollout(prompts, trainer_of(model=model))
    assert fields["prompt_ids"] == [[97, 98], [1, 7]]
    assert fields["completion_ids"] == [[0, 1], [1, 2]]
    assert fields["logprobs"] == [[0.0, -1.0], [-1.0, -2.0]]
    assert fields["probe_scores"] == [{"kind": [0.0]}, {"kind": [1.0]}]
    assert fields["weight_version"] == [1, 1]
    assert "activations" not in fields
    ((given, params),) = engine.asked
    assert given == [{"prompt_token_ids": [97, 98]}, {"prompt_token_ids": [1, 7]}]
    assert (params.temperature, params.max_tokens, params.logprobs) == (0.7, 5, 0)
    given_on = {name: fields[name] for name in ("probe_scores", "weight_version")}
    assert reward(prompts=prompts, completions=["c", "d"], **given_on) == [0.0, 1.0]


def test_the_trainers_weights_are_loaded_once_for_each_of_its_steps():
    engine = Engine()
    rollout_func = probe_reward(engine, PROBE).rollout
    model = torch.nn.Linear(2, 2)
    trainer = trainer_of(0, model)
    for step in (0, 0, 1, 1, 2):
        trainer.state.global_step = step
        rollout_func(["a"], trainer)
    assert engine.loaded == [["weight", "bias"]] * 3


def test_a_second_run_of_the_same_model_has_the_weights_of_the_first_one_loaded():
    engine = Engine()
    rollout_func = probe_reward(engine, PROBE).rollout
    model = torch.nn.Linear(2, 2)
    first = trainer_of(0, model)
    rollout_func(["a"], first)
    first.state.global_step = 1  # its last step, for which it samples nothing
    rollout_func(["a"], trainer_of(0, model))
    assert engine.loaded == [["weight", "bias"]] * 2


@pytest.mark.parametrize("assign", [False, True])
def test_weights_that_are_loaded_into_the_model_within_a_step_are_the_engines_too(assign):
    engine = Engine()
    rollout_func = probe_reward(engine, PROBE).rollout
    trainer = trainer_of(3, torch.nn.Linear(2, 2))
    best = torch.nn.Linear(2, 2).state_dict()
    rollout_func(["a"], trainer)
    # As by `load_best_model_at_end`, after which one evaluates once more.
    trainer.model.load_state_dict(best, assign=assign)
    for _ in range(2):
        rollout_func(["a"], trainer)
    assert engine.loaded == [["weight", "bias"]] * 2


def test_another_trainer_at_the_same_step_has_its_own_weights_loaded():
    engine = Engine()
    rollout_func = probe_reward(engine, PROBE).rollout
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False)
    one, other = trainer_of(0, first), trainer_of(0, second)
    for trainer in (one, one, other, one):
        rollout_func(["a"], trainer)
    assert engine.loaded == [["weight", "bias"], ["weight"], ["weight", "bias"]]


def test_trls_own_engine_is_used_as_trl_has_updated_it():
    engine = Engine()
    fields = probe_reward(None, PROBE).rollout(["a"], trainer_of(llm=engine))
    assert fields["completion_ids"] == [[0, 1]]
    assert engine.loaded == []


def test_rewards_of_rows_get_them_as_a_field():
    own = Rollout(Engine(), capture=[1], sampling={"temperature": 0.1, "seed": 3})
    fields = own(["a", "b"], trainer_of(model=torch.nn.Linear(1, 1)))
    assert fields["activations"] == ["rows of 0", "rows of 1"]
    ((_, params),) = own._engine.asked
    assert (params.temperature, params.seed) == (0.1, 3)


def test_weights_that_an_engine_cannot_get_are_refused():
    engine, model = Engine(), torch.nn.Linear(1, 1)
    model.peft_config = {}
    with pytest.raises(UnsupportedError, match="adapters"):
        rollout.load_weights(engine, model)
    engine.llm_engine.engine_core = SimpleNamespace()
    with pytest.raises(UnsupportedError, match="VLLM_ENABLE_V1_MULTIPROCESSING=0"):
        rollout.load_weights(engine, torch.nn.Linear(1, 1))


def test_completions_of_a_server_come_with_their_scores():
    httpx = pytest.importorskip("httpx")
    asked = []

    def answer(request):
        import json

        body = json.loads(request.content)
        asked.append(body)
        receipt = Receipt("r", 2, 2, (), None, weight_versions=(WeightVersion(4),)).to_dict()
        scores = {"kind": {"positions": [1], "token_ids": [5], "scores": [2.5]}}
        choices = [
            {
                "index": nth, "text": "x", "finish_reason": "length", "token_ids": [5, 6 + nth],
                "logprobs": {"token_logprobs": [-0.5, -0.25]},
                "midstream": {"probes": scores, "receipt": receipt},
            }
            for nth in (1, 0)
        ]  # fmt: skip
        return httpx.Response(200, json={"id": "r", "choices": choices})

    http = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://server")
    reward = probe_reward(Client(http=http), PROBE)
    fields = reward.rollout(["ab", "c"], trainer_of())
    assert fields["completion_ids"] == [[5, 6], [5, 7]]
    assert fields["logprobs"] == [[-0.5, -0.25]] * 2
    assert fields["weight_version"] == [4, 4]
    assert fields["probe_scores"] == [{"kind": [2.5]}] * 2
    (body,) = asked
    assert body["prompt"] == [[97, 98], [99]]
    assert (body["return_token_ids"], body["logprobs"], body["max_tokens"]) == (True, 0, 5)
