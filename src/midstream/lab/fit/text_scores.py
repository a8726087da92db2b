"""Log probabilities of given texts, under the model as it is or with edits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from midstream.errors import SpecError
from midstream.lab.fit.batches import PromptBatch, Steps, encode_prompts, encode_texts
from midstream.validation import kind


@dataclass(frozen=True, eq=False)
class TextScore:
    """Log probability of one text.

    Attributes:
        token_ids: the tokens that are scored: all of the text after a prompt; without one, all but
            the first.
        logprobs: float32 [tokens], natural logarithm of the probability of each, given all before
            it.
    """

    token_ids: tuple[int, ...]
    logprobs: NDArray[np.float32]

    @property
    def total(self) -> float:
        """Natural logarithm of the probability of all tokens together."""
        return float(self.logprobs.astype(np.float64).sum())

    @property
    def mean(self) -> float:
        """Mean log probability of a token; NaN without tokens."""
        return self.total / len(self.logprobs) if len(self.logprobs) else math.nan

    @property
    def perplexity(self) -> float:
        """exp(−mean); infinite if that exceeds a float, and NaN without tokens."""
        return perplexity_of(self.mean)

    def __len__(self) -> int:
        return len(self.logprobs)

    def __repr__(self) -> str:
        return f"TextScore({len(self)} tokens, total={self.total:.3f}, mean={self.mean:.3f})"


def perplexity_of(mean: float) -> float:
    try:
        return math.exp(-mean)
    except OverflowError:
        return math.inf


def score_steps(
    tokenizer_of: Callable[[], Any], texts: Any, prompts: Any, edits: Any
) -> Steps[list[TextScore]]:
    """Score texts; see `LLM.score`."""
    if isinstance(texts, str):
        raise SpecError("texts", "expected a list of texts, got one; put it into a list")
    if not hasattr(texts, "__len__"):
        raise SpecError("texts", f"expected a list of texts, got {kind(texts)}")
    if prompts is None:
        starts = [1] * len(texts)
        whole = encode_prompts("texts", texts, tokenizer_of)
    else:
        pairs = encode_texts("texts", texts, prompts, tokenizer_of)
        starts = [len(before) for before, _ in pairs]
        whole = [[*before, *after] for before, after in pairs]
    outputs = yield PromptBatch(whole, [reading_params()] * len(whole), edits=edits)
    return [
        TextScore(tuple(ids[start:]), logprobs_of(output, start))
        for output, ids, start in zip(outputs, whole, starts, strict=True)
    ]


def reading_params() -> Any:
    """Return the parameters of a request that reads its prompt, which skips the prefix cache."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)


def logprobs_of(output: Any, start: int) -> NDArray[np.float32]:
    """Return the log probabilities of a prompt's tokens from `start`, float32 [tokens]."""
    tokens = output.prompt_token_ids
    logprobs = output.prompt_logprobs
    return np.array(
        [logprobs[position][tokens[position]].logprob for position in range(start, len(tokens))],
        np.float32,
    )
