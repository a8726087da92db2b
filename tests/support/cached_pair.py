"""An engine with a prefix cache and one without: the same requests give the same on both."""

from dataclasses import dataclass
from typing import Any

import torch

from support import tiny
from support.adversary_judge import Measure, differences
from support.adversary_mix import Ask
from support.engines import greedy

BLOCK = 32
SIZE = 100  # three whole blocks, 96 tokens, and a bit
WHOLE = 96
_made = iter(range(1000, 9999))


@dataclass
class Pair:
    """An engine with a prefix cache, and one without."""

    cached: Any
    plain: Any

    def ask(
        self,
        prompt: list[int],
        hit: int | None,
        *,
        count: int = 5,
        alone: dict[str, Any] | None = None,
        salt: str | None = None,
        **asked: Any,
    ) -> Any:
        """The output, which must be that of the engine without a cache.

        Args:
            prompt: token ids.
            hit: how many tokens the cache must serve; None: nothing is said of that.
            count: tokens generated.
            alone: what the engine without a cache is asked for; None: the same.
            salt: the caller's own.
            **asked: captures, edits and probes.
        """
        settings = greedy(count, logprobs=2, detokenize=False)
        given: dict[str, Any] = {"prompt_token_ids": prompt}
        expected = self.plain.generate(
            dict(given), settings, use_tqdm=False, **(asked if alone is None else alone)
        )[0]
        if salt is not None:
            given["cache_salt"] = salt
        found = self.cached.generate(given, settings, use_tqdm=False, **asked)[0]
        ask = Ask(0, 0, prompt, {}, None, {}, {}, None)
        said = differences(ask, found, expected, Measure())
        assert not said, said
        assert hit is None or found.num_cached_tokens == hit, found.num_cached_tokens
        assert expected.num_cached_tokens == 0
        return found


def fresh(count: int) -> list[int]:
    draw = torch.Generator().manual_seed(next(_made))
    return torch.randint(3, tiny.VOCAB, (count,), generator=draw).tolist()


def vector(seed: int, size: float = 3.0) -> torch.Tensor:
    return size * torch.randn(tiny.HIDDEN, generator=torch.Generator().manual_seed(seed))


def reused(output: Any) -> int:
    """How many of its edits came with what the cache served."""
    edited = output.receipt.edited
    assert edited.applied + edited.cached == edited.expected
    return edited.cached
