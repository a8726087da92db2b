"""Rows of an edit go to the positions as these are listed."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engine.asking import ask_all
from support.engines import greedy, tokens
from support.oracle_edits import At, row_error

from midstream import Capture, Gate, Probe, Replace, Steer, Window, stack
from midstream.plan import Reading

WIDTH = 64
PROMPT = [(17 * nth) % 180 + 5 for nth in range(11)]
LONG = [(13 * nth) % 180 + 5 for nth in range(150)]  # three steps of the engine
NEW = 4


def rows_of(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def one_by_one(kind: Any, rows: torch.Tensor, listed: Sequence[int], layer: int) -> list[At]:
    """An edit for each position, of one row."""
    name = "rows" if kind is Replace else "vector"
    return [
        At(kind(**{name: row}, layer=layer), lambda at, here=here: at == here)
        for row, here in zip(rows, listed, strict=True)
    ]


@pytest.mark.parametrize(
    ("prompt", "positions", "listed"),
    [
        (PROMPT, [5, 2], [5, 2]),
        (PROMPT, [-1, 0, -3], [10, 0, 8]),
        (PROMPT, [range(6, 8), 9, slice(1, 3)], [6, 7, 9, 1, 2]),
        (PROMPT, [Window(0, 2), 3], [11, 12, 3]),
        (LONG, [140, 3, 70, 69], [140, 3, 70, 69]),
    ],
)
@pytest.mark.parametrize("kind", [Replace, Steer])
def test_the_kth_row_is_at_the_kth_listed_position(llm, oracle, kind, prompt, positions, listed):
    rows = rows_of(len(listed), seed=len(prompt) + len(listed))
    edit = kind(layer=1, positions=positions, rows=rows)
    opened = Gate(edit, Reading(torch.ones(WIDTH)), threshold=-1e6)
    for edits in (edit, opened):
        (output,) = ask_all(llm, [prompt], NEW, capture=Capture([1, 2]), edits=edits)
        assert output.receipt.status == "ok"
        whole = [*prompt, *output.outputs[0].token_ids[:-1]]
        wanted = oracle.run(whole, one_by_one(kind, rows, listed, 1))
        found = output.activations
        assert max(row_error(found[tap], wanted.values[tap]) for tap in found) < 2e-4
        other = oracle.run(whole, one_by_one(kind, rows, sorted(listed), 1))
        assert row_error(found["resid_post", 1], other.values["resid_post", 1]) > 0.1


def test_a_shuffled_call_has_shuffled_outputs(llm):
    prompts = [PROMPT, PROMPT[:5], LONG, PROMPT[3:]]
    rows = rows_of(len(prompts), seed=9)
    asked = [
        {
            "sampling_params": greedy(2 + nth),
            "capture": Capture([nth % 3], positions=slice(nth, None)),
            "edits": [Steer(rows[nth], 1)],
            "probes": [Probe(rows[nth], 2, name="p")],
        }
        for nth in range(len(prompts))
    ]

    def call(order: list[int]) -> list[Any]:
        lists = {name: [asked[nth][name] for nth in order] for name in asked[0]}
        return llm.generate([tokens(prompts[nth]) for nth in order], use_tqdm=False, **lists)

    plain = call([0, 1, 2, 3])
    for nth, output in zip([2, 0, 3, 1], call([2, 0, 3, 1]), strict=True):
        assert output.prompt_token_ids == prompts[nth]
        assert output.outputs[0].token_ids == plain[nth].outputs[0].token_ids
        assert len(output.outputs[0].token_ids) == 2 + nth
        assert list(output.activations) == [("resid_post", nth % 3)]
        torch.testing.assert_close(
            output.activations["resid_post", nth % 3], plain[nth].activations["resid_post", nth % 3]
        )
        torch.testing.assert_close(output.probes["p"], plain[nth].probes["p"])


def test_scores_are_those_of_their_texts(llm):
    texts, prompts = [[9, 4, 7], [8], [3, 3, 5, 6]], [[5, 17], [33, 101, 8], [77]]
    edits = [[Steer(row, 1)] for row in rows_of(3, seed=4)]
    plain = llm.score(texts, prompts, edits=edits)
    order = [2, 0, 1]
    found = llm.score(*([each[nth] for nth in order] for each in (texts, prompts)),
                      edits=[edits[nth] for nth in order])  # fmt: skip
    for nth, one in zip(order, found, strict=True):
        assert list(one.token_ids) == texts[nth]
        assert one.logprobs == pytest.approx(plain[nth].logprobs, abs=1e-5)


def test_outputs_are_stacked_in_the_order_of_the_list(llm):
    outputs = ask_all(
        llm, [PROMPT[nth:] for nth in range(3)], 1, capture=Capture([1], positions="last_prompt")
    )
    rows = [output.activations["resid_post", 1][0] for output in outputs]
    found = stack([outputs[nth] for nth in (2, 0, 1)], row=-1)
    torch.testing.assert_close(found.reshape(3, WIDTH), torch.stack([rows[2], rows[0], rows[1]]))
