"""Logits that are returned, and biases of logits, against the logits of transformers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.asking import ask_all
from engine.refusals import assert_refused
from support import tiny
from support.end_oracle import EndOracle
from support.engines import engine, generated, greedy
from support.inner_served import PROMPTS, ROOM, TIE, TOLERANCE, Served
from support.oracle_edits import At

from midstream import Attention, Bias, Capture, Gate, Logits, Steer, TokenIds
from midstream.errors import SpecError
from midstream.plan import Reading, TopKeys
from midstream.results.readouts.logits import LogitRows
from midstream.runtime.worker.readouts import logits as logits_module

SITES = ["resid_post", "final_norm", "logits", "rot_q"]
COUNT = 6
TOP = 12
# A request's edits; what is added to the logits of a position, by its index and its edited vector
# at `final_norm`; and the other edits.
Change = Callable[[int, int, torch.Tensor], dict[int, float]]
Asked = tuple[list[Any], Change, list[At]]


# gemma2 scales its embedding, and caps its logits.
@pytest.fixture(scope="module", params=["llama", "gemma2"])
def served(request: pytest.FixtureRequest, tiny_models: Path) -> Iterator[Served]:
    path = tiny.make(f"{request.param}-bias", tiny_models, tiny.MODELS[request.param])
    oracle = EndOracle(path, request.param)
    with engine(path, **ROOM, midstream={"sites": SITES}) as llm:
        yield Served(request.param, oracle, llm)


def cases(served: Served) -> list[Asked]:
    prompt = PROMPTS[0]
    norms = served.oracle.run(prompt).values["final_norm", 2]
    v = torch.randn(64, generator=torch.Generator().manual_seed(5))
    middle = float((norms @ v)[-1]) - 0.5
    read = Reading(v, site="final_norm")
    steer = At(Steer(v * 2, 1))
    first = served.oracle.generate(prompt, 1)[0]

    def always(at: int, token: int, h: torch.Tensor) -> dict[int, float]:
        return {7: 30.0}

    def soft(at: int, token: int, h: torch.Tensor) -> dict[int, float]:
        return {7: 20.0 * float(torch.sigmoid(0.3 * (h @ v - middle)))}

    last = len(prompt) - 1
    return [
        ([Bias({7: 30.0})], always, []),
        ([Bias({9: 4.0, 12: -3.5, first: -50.0}, positions="last_prompt")],
         lambda at, token, h: {9: 4.0, 12: -3.5, first: -50.0} if at == last else {}, []),
        ([Bias({11: 25.0}, phase="generated")],
         lambda at, token, h: {11: 25.0} if at > last else {}, []),
        ([Bias({11: 60.0}), Bias({13: 90.0}, TokenIds([11]), phase="generated")],
         lambda at, token, h: {11: 60.0} | ({13: 90.0} if token == 11 and at > last else {}), []),
        ([Bias({5: 20.0}), Bias({5: 20.0, 6: 39.0})], lambda at, token, h: {5: 40.0, 6: 39.0}, []),
        ([Gate(Bias({7: 30.0}), read, threshold=middle)],
         lambda at, token, h: {7: 30.0} if float(h @ v) > middle else {}, []),
        ([Gate(Bias({7: 20.0}), read, threshold=middle, sharpness=0.3)], soft, []),
        ([steer.edit, Bias({7: 30.0})], always, [steer]),
        ([], lambda at, token, h: {}, []),
    ]  # fmt: skip


def assert_biased(served: Served, prompt: list[int], output: Any, asked: Asked) -> None:
    """Each token is the most likely one of the edited logits, whose log probabilities came."""
    _, change, others = asked
    assert output.receipt.status == "ok", output.receipt
    for one in output.outputs:
        whole = [*prompt, *one.token_ids]
        seen = served.oracle.run(whole[:-1], others)
        for nth, token in enumerate(one.token_ids):
            at = len(prompt) - 1 + nth
            logits = seen.logits[at].clone()
            for chosen, value in change(at, whole[at], seen.values["final_norm", 2][at]).items():
                logits[chosen] += value
            assert float(logits.max() - logits[token]) <= TIE
            expected = logits.log_softmax(-1)
            for chosen, found in one.logprobs[nth].items():
                assert found.logprob == pytest.approx(float(expected[chosen]), abs=20 * TOLERANCE)


def check(served: Served) -> None:
    asked = cases(served)
    prompts = [PROMPTS[0]] * len(asked)
    params = greedy(COUNT, logprobs=TOP, detokenize=False)
    outputs = served.ask(prompts, params=params, capture=None,
                         edits=[one[0] or None for one in asked[:-1]] + [None])  # fmt: skip
    for prompt, output, one in zip(prompts, outputs, asked, strict=True):
        if one[0]:
            assert_biased(served, prompt, output, one)
    assert generated(outputs[0]) == [7] * COUNT
    assert generated(outputs[3]) == [11, 13, 11, 13, 11, 13]
    assert generated(outputs[-1]) == served.oracle.generate(PROMPTS[0], COUNT)
    edited = [output.receipt.edited for output in outputs[:-1]]
    assert [one.applied for one in edited[:4]] == [6, 1, 5, 9]
    assert all(one.applied == one.expected for one in edited)


def test_each_token_is_of_the_edited_logits_in_a_mixed_batch(served):
    check(served)


@pytest.mark.nightly
def test_compiled_too(tiny_models, tmp_path, monkeypatch):
    path = tiny.make("gemma2-bias", tiny_models, tiny.MODELS["gemma2"])
    oracle = EndOracle(path, "gemma2")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    with engine(path, enforce_eager=False, **ROOM, midstream={"sites": SITES}) as llm:
        served = Served("gemma2", oracle, llm)
        check(served)
        check_logits(served)


ONE = pytest.mark.parametrize("served", ["llama"], indirect=True)


@ONE
def test_a_prompts_log_probabilities_have_no_bias(served):
    params = greedy(2, logprobs=2, prompt_logprobs=3, detokenize=False)
    biased, plain = served.ask([PROMPTS[2]] * 2, params=params, capture=None,
                               edits=[[Bias({7: 30.0})], None])  # fmt: skip
    assert generated(biased) == [7, 7]
    for one, other in zip(biased.prompt_logprobs[1:], plain.prompt_logprobs[1:], strict=True):
        assert {key: each.logprob for key, each in one.items()} == pytest.approx(
            {key: each.logprob for key, each in other.items()}, abs=1e-5
        )


def assert_logits(rows: LogitRows, asked: Logits, expected: torch.Tensor) -> None:
    """Against the reference's logits, [T, vocabulary]."""
    mine = expected[rows.positions]
    every = mine.shape[1]
    assert rows.values.shape == rows.ids.shape
    assert rows.values.dtype == rows.logsumexp.dtype == torch.float32
    if asked.top:
        torch.testing.assert_close(rows.values, mine.topk(asked.top).values, atol=5e-4, rtol=1e-4)
    else:
        chosen = list(range(every)) if asked.tokens == "all" else list(asked.tokens)
        assert rows.ids.tolist() == [chosen] * len(mine)
    torch.testing.assert_close(rows.values, mine.gather(1, rows.ids), atol=5e-4, rtol=1e-4)
    torch.testing.assert_close(
        rows.logprobs, mine.log_softmax(-1).gather(1, rows.ids), atol=5e-4, rtol=1e-4
    )


