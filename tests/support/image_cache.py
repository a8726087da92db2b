"""Requests with images beside each other in a prefix cache, where an image's tokens attend both
ways: each must get what it gets alone, from an empty cache.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from midstream import Capture, Gate, Probe, Replace, Steer
from support import vision
from support.engines import GPU_MEMORY, HAS_GPU, engine, generated, greedy
from support.two_way_attention import two_way_attention

BLOCK = 16 if HAS_GPU else 32
MARK = vision.LARGE_IMAGES.mark
TAIL = " the hat is on the cat and in the red one"
# Images of 16 tokens, whose last half is in another block than the first, and two of them.
TEXTS = (
    "b" * 22 + MARK + TAIL,
    "b" * 54 + MARK + TAIL,
    "b" * 7 + MARK + " and " + MARK + TAIL,
)
# In float32. Another batch sums in another order.
TOLERANCE = 2e-3 if HAS_GPU else 1e-4
_LAST = 8  # positions that are captured; what is captured is not served by the cache


class Case(NamedTuple):
    """A request: its text, the seed of its first image, and what is asked of it."""

    text: int
    image: int
    kind: str


KINDS = (
    "plain", "captured", "probe", "last token of the image", "last half of the image",
    "other vector in the last half", "first token of the image", "whole image", "before the image",
    "behind the image", "gate in the image", "gate behind the image",
)  # fmt: skip


@dataclass
class Served:
    """An engine with a prefix cache, and what each case gets alone."""

    llm: Any
    alone: dict[Case, Any] = field(default_factory=dict)
    _places: dict[int, list[int]] = field(default_factory=dict)

    def prompt(self, case: Case) -> dict[str, Any]:
        count = TEXTS[case.text].count(MARK)
        pictures = [vision.picture(case.image + extra, 56, 56) for extra in range(count)]
        return {"prompt": TEXTS[case.text], "multi_modal_data": {"image": pictures}}

    def image_tokens(self, text: int) -> list[int]:
        """Return the positions of the first image's tokens."""
        if text not in self._places:
            params = greedy(1)
            output = self.llm.generate(
                [self.prompt(Case(text, 0, "plain"))], params, use_tqdm=False
            )
            name = vision.LARGE_IMAGES.holds
            image = self.llm.get_tokenizer().convert_tokens_to_ids(name)
            ids = output[0].prompt_token_ids
            self._places[text] = [place for place, token in enumerate(ids) if token == image][:16]
        return self._places[text]

    def plan(self, case: Case) -> dict[str, Any]:
        """Return the captures, edits and probes of a case."""
        places = self.image_tokens(case.text)
        capture = Capture("all", ["resid_post"], positions=list(range(-_LAST, 0)))
        probe = Probe(_vector(9), layer=2, name="p", positions=[-2, -1])
        at = {
            "last token of the image": places[-1:],
            "last half of the image": places[8:],
            "other vector in the last half": places[8:],
            "first token of the image": places[:1],
            "before the image": [places[0] - 2],
            "behind the image": [places[-1] + 2],
            "gate in the image": places[8:],
            "gate behind the image": [place + 4 for place in places[-3:]],
        }.get(case.kind)
        edits: list[Any] = []
        if at is not None:
            vector = _vector(2 if case.kind.startswith("other") else 1)
            steer = Steer(vector, layer=0, positions=at)
            edits = [Gate(steer, _vector(5)) if case.kind.startswith("gate") else steer]
        elif case.kind == "whole image":
            edits = [Replace(_vector(3), layer=0, positions=places)]
        plan: dict[str, Any] = {"edits": edits} if edits else {}
        if case.kind == "probe":
            return {"probes": [probe]}
        if case.kind.startswith("gate"):
            plan["probes"] = [probe]
        return plan if case.kind == "plain" else {**plan, "capture": [capture]}

    def ask_alone(self, cases: Sequence[Case]) -> None:
        """Run each case by itself, from an empty cache."""
        for text in {case.text for case in cases}:
            self.image_tokens(text)
        for case in cases:
            self.llm.reset_prefix_cache()
            self.alone[case] = self.ask([case])[0]
            assert not self.alone[case].num_cached_tokens

    def ask(self, cases: Sequence[Case]) -> list[Any]:
        """Run requests, several at a time."""
        plans = [self.plan(case) for case in cases]
        params = greedy(3, logprobs=3)
        plain = not any(plans)
        listed = {} if plain else {
            name: [plan.get(name) for plan in plans] for name in ("capture", "edits", "probes")
        }  # fmt: skip
        prompts = [self.prompt(case) for case in cases]
        return self.llm.generate(prompts, params, use_tqdm=False, **listed)

    def wrong(self, cases: Sequence[Case]) -> tuple[list[str], int]:
        """Run requests in this order beside each other; return those that differ from the same
        alone, and how many were served by the cache.
        """
        outputs = self.ask(cases)
        said = [
            f"{case}, {output.num_cached_tokens} cached: {error:.1e}"
            for case, output in zip(cases, outputs, strict=True)
            for error in [difference(output, self.alone[case])]
            if not error <= TOLERANCE
        ]
        return said, sum(output.num_cached_tokens > 0 for output in outputs)


