"""Steer the mood of texts, with a vector from pairs of texts that differ only in mood.

Rimsky et al. 2024, "Steering Llama 2 via contrastive activation addition" (arXiv:2312.06681): the
mean difference between the two texts of a pair, at their last token, is added at one layer. Here
it is registered by name, and used with several scales.

    python examples/contrastive_steering.py [--model FOLDER]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from common import log_probs, model_from, show, start

from midstream import LLM, Capture, SamplingParams, Steer

LAYER = 18
SCALES = [-1.0, -0.5, 0.0, 0.5, 1.0]
PAIRS = [
    ("The food at this restaurant was", "delicious", "disgusting"),
    ("Our holiday by the sea was", "wonderful", "terrible"),
    ("The film that we saw was", "brilliant", "awful"),
    ("I must say that I", "love it", "hate it"),
    ("The weather today is", "lovely", "horrible"),
    ("My new job makes me", "happy", "miserable"),
    ("The staff at the hotel were", "friendly", "rude"),
    ("This book is", "a masterpiece", "a waste of time"),
]
OPENINGS = [
    "The concert last night was",
    "To be honest, the service here is",
    "I think that this song is",
    "Living in this city is",
]
GOOD = [" good", " great", " wonderful", " fun"]
BAD = [" bad", " terrible", " awful", " boring"]


def last_rows_of_texts(llm: LLM, texts: Sequence[str]) -> torch.Tensor:
    """Return the vectors of the texts' last tokens at LAYER, float32 [texts, width]."""
    outputs = llm.generate(
        texts,
        SamplingParams(max_tokens=1),
        capture=Capture(LAYER, positions="last_prompt"),
        use_tqdm=False,
    )
    return torch.cat([o.activations["resid_post", LAYER].float() for o in outputs])


def mood(llm: LLM, **wanted: Any) -> float:
    """Return log p(next word in GOOD) − log p(next word in BAD), mean over the openings."""
    found = log_probs(llm, OPENINGS, GOOD + BAD, **wanted)
    good, bad = (torch.stack([found[word] for word in words]) for words in (GOOD, BAD))
    return float((good.logsumexp(0) - bad.logsumexp(0)).mean())


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the example.

    Returns:
        `moods`: the log-odds at each of SCALES; `by_params`: the log-odds at the last of SCALES,
        steered by `SamplingParams(steering_module_ref=…)`.
    """
    llm = start(model_from(arguments, __doc__))

    positive = last_rows_of_texts(llm, [f"{text} {good}" for text, good, _ in PAIRS])
    negative = last_rows_of_texts(llm, [f"{text} {bad}" for text, _, bad in PAIRS])
    llm.vectors.register("cheerful", {LAYER: (positive - negative).mean(0)})

    # One call: each scale is a separate plan, and all share a batch.
    asked = [(scale, opening) for scale in SCALES for opening in OPENINGS[:2]]
    outputs = llm.generate(
        [opening for _, opening in asked],
        SamplingParams(temperature=0, max_tokens=16),
        steer=[[Steer("cheerful", scale=scale)] for scale, _ in asked],
        use_tqdm=False,
    )
    rows = [
        (f"{scale:+.1f}", opening + output.outputs[0].text)
        for (scale, opening), output in zip(asked, outputs, strict=True)
    ]
    show("Generated texts", ["scale", "text"], rows)

    moods = [mood(llm, steer=Steer("cheerful", scale=scale)) for scale in SCALES]
    # The same as part of the sampling parameters.
    by_params = mood(llm, sampling={"steering_module_ref": ("cheerful", SCALES[-1])})
    rows = [(f"{scale:+.1f}", value) for scale, value in zip(SCALES, moods, strict=True)]
    rows.append((f"steering_module_ref=('cheerful', {SCALES[-1]})", by_params))
    show("Log-odds of a good word against a bad one", ["scale", "nats"], rows)
    return {"moods": moods, "by_params": by_params}


if __name__ == "__main__":
    main()
