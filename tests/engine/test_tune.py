"""Scores of texts, and layers and strengths of a direction, against transformers in float32."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine.asking import ask_all
from matplotlib.figure import Figure
from support.engines import HAS_GPU, engine, greedy
from support.oracle_edits import PLACES, At, EditOracle
from unit.viz.drawn import read, same
from vllm import SamplingParams

from midstream import Directions, Logits, Steer
from midstream.errors import SpecError
from midstream.lab.fit import MaxKL, MaxPerplexity, Tuning
from midstream.lab.fit.tune import Tune, read_tune
from midstream.plan.shape import ModelShape

TOLERANCE = 5e-3 if HAS_GPU else 1e-4
CHAT = [[{"role": "user", "content": "Hi"}]]
GLAD = [f"We won {what} and laughed" for what in ("gold", "a cup", "it all", "again", "here")]
SAD = [f"We lost {what} and wept" for what in ("gold", "a cup", "it all", "again", "here")]
PROMPTS = ["My day:", "The road", [5, 6, 7, 8]]
SCALES = (0.0, 1.5, -2.0)


@pytest.fixture(scope="module")
def oracle(talking_llama: Path) -> EditOracle:
    return EditOracle(talking_llama, PLACES["llama"])


@pytest.fixture(scope="module")
def talking(talking_llama: Path) -> Iterator[Any]:
    sites = {"sites": ["resid_pre", "resid_post", "final_norm"]}
    with engine(
        talking_llama, midstream=sites, max_num_batched_tokens=256, max_num_seqs=32, block_size=32,
        enable_prefix_caching=True,
    ) as llm:  # fmt: skip
        yield llm


@pytest.fixture(scope="module")
def directions(talking: Any) -> Directions:
    return Directions.fit(talking, GLAD, SAD)


def encode(llm: Any, text: Any) -> list[int]:
    return list(text) if isinstance(text, list) else llm.get_tokenizer()(text)["input_ids"]


def logprobs(oracle: EditOracle, ids: list[int], start: int, edits: Any = ()) -> np.ndarray:
    """Natural logarithm of the probability of each token from `start`, float64."""
    logits = oracle.run(ids, edits).logits.double()
    found = torch.log_softmax(logits, -1)[range(start - 1, len(ids) - 1), ids[start:]]
    return found.numpy()


def test_scores_of_texts_are_transformers_log_softmax(talking, oracle):
    texts = ["The cat", "A longer text, of many bytes." * 3, [4, 5, 6]]
    edit = Steer(torch.ones(64), 1, 2.0)
    for edits, theirs in ((None, ()), (edit, [At(edit)])):
        for _ in range(2):
            found = talking.score(texts, edits=edits)
            for text, score in zip(texts, found, strict=True):
                ids = encode(talking, text)
                wanted = logprobs(oracle, ids, 1, theirs)
                assert score.token_ids == tuple(ids[1:])
                assert np.abs(score.logprobs - wanted).max() <= TOLERANCE
                assert score.total == pytest.approx(wanted.sum(), abs=TOLERANCE * len(ids))
                assert score.perplexity == pytest.approx(math.exp(-wanted.mean()), rel=1e-3)
    plain, steered = talking.score(["The cat"] * 2, edits=[None, [edit]])
    assert plain.total != steered.total


def test_a_text_after_a_prompt_is_scored_alone(talking, oracle):
    tokenizer = talking.get_tokenizer()
    texts, prompts = [" yes", " no, never", [9]], ["Is it so?", [3, 4, 5], "x"]
    found = talking.score(texts, prompts)
    for text, prompt, score in zip(texts, prompts, found, strict=True):
        before, after = encode(talking, prompt), encode(talking, text)
        assert score.token_ids == tuple(after)
        wanted = logprobs(oracle, before + after, len(before))
        assert np.abs(score.logprobs - wanted).max() <= TOLERANCE
    (score,) = talking.score(["Yes"], CHAT)
    shown = tokenizer.apply_chat_template(CHAT[0], tokenize=False, add_generation_prompt=True)
    before, after = encode(talking, shown), encode(talking, "Yes")
    assert np.abs(score.logprobs - logprobs(oracle, before + after, len(before))).max() <= TOLERANCE


def test_texts_that_cannot_be_scored_are_rejected(talking):
    for given, match in (
        (("one",), "texts: expected a list of texts, got one"),
        (([],), "texts: expected at least one prompt"),
        (([[]],), r"texts\[0\]: expected at least one token"),
        ((["a", ""], ["b", "c"]), r"texts\[1\]: expected at least one token"),
        ((["a"], ["b", "c"]), "prompts: 2 for 1 texts"),
        ((["a", [0.5]], ["b", "c"]), r"texts\[1\]: expected a text, or a list of token ids"),
    ):
        with pytest.raises(SpecError, match=match):
            talking.score(*given)
    with pytest.raises(SpecError, match="edit: unknown argument"):
        talking.score(["ab"], edit=Steer(torch.ones(64), 1))
    with pytest.raises(SpecError, match="phase"):
        talking.score(["ab"], edits=Steer(torch.ones(64), 1, phase="generated"))


def one_cell(llm: Any, direction: Any, reading: Any, scale: float) -> tuple[float, float, float]:
    """Effect, perplexity and divergence of one cell, each answer by requests of its own."""
    effects, read, divergences = [], [], []
    for prompt in PROMPTS:
        ids = encode(llm, prompt)
        edits = direction.steer(scale) if scale else None
        steered = Logits(tokens="all", positions=[len(ids) - 1, len(ids)])
        (output,) = ask_all(llm, [ids], PARAMS, edits=edits, capture=steered)
        answer = list(output.outputs[0].token_ids)
        (plain,) = ask_all(
            llm,
            [ids + answer],
            1,
            capture=steered,
            probes=reading.probe(positions=slice(len(ids), len(ids + answer))),
        )
        effects.append(float(plain.probes["probe"].double().mean()))
        read.append(llm.score([answer], [ids])[0].logprobs)
        p, q = (torch.log_softmax(one.logits.values.double(), -1) for one in (output, plain))
        divergences.append((p.exp() * (p - q)).sum(-1).numpy())
    perplexity = math.exp(-np.concatenate(read).astype("f8").mean())
    return float(np.mean(effects)), perplexity, float(np.concatenate(divergences).mean())


PARAMS = greedy(5)


def test_the_grid_is_that_of_single_requests(talking, directions):
    calls = []
    generate = talking.generate
    talking.generate = lambda *args, **kwargs: calls.append(1) or generate(*args, **kwargs)
    try:
        found = talking.tune(
            directions, PROMPTS, [2, 0], SCALES, MaxKL(0.05, tokens=2), sampling_params=PARAMS
        )
    finally:
        del talking.generate
    assert len(calls) == 2
    assert (found.layers, found.scales) == ((2, 0), SCALES)
    reading = directions[directions.best_layer]
    plain = one_cell(talking, directions[0], reading, 0.0)
    assert found.plain_effect == pytest.approx(plain[0], abs=1e-3)
    assert found.plain_perplexity == pytest.approx(plain[1], rel=1e-3)
    for cell in found:
        wanted = one_cell(talking, directions[cell.layer], reading, cell.scale)
        assert cell.effect == pytest.approx(wanted[0], abs=1e-3)
        assert cell.perplexity == pytest.approx(wanted[1], rel=1e-3)
        assert cell.kl == pytest.approx(wanted[2], abs=1e-5, rel=1e-3)
        assert cell.holds == (wanted[2] <= 0.05)
        assert (cell.kl == pytest.approx(0, abs=1e-6)) == (cell.scale == 0)
        assert len(cell.answers) == len(PROMPTS)
    assert found[0, 0.0].answers == tuple(found.plain_answers)
    assert len({cell.answers for cell in found}) > 1


def test_the_effect_and_perplexity_are_transformers(talking, directions, oracle):
    found = talking.tune(directions[1], PROMPTS[:1], scales=[3.0], sampling_params=PARAMS)
    ids = encode(talking, PROMPTS[0])
    answer = oracle.generate(ids, 5, [At(directions[1].steer(3.0))])
    seen = oracle.run(ids + answer)
    rows = seen.values["resid_post", 1][len(ids) :].numpy()[None]
    cell = found[1, 3.0]
    wanted = directions.at(1).project(rows).mean()
    assert cell.effect == pytest.approx(wanted, abs=max(1, abs(wanted)) * TOLERANCE)
    likely = logprobs(oracle, ids + answer, len(ids)).mean()
    assert cell.perplexity == pytest.approx(math.exp(-likely), rel=1e-3)


def test_the_best_cell_has_the_largest_effect_for_which_the_guard_holds(talking, directions):
    every = talking.tune(directions, PROMPTS, "all", SCALES, sampling_params=PARAMS)
    assert every.kl is None
    assert every.best.effect == max(cell.effect for cell in every)
    ratio = 1 + 0.5 * (every.perplexity.max() / every.plain_perplexity - 1)
    few = talking.tune(
        directions, PROMPTS, "all", SCALES, MaxPerplexity(ratio), sampling_params=PARAMS
    )
    held = [cell for cell in few if cell.perplexity <= ratio * few.plain_perplexity]
    assert 0 < len(held) < len(list(few))
    assert few.best == max(held, key=lambda cell: cell.effect)
    table = few.to_pandas()
    assert list(table.columns) == ["layer", "scale", "effect", "perplexity", "kl", "holds"]
    assert table.holds.tolist() == [cell.holds for cell in few]
    np.testing.assert_array_equal(table.effect, few.effect.reshape(-1))
    assert "plain" in str(few)
    axes = Figure().subplots(1, 2)
    few.plot(axes)
    effect, perplexity = map(read, axes)
    same(effect.image, few.effect - few.plain_effect)
    same(perplexity.image, few.perplexity / few.plain_perplexity)
    assert effect.titles == ("scale", "layer")
    assert (effect.x, effect.y) == (["0", "1.5", "−2"], list(map(str, few.layers)))
    (place,) = (n for n, text in enumerate(effect.texts) if text.endswith("★"))
    assert list(few)[place] == few.best
    assert [text.endswith("×") for text in effect.texts] == (~few.holds).reshape(-1).tolist()
    assert effect.bar == "effect, less that of plain answers"


def test_an_effect_of_the_callers_own(talking, directions):
    found = talking.tune(
        directions, PROMPTS, 1, [2.0], effect=lambda output: len(output.outputs[0].text),
        sampling_params=PARAMS,
    )  # fmt: skip
    assert found.effect[0, 0] == np.mean([len(text) for text in found.answers[1, 2.0]])
    with pytest.raises(SpecError, match="holds nowhere"):
        _ = Tuning(**{**vars(found), "guard": MaxPerplexity(1.0), "plain_perplexity": 0.0}).best
    with pytest.raises(SpecError, match=r"expected a layer of \[1\] and a scale of \[2.0\]"):
        found[1, 3.0]


def test_what_cannot_be_tuned_is_rejected(talking, directions):
    outside = replace(directions, layers=(0, 1, 7))
    mlp = replace(directions, site="mlp_out")
    for given, match in (
        ({"scales": "2"}, "scales: expected a list of numbers, got `str`"),
        ({"scales": [1.0, 1.0]}, "scales: expected at least one number, each once"),
        ({"scales": [float("nan")]}, r"scales\[0\]: expected a finite number"),
        ({"layers": [7]}, r"^layers: expected one of \[0, 1, 2\], got 7"),
        ({"layers": "some"}, "layers: expected layers or"),
        ({"layers": []}, "layers: expected at least one layer"),
        ({"guard": 0.5}, "guard: expected MaxPerplexity, MaxKL or None, got `float`"),
        ({"effect": 3}, "effect: expected a function"),
        ({"effect": len, "read_layer": 1}, "read_layer: `effect` replaces what is read"),
        ({"read_layer": 9}, "^read_layer: expected one of"),
        ({"prompts": "one"}, "prompts: expected a list of prompts, got `str`"),
        ({"prompts": [[]]}, r"prompts\[0\]: expected at least one token"),
        ({"prompts": [list(range(3, 240))]}, r"prompts\[0\]: 237 tokens and max_tokens=32 leave"),
        ({"sampling_params": SamplingParams(n=2, max_tokens=4)}, "sampling_params: expected n=1"),
        ({"sampling_params": {}}, "sampling_params: expected one SamplingParams, got `dict`"),
        ({"positions": "lst"}, r"^positions.*: .*lst"),
        ({"directions": mlp}, "^layers: mlp_out at layer 0 is not tapped"),
        ({"directions": outside, "layers": 7}, "^layers: .*7"),
        ({"directions": {}}, "directions: expected Directions or a Direction, got `dict`"),
    ):
        with pytest.raises(SpecError, match=match):
            talking.tune(**{"directions": directions, "prompts": PROMPTS, **given})
    taps = [tap for tap in talking.info.shape.taps if tap[0] != "final_norm"]
    bare = SimpleNamespace(info=SimpleNamespace(shape=ModelShape(4, 64, taps)))
    with pytest.raises(SpecError, match="^guard: logits cannot be read: the engine taps neither"):
        read_tune(bare, Tune(directions, PROMPTS, None, [1.0], MaxKL(1)))
    for make, match in (
        (lambda: MaxPerplexity(0.9), "ratio: expected at least 1, got 0.9"),
        (lambda: MaxKL(-1), "nats: expected 0 or more, got -1"),
        (lambda: MaxKL(1, 0), "tokens: expected 1 to 64, got 0"),
    ):
        with pytest.raises(SpecError, match=match):
            make()
