"""The main job, on an engine whose stream is known."""

import dataclasses
import io

import numpy as np
import pytest
import torch
from lab.report.fakes import FakeEngine, no_stage
from rich.console import Console
from support.undrawn import undrawn

from midstream.lab.demo import prompts
from midstream.lab.fit import Directions
from midstream.lab.report import ReportError, table
from midstream.lab.report.page import render
from midstream.lab.report.pairs import Pair
from midstream.lab.report.run import ReportPlan, _repetition, run
from midstream.lab.report.sections import layers_section

TOPICS = ["day", "night", "house", "river", "garden"]
WORDS = [("glad", "sad"), ("won", "lost"), ("saved", "died"), ("laughed", "wept")]
PAIRS = [
    Pair(f"In the {topic} we were {glad} .", f"In the {topic} we were {sad} .")
    for topic in TOPICS
    for glad, sad in WORDS
]
QUESTIONS = ["Hm ?", "And ?"]
PLAN = ReportPlan(
    model="fake",
    pairs=PAIRS,
    questions=QUESTIONS,
    classes=("glad", "sad"),
    shown_pair=10,
    scales=(1.0, -1.0),
    max_tokens=8,
)


@pytest.fixture
def engine():
    return FakeEngine()


def test_finds_the_layer_and_steers_along_its_direction(engine):
    result = run(engine, PLAN, no_stage)
    assert result.layer == result.best_layer == engine.layer
    assert result.scores[engine.layer].auc > 0.99
    pushes = [request.push for request in engine.batches[1] if request.push]
    assert {push.layer for push in pushes} == {engine.layer}
    cosine = torch.cosine_similarity(pushes[0].vector, engine.axis, dim=0)
    assert cosine > 0.95
    assert float(pushes[0].vector.norm()) == pytest.approx(result.gap_norm)


def test_everything_is_asked_in_three_batches_and_each_that_asks_has_its_receipt(engine):
    result = run(engine, PLAN, no_stage)
    captures, answers, readings = engine.batches
    assert len(captures) == 2 * len(PAIRS)
    assert [r.capture for r in captures].count("prompt") == 2
    assert [r.capture for r in captures].count("last_prompt") == len(captures) - 2
    scales = [r.push.scale if r.push else 0 for r in answers]
    assert scales == [-1.0, 0, 1.0] * 2
    assert [r.capture for r in answers] == ["generated"] * 3 + [None] * 3
    assert all(r.push is None and r.capture == "prompt" for r in readings)
    assert len(engine.scored) == len(readings) == len(answers)
    asked = [r for batch in engine.batches for r in batch if r.capture or r.push]
    assert [receipt.request for receipt in result.receipts] == [r.name for r in asked]
    assert len({receipt.request for receipt in result.receipts}) == len(asked)
    # All but one plain answer.
    assert len(asked) == sum(len(batch) for batch in engine.batches) - 1


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [([], None), ([1, 2], None), ([1, 2, 3], 0), ([1, 2] * 5, 6 / 8), ([7] * 6, 3 / 4)],
)
def test_repetition_is_the_share_of_runs_of_three_that_came_before(token_ids, expected):
    assert _repetition(token_ids) == expected


def test_the_file_to_download_has_the_direction_that_was_steered_with(engine, tmp_path):
    result = run(engine, PLAN, no_stage)
    (tmp_path / "x.safetensors").write_bytes(result.vectors)
    found = Directions.load(tmp_path / "x.safetensors")
    assert found.layers == (0, 1, 2, 3)
    (pushed, *_) = [request.push for request in engine.batches[1] if request.push]
    assert np.array_equal(found[engine.layer].vector, pushed.vector.numpy())
    assert found[engine.layer].score == result.scores[engine.layer]


def test_the_control_vector_has_the_directions_of_all_layers_but_the_first(engine, tmp_path):
    result = run(engine, PLAN, no_stage)
    assert result.gguf is not None
    (tmp_path / "x.gguf").write_bytes(result.gguf)
    (tmp_path / "x.safetensors").write_bytes(result.vectors)
    found, all_layers = (Directions.load(tmp_path / f"x.{end}") for end in ("gguf", "safetensors"))
    assert found.layers == (1, 2, 3)
    for layer in found.layers:
        assert np.array_equal(found[layer].vector, all_layers[layer].vector)


def test_a_text_that_is_too_long_is_refused_by_its_name(engine):
    pairs = [*PAIRS[:2], Pair("long " * 64, "short")]
    with pytest.raises(ReportError, match="pair 3, glad: 65 tokens, and the engine takes 64; use"):
        run(engine, dataclasses.replace(PLAN, pairs=pairs), no_stage)
    assert engine.batches == []


