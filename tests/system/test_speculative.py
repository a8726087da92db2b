"""With drafts, rejected rows never appear and accepted ones exactly once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import speculation
from support.compared import differences
from support.end_oracle import EndOracle
from support.engines import engine
from support.speculation import SCRIPTS, alone

SCRIPTED = [name for name, _, _ in SCRIPTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("speculative")


@pytest.fixture(scope="module")
def expected(tiny_llama: Path, folder: Path) -> Iterator[dict[str, Any]]:
    with engine(tiny_llama, **speculation.COMMON) as llm:
        found = alone(llm)
    torch.save(found, folder / "expected.pt")
    return found


@pytest.fixture(scope="module")
def ngram(tiny_llama: Path, folder: Path, expected: dict[str, Any]) -> dict[str, Any]:
    settings = {"truth": str(folder / "expected.pt")}
    # To compile the search for n-grams takes seven seconds; prompts are short.
    quick = {"NUMBA_DISABLE_JIT": "1"}
    return speculation.run(tiny_llama, folder / "ngram.pt", "ngram", settings, **quick)


@pytest.fixture(scope="module")
def draft(tiny_llama: Path, folder: Path) -> dict[str, Any]:
    return speculation.run(tiny_llama, folder / "draft.pt", "draft", {"streamed": True})


def test_the_cases_are_what_they_are_meant_to_be(expected):
    lengths = {name: len(one["generated"]) for name, one in expected.items()}
    assert lengths["one token"] == 1
    assert 2 < lengths["stopped"] < 30
    assert lengths["to the end"] == speculation.MAX_LEN - 13
    receipts = [one["receipt"] for one in expected.values() if one["receipt"] is not None]
    assert [receipt["status"] for receipt in receipts] == ["ok"] * (len(expected) - 1)
    assert len({tuple(one["generated"]) for one in expected.values()}) > 8
    marked = expected["between marks"]
    assert marked["generated"] == [11, 13, 17] * 5 + [11]
    (_, positions), *_ = marked["activations"].values()
    assert positions.tolist() == [14, 15, 20, 21, 26, 27]


@pytest.mark.parametrize("way", ["ngram", *SCRIPTED])
def test_with_ngrams_all_is_as_without_drafts(ngram, expected, way):
    accepted, rejected = ngram[way]["drafts"]
    assert accepted > 0 or "all wrong" in way
    assert rejected > 0
    assert "right" not in way or accepted > 20
    if "told late" in way:
        assert ngram[way]["late steps"] > 3
    assert differences(ngram[way]["results"], expected, 1e-4) == []


def test_biased_logits_are_those_of_transformers_for_every_draft(ngram, tiny_llama):
    oracle = EndOracle(tiny_llama, "llama")
    changes: dict[str, Any] = {
        "biased": lambda token, is_generated: speculation.FAVOURED,
        "biased generated": lambda token, is_generated: (
            {11: 60.0, 13: 90.0} if token == 11 and is_generated else {11: 60.0}
        ),
    }
    for way in ("ngram", *(way for way in SCRIPTED if way.startswith("some right"))):
        for name, change in changes.items():
            found = ngram[way]["results"][name]
            prompt, generated = found["prompt"], found["generated"]
            whole = [*prompt, *generated]
            logits = oracle.run(whole[:-1]).logits
            for at in range(len(prompt) - 1, len(whole) - 1):
                for token, value in change(whole[at], at >= len(prompt)).items():
                    logits[at, token] += value
            logits = logits[len(prompt) - 1 :]
            assert logits.argmax(-1).tolist() == generated
            if "logprobs" in found:
                mine = logits.log_softmax(-1).max(-1).values
                torch.testing.assert_close(found["logprobs"]["sampled"][0], mine, atol=1e-4, rtol=0)
        found = ngram[way]["results"]["logits"]
        logits = oracle.run([*found["prompt"], *found["generated"]][:-1]).logits
        values, positions = found["logits"]["values"]
        assert positions.tolist() == list(range(len(found["prompt"]) - 1, len(logits)))
        torch.testing.assert_close(values, logits[positions].topk(5).values, atol=1e-4, rtol=0)


def test_with_a_draft_model_all_is_as_without_drafts(draft, expected):
    accepted, rejected = draft["draft"]["drafts"]
    assert accepted > 20, "where nothing is edited the model drafts what it says itself"
    assert rejected > 5, "where something is, it does not"
    assert differences(draft["draft"]["results"], expected, 1e-4) == []


def test_scores_that_are_shown_meanwhile_are_never_those_of_a_rejected_draft(draft):
    shown = 0
    for name in ("probed", "last_row"):
        one = draft["draft"]["results"][name]
        for count, scores, _, _ in one["partial"]:
            known = len(one["prompt"]) + count - 1
            for probe, (values, positions, _) in (scores or {}).items():
                final, places, _ = one["probes"][probe]
                here = places < known
                if name == "probed":
                    assert positions.tolist() == places[here].tolist()
                    torch.testing.assert_close(values, final[here])
                    shown += len(values)
    assert shown > 10  # how many there are depends on timing


@pytest.mark.parametrize("way", SCRIPTED)
def test_rows_that_come_on_the_way_are_of_no_rejected_draft(ngram, expected, way):
    found = ngram[way]["pieces"]
    assert set(found) == set(expected)
    compared = 0
    for name, (pieces, status, is_alike, rows) in found.items():
        assert (status, is_alike) == ("ok", True), name
        assert pieces > 2 or len(expected[name]["generated"]) < 9
        for tap, (values, positions) in (expected[name]["activations"] or {}).items():
            mine, places = rows[tap]
            assert places.tolist() == list(range(len(places)))
            whole = mine[positions]
            if name == "norms":
                whole = whole.norm(dim=1, keepdim=True)
            elif name == "reduced":
                prompt = mine[: len(expected[name]["prompt"])]
                whole = torch.stack([prompt.mean(0), prompt.var(0, correction=0)])
            torch.testing.assert_close(whole, values, rtol=1e-4, atol=1e-4)
            compared += len(values)
    assert compared > 1000
