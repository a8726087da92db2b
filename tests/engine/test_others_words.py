"""Requests in other tools' words give the rows and tokens of the same requests in ours."""

from typing import Any

import numpy as np
import torch
from engine.asking import ask
from support.engines import generated, greedy
from support.others_words import lens_array

from midstream import Capture, Steer

PROMPT = [5, 6, 7, 8]
HIDDEN = 64
_RANDOM = np.random.default_rng(0)
V, W = (_RANDOM.standard_normal(HIDDEN).astype(np.float32) for _ in range(2))

THEIRS = {
    "apply_steering_vectors": [
        {"activations": lens_array([V, W]), "layer_indices": [0, 2], "scale": 3.0,
         "norm_match": True},
        {"activations": torch.tensor(np.stack([[V, W]])), "layer_indices": [1],
         "position_indices": [1, 5]},
    ],
    "output_residual_stream": True,
}  # fmt: skip
OURS = [
    Steer(V, 0, 3.0, norm="match"),
    Steer(W, 2, 3.0, norm="match"),
    Steer(V, 1, positions=1),
    Steer(W, 1, positions=5),
]


def run(llm: Any, extra_args: dict[str, Any] | None = None, **asked: Any) -> Any:
    params = greedy(6, detokenize=False, extra_args=extra_args)
    return ask(llm, PROMPT, params, **asked)


def test_their_words_give_the_rows_and_tokens_of_ours(llm: Any) -> None:
    plain, expected = run(llm), run(llm, edits=OURS, capture=Capture(layers="all"))
    found = run(llm, THEIRS)
    assert list(found.activations) == list(expected.activations)
    for tap in expected.activations:
        assert torch.equal(found.activations[tap], expected.activations[tap])
    assert generated(found) == generated(expected) != generated(plain)
    assert found.receipt.edited == expected.receipt.edited
    assert {name for name, _ in found.receipt.coming_from} == set(THEIRS)
    assert found.receipt.to_dict()["coming_from"] == dict(found.receipt.coming_from)
    assert expected.receipt.coming_from == ()