@contextmanager
def served(folder: Path) -> Iterator[Served]:
    """An engine on a tiny Gemma 3 whose images have 16 tokens."""
    vision.make("gemma3-large-images", folder, vision.LARGE_IMAGES)
    path = vision.served(folder / "vision-gemma3-large-images")
    with two_way_attention(), engine(
        path,
        max_model_len=256,
        max_num_batched_tokens=256,
        max_num_seqs=8,
        # Otherwise vLLM computes an image in two steps where the first is full: its first tokens
        # then see nothing of the last ones, with or without edits.
        disable_chunked_mm_input=True,
        enable_prefix_caching=True,
        block_size=BLOCK,
        # Sliding windows: their keys are kept at the end of each prompt only, unless this is set.
        prefix_cache_retention_interval=BLOCK,
        limit_mm_per_prompt={"image": 2},
        midstream={"sites": ["resid_post"]},
        **GPU_MEMORY,
    ) as llm:  # fmt: skip
        assert llm.llm_engine.model_config.is_mm_prefix_lm
        yield Served(llm)


def cases_of(texts: int, images: int) -> list[Case]:
    return [Case(*case) for case in product(range(texts), range(images), KINDS)]


def shuffled(cases: Sequence[Case], count: int, seed: int) -> list[Case]:
    """Return `count` of the cases in random order, each about as often as another."""
    draw, chosen = random.Random(seed), list[Case]()
    while len(chosen) < count:
        chosen += draw.sample(list(cases), len(cases))
    return chosen[:count]


def difference(output: Any, alone: Any) -> float:
    """Return the largest error of rows, scores and logprobs; inf: other tokens or positions."""
    if generated(output) != generated(alone) or not _is_complete(output):
        return float("inf")
    pairs = [(_logprobs(output), _logprobs(alone))]
    found, wanted = (getattr(one, "activations", None) for one in (output, alone))
    if (found is None) != (wanted is None):
        return float("inf")
    if found is not None:
        pairs += [(value, wanted[tap]) for tap, value in found.items()]
    if getattr(alone, "probes", None):
        pairs.append((output.probes["p"], alone.probes["p"]))
    return max(_error(*pair) for pair in pairs)


def _is_complete(output: Any) -> bool:
    receipt = getattr(output, "receipt", None)
    return receipt is None or receipt.status == "ok"


def _logprobs(output: Any) -> Tensor:
    steps = output.outputs[0].logprobs
    return torch.tensor([[step[token].logprob for token in sorted(step)] for step in steps])


def _error(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    a, b = found.double(), expected.double()
    return float((a - b).abs().max() / b.abs().max())


def _vector(seed: int) -> Tensor:
    """A vector some times as long as the rows that it is added to."""
    return 6 * torch.randn(vision.HIDDEN, generator=torch.Generator().manual_seed(seed))