def test_answers_are_in_the_order_of_questions_and_strengths_and_scored_after_their_questions(
    engine,
):
    result = run(engine, PLAN, no_stage)
    assert result.scales == [-1.0, 0.0, 1.0]
    for question, prompt in zip(result.questions, QUESTIONS, strict=True):
        assert question.prompt == prompt
        moods = [answer.text.split()[2] for answer in question.answers]
        assert moods == ["sad", "calm", "glad"]
        readings = [answer.reading for answer in question.answers]
        assert readings == sorted(readings)
    text, prompt = engine.scored[0]
    assert engine.tokenizer.decode(prompt) == "<user> Hm ? <assistant>"
    assert engine.tokenizer.decode(text) == "I am sad <b>& so on</b>"
    assert result.questions[0].answers[0].logprob == -4.06
    assert result.means_of("logprob") == pytest.approx([-4.06] * 3)


def test_a_model_without_a_chat_template_is_asked_plainly(engine):
    engine.tokenizer.chat_template = ""
    run(engine, PLAN, no_stage)
    assert engine.tokenizer.decode(engine.batches[1][0].token_ids) == "Hm ?"


@pytest.mark.parametrize(("wanted", "steered"), [(0, 0), (3, 3), (-1, 3)])
def test_the_layer_can_be_chosen(engine, wanted, steered):
    result = run(engine, dataclasses.replace(PLAN, layer=wanted), no_stage)
    assert result.layer == steered
    assert result.best_layer == engine.layer
    with undrawn():
        assert f"Layer {steered} is the one steered below" in layers_section(result)


@pytest.mark.parametrize("wanted", [4, -5])
def test_a_layer_that_is_not_there_is_refused(engine, wanted):
    with pytest.raises(ReportError, match=f"--layer {wanted}: the model has layers 0 to 3"):
        run(engine, dataclasses.replace(PLAN, layer=wanted), no_stage)


def test_token_maps_show_the_pair_and_the_ends_of_the_scale(engine):
    plan = dataclasses.replace(PLAN, scales=(-2.0, -1.0, 1.0, 2.0))
    maps = run(engine, plan, no_stage).token_maps
    assert [m.tokens for m in maps[:2]] == [pair.split() for pair in PAIRS[10]]
    assert ["plain" in m.title or "2" in m.title for m in maps[2:]] == [True] * 3
    for m in maps:
        assert len(m.cosine) == len(m.projection) == 4
        assert {len(row) for row in m.cosine} == {len(m.tokens)}
        assert all(-1 <= value <= 1 for row in m.cosine for value in row)


def test_an_empty_answer_has_no_reading(engine):
    real = engine.run

    def silent(requests):  # type: ignore[no-untyped-def]
        replies = real(requests)
        if len(engine.batches) == 2:
            replies[0] = dataclasses.replace(replies[0], text="", token_ids=[], output_ids=[])
        return replies

    engine.run = silent  # type: ignore[method-assign]
    result = run(engine, PLAN, no_stage)
    assert result.questions[0].answers[0].reading is None
    assert result.questions[0].answers[0].logprob is None
    assert result.questions[0].answers[0].repetition is None
    assert result.questions[0].answers[1].reading is not None
    with undrawn():
        assert "(nothing)" in render(result)


def test_a_missing_receipt_is_an_error(engine):
    real = engine.run

    def silent(requests):  # type: ignore[no-untyped-def]
        return [dataclasses.replace(reply, receipt=None) for reply in real(requests)]

    engine.run = silent  # type: ignore[method-assign]
    with pytest.raises(
        ReportError, match="pair 1, glad: the request captures or steers, but has no receipt"
    ):
        run(engine, PLAN, no_stage)


@pytest.mark.parametrize("width", [60, 200])
def test_the_table_shows_every_answer_at_any_width(engine, width):
    console = Console(width=width, record=True, file=io.StringIO())
    result = run(engine, PLAN, no_stage)
    console.print(table.answers(result, width))
    shown = console.export_text()
    for words in ("Hm ?", "And ?", "−1", "plain", "+1", "I am sad <b>", "I am glad <b>"):
        assert words in shown
    assert "Mean reading by strength: −1: −" in shown


def test_the_demo_s_own_pairs_differ_and_are_whole_sentences():
    texts = [text for pair in prompts.PAIRS for text in pair]
    assert len(set(texts)) == len(texts) == 48
    assert all(text.endswith(".") for text in texts)
    assert len(prompts.PAIRS) > prompts.SHOWN_PAIR