LOGITS = [
    Logits(5),
    Logits(tokens=[150, 3, 7, 9, 8]),
    Logits(tokens="all"),
    Logits(tokens=42, positions=["last_prompt", "generated"]),
    Logits(top=190, positions=slice(2, 5)),
]


def check_logits(served: Served) -> None:
    """Of prompts of several steps, of generated tokens, beside vectors, attention and edits."""
    long = [(13 * nth) % 190 + 3 for nth in range(150)]
    steer = At(Steer(torch.linspace(-1, 1, 64), 1))
    prompts = [long, *PROMPTS, PROMPTS[0]]
    beside = [Capture([1], "resid_post"), Attention([1], reduce=TopKeys(3)), *[None] * 3]
    outputs = served.ask(
        prompts, 4,
        capture=[[one, other] if other else one for one, other in zip(LOGITS, beside, strict=True)],
        edits=[None, [steer.edit], [Bias({7: 90.0})], None, [steer.edit, Bias({9: 90.0})]],
    )  # fmt: skip
    for nth, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        assert output.receipt.status == "ok", output.receipt
        ats = [steer] if nth in (1, 4) else []
        seen = served.oracle.run([*prompt, *generated(output)][:-1], ats)
        assert_logits(output.logits, LOGITS[nth], seen.logits)
        assert output.logits.positions.tolist() == {
            3: list(range(len(prompt) - 1, len(prompt) + 3)), 4: [2, 3, 4]
        }.get(nth, list(range(len(prompt) + 3)))  # fmt: skip
        assert nth != 2 or generated(output) == [7] * 4
    assert set(outputs[0].activations) == {("resid_post", 1)}
    assert outputs[1].attention[1].values.shape == (len(PROMPTS[0]) + 3, 2, 3)
    assert not hasattr(outputs[2], "activations")
    assert not hasattr(outputs[2], "attention")


