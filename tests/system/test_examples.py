"""Each example runs and shows what it says, measured on what its direction was not made from."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [pytest.mark.engine, pytest.mark.model]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHARED = ("common", "prompts")
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in SHARED)


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[Any]:
    """One engine for all: each starts its own when it is run by hand."""
    from support import engines

    settings = {"max_model_len": 512, "midstream": {"sites": engines.ALL_SITES}}
    with engines.engine(smollm2, **settings) as found:
        yield found


@pytest.fixture
def run(llm: Any, smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(EXAMPLES)

    def run(name: str) -> dict[str, Any]:
        example = importlib.import_module(name)
        asked: list[Path] = []
        monkeypatch.setattr(example, "start", lambda model, sites=(): asked.append(model) or llm)
        found: dict[str, Any] = example.main(["--model", str(smollm2)])
        assert asked == [smollm2]
        return found

    yield run
    for name in (*SHARED, *NAMES):
        sys.modules.pop(name, None)


def test_every_example_is_run_here_and_listed_in_the_readme():
    assert NAMES == [
        "conditional_steering",
        "contrastive_steering",
        "live_lens",
        "paper_figures",
        "refusal_ablation",
        "sae_feature",
        "steering_client",  # in test_serving_docs.py
        "train_draft",  # in test_draft_head.py
    ]
    readme = (EXAMPLES / "README.md").read_text()
    assert [name for name in NAMES if f"]({name}.py)" not in readme] == []


def by_hand(name: str, model: Path) -> str:
    """What an example prints in a process of its own."""
    command = [sys.executable, str(EXAMPLES / name), "--model", str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly
def test_an_example_run_by_hand_prints_its_tables_and_nothing_else(smollm2: Path):
    printed = by_hand("contrastive_steering.py", smollm2)
    assert printed.startswith("Generated texts")
    assert "steering_module_ref=('cheerful', 1.0)" in printed
    assert [word for word in ("INFO", "WARNING", "Triton", "it/s") if word in printed] == []


@pytest.mark.nightly
def test_the_last_layer_of_the_live_table_says_what_the_model_writes(smollm2: Path):
    printed = by_hand("live_lens.py", smollm2)
    assert "The capital of France is" in printed
    assert "\n 29 " in printed


@pytest.mark.nightly
def test_ablating_the_direction_ends_the_refusals(run: Any):
    found = run("refusal_ablation")
    assert found["refusals_before"] >= 0.8
    assert found["refusals_after"] <= 0.2
    assert found["log_odds_after"] < found["log_odds_before"] - 1.5
    assert found["projection_before"] > 5
    assert found["projection_after"] < 1e-2


@pytest.mark.nightly
def test_the_mood_rises_with_the_scale(run: Any):
    found = run("contrastive_steering")
    moods = found["moods"]
    assert moods == sorted(moods)
    assert moods[0] < 0 < moods[-1]
    assert moods[-1] - moods[0] > 4
    assert found["by_params"] == pytest.approx(moods[-1], abs=1e-3)


@pytest.mark.nightly
def test_the_figures_of_a_paper_are_a_column_wide_and_have_the_numbers_of_transformers(
    run: Any, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    found = run("paper_figures")
    pdf = found["path"].read_bytes()
    assert found["path"] == tmp_path / "figures.pdf"
    assert pdf.count(b"/MediaBox [ 0 0 237.6 165.6 ]") == 3  # 3.3 inches
    assert b"/FontFile2" in pdf  # text is text, of fonts in the file
    assert b"/Type3" not in pdf
    assert (tmp_path / "figures.png").stat().st_size > 50_000
    # Norms: the hidden states of transformers, of which the last is after the final norm.
    example = importlib.import_module("paper_figures")
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    for name, prompt in example.PROMPTS.items():
        with torch.no_grad():
            states = model(**tokenizer(prompt, return_tensors="pt"), output_hidden_states=True)
        wanted = torch.stack(states.hidden_states[1:-1])[:, 0, 1:].norm(dim=-1).numpy()
        np.testing.assert_allclose(found["norms"][name][:-1], np.median(wanted, 1), rtol=1e-3)
    # Accuracy: guessing before the mood is read, and errors over the folds.
    for directions in found["fitted"].values():
        scores = [directions.scores[layer] for layer in directions.layers]
        assert scores[0].accuracy < 0.6 < 0.9 < max(score.accuracy for score in scores)
        assert any(score.accuracy_error > 0 for score in scores)
    for values in found["doses"].values():
        assert values.tolist() == sorted(values)
        assert values[example.SCALES.index(0)] == pytest.approx(found["doses"]["layer 8"][3])


@pytest.mark.nightly
def test_a_feature_of_cooking_is_found_and_held(run: Any):
    found = run("sae_feature")
    assert found["variance"] > 0.5
    food = ("garlic", "butter", "sugar", "onions", "pepper", "ginger", "eggs", "parsley", "flour")
    assert sum(word in found["words"] for word in food) >= 3, found["words"]
    assert found["values"][0] == 0
    assert max(found["off_by"]) < 1e-2
    assert found["preferences"] == sorted(found["preferences"])
    assert found["preferences"][-1] > found["preferences"][0] + 1


@pytest.mark.nightly
def test_only_questions_about_money_are_steered(run: Any):
    found = run("conditional_steering")
    assert min(found["money_scores"]) > 0 > max(found["other_scores"])
    assert sum(found["money_refused_before"]) == 0
    assert sum(found["money_refused"]) >= 3
    assert not any(found["other_changed"])