def test_logits_are_those_of_transformers_at_every_position(served, monkeypatch):
    check_logits(served)
    monkeypatch.setattr(logits_module, "MOST_BYTES", 4000)  # larger ones are put on the host
    check_logits(served)
    last = Logits(3, positions="last_prompt")
    (output,) = served.ask([PROMPTS[2] * 4], 1, capture=[last])
    assert_logits(output.logits, last, served.oracle.run(PROMPTS[2] * 4).logits)
    (again,) = served.ask([PROMPTS[2] * 4], 1, capture=[last])
    assert again.num_cached_tokens == 64
    assert_logits(again.logits, last, served.oracle.run(PROMPTS[2] * 4).logits)


@ONE
def test_logits_that_are_asked_for_together_are_each_requests_own(served):
    asked = [Logits(tokens=[3 + nth, 90 - nth, 150]) for nth in range(6)]
    prompts = [PROMPTS[nth % 3] for nth in range(6)]
    outputs = served.ask(prompts, 3, capture=[[one] for one in asked])
    for prompt, one, output in zip(prompts, asked, outputs, strict=True):
        seen = served.oracle.run([*prompt, *generated(output)][:-1])
        assert_logits(output.logits, one, seen.logits)
        again = LogitRows.from_json(output.logits.to_json())
        for name in ("values", "ids", "logsumexp", "positions"):
            assert torch.equal(getattr(again, name), getattr(output.logits, name))


@ONE
def test_what_cannot_be_is_refused(served, llm):
    ones = torch.ones(64)
    first = "no token is sampled from position 0"
    assert_refused(
        lambda edit: served.ask([PROMPTS[0]], 2, edits=edit, capture=None),
        [
            (Bias({7: 1.0}, positions="all"), "edits.positions", first),
            (Bias({7: 1.0}, positions=[3]), "edits.positions", "position 3 of a prompt of 9"),
            (Bias({7: 1.0}, TokenIds([5])), "edits.positions", first),
            (Bias({3: 1.0, 100_000: 1.0}), "edits.tokens", "there is no token 100000: the model"),
            (Gate(Bias({7: 1.0}), ones), "edits.probe", "missing `layer` and `site`"),
        ],
    )
    assert_refused(
        lambda capture: served.ask([PROMPTS[0]], 2, capture=[capture]),
        [
            (Logits(tokens=[3, 100_000]), "capture[0].tokens[1]", "there is no token 100000"),
            (Logits(500), "capture[0].top", "the model has 199 tokens"),
            ([Logits(2), Logits(3)], "capture[0][1]", "returns logits too"),
            (Logits(2, positions=9, phase="prompt"), "capture[0].positions", "9"),
        ],
    )
    with pytest.raises(SpecError, match="logits is not tapped; start the engine with"):
        ask_all(llm, [PROMPTS[0]], 1, edits=Bias({7: 1.0}))
