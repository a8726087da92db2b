"""KV of requests with edits inside layers is shared as `test_poisoning` has it for others."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.adversary_judge import Measure, differences
from support.adversary_mix import Ask
from support.cached_pair import BLOCK, SIZE, WHOLE, Pair, fresh, reused
from support.engines import engine, greedy
from support.inner_cases import HEADS

from midstream import Capture, Gate, Replace, Scale, Steer
from midstream.plan import Reading
from midstream.sites import INNER

HEAD, NEURONS = 32, 96
WIDTHS = {"q": 128, "rot_q": 128, "z": 128, "k": 64, "rot_k": 64, "v": 64}
SITES = [*(site for site in INNER if site != "router"), "resid_post"]


@pytest.fixture(scope="module")
def pair(tiny_models: Path) -> Iterator[Pair]:
    """Four heads of queries, two of keys and values."""
    path = tiny.make("llama-inner", tiny_models, HEADS)
    room = {"max_num_batched_tokens": 512, "max_num_seqs": 64, "midstream": {"sites": SITES}}
    with (
        engine(path, enable_prefix_caching=True, block_size=BLOCK, **room) as cached,
        engine(path, enable_prefix_caching=False, **room) as plain,
    ):
        yield Pair(cached, plain)


def vector(size: int, seed: int = 1, length: float = 3.0) -> torch.Tensor:
    return length * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def steer(site: str, head: int | None = None, seed: int = 1, **where: Any) -> Steer:
    size = WIDTHS.get(site, NEURONS) if head is None else HEAD
    return Steer(vector(size, seed), **{"layer": 1, "site": site, "head": head, **where})


@pytest.mark.parametrize(("site", "head"), [("k", 1), ("z", None)])
def test_the_blocks_from_an_edit_on_are_its_own(pair: Pair, site: str, head: int | None) -> None:
    where = {"positions": slice(70, 80)}
    ends = Capture("all", SITES, "generated")
    for plain_first in (False, True):
        prompt, edit = fresh(SIZE), steer(site, head, **where)
        if plain_first:
            plain, first = pair.ask(prompt, 0), pair.ask(prompt, 64, edits=edit)
        else:
            first, plain = pair.ask(prompt, 0, edits=edit), pair.ask(prompt, 64)
        assert reused(first) == 0
        assert not hasattr(plain, "receipt")
        again = pair.ask(prompt, WHOLE, edits=edit, capture=ends)
        assert reused(again) == 10
        assert again.receipt.status == "ok"
        unedited = pair.ask(prompt, WHOLE, capture=ends)
        moved, still = (one.activations["resid_post", 2] for one in (again, unedited))
        assert (moved - still).norm() > 0.01 * still.norm(), "nothing attends to what was edited"
        assert reused(pair.ask(prompt, 64, edits=steer(site, head, seed=2, **where))) == 0
        other = "v" if site == "k" else "k"
        assert reused(pair.ask(prompt, 64, edits=steer(other, head, **where))) == 0
        assert reused(pair.ask(prompt, WHOLE, edits=edit)) == 10
        pair.ask(prompt, WHOLE)


@pytest.mark.parametrize("site", ["v", "rot_k"])
def test_keys_and_values_of_the_last_layer_are_in_its_kv(pair: Pair, site: str) -> None:
    """An edit of what comes later in that layer would be in no KV."""
    prompt, edit = fresh(SIZE), steer(site, layer=2, positions=slice(10, 90))
    ends = Capture([2], "resid_post", "generated")
    first = pair.ask(prompt, 0, edits=edit, capture=ends)
    plain = pair.ask(prompt, 0, capture=ends)
    moved, still = (one.activations["resid_post", 2] for one in (first, plain))
    assert (moved - still).norm() > 0.01 * still.norm(), "nothing attends to what was edited"
    assert reused(pair.ask(prompt, WHOLE, edits=edit)) == 80
    pair.ask(prompt, WHOLE)


def test_whatever_is_different_about_an_inner_edit_its_kv_is_its_own(pair: Pair) -> None:
    prompt, at = fresh(SIZE), {"layer": 1, "site": "k"}
    reading = Reading(vector(HEAD * 2, 3), layer=0, site="v")
    others = [
        *([steer(site)] for site in SITES[:-1]),
        *([steer(site, head)] for site in ("q", "k", "v", "rot_k", "z") for head in (0, 1)),
        [steer("k", layer=2)],
        [steer("k", 0), steer("k", 1)],
        [steer("k", 1), Scale(1.5, head=0, **at)],
        [Scale(1.5, **at)],
        [Scale(1.5, head=0, **at)],
        [Scale(1.5, head=1, **at)],
        [Scale(1.5, dims=[3, 4], **at)],
        [Scale(1.5, dims=[3, 5], **at)],
        [Scale(1.5, dims=[3, 4], head=1, **at)],
        [Replace(vector(HEAD), head=0, **at)],
        [Replace(vector(HEAD), head=1, **at)],
        [Replace(vector(HEAD * 2), dims=[0], **at)],
        [Replace(vector(HEAD * 2), dims=[1], **at)],
        [Gate(steer("k", 0), reading, threshold=0.0)],
        [Gate(steer("k", 1), reading, threshold=0.0)],
    ]
    for edits in others:
        assert reused(pair.ask(prompt, 0, count=2, edits=edits)) == 0
    pair.ask(prompt, 0, count=2)
    for edits in others:
        assert reused(pair.ask(prompt, WHOLE, count=2, edits=edits)) > 0
    pair.ask(prompt, WHOLE, count=2)


def test_edited_requests_of_one_prompt_side_by_side_share_nothing(pair: Pair) -> None:
    prompt, params = fresh(SIZE), greedy(6, logprobs=2, detokenize=False)
    edits: list[Any] = [[steer(site, head)] for site in WIDTHS for head in (None, 1)][:11]
    given = [one for edit in edits for one in (edit, None)]
    prompts = [{"prompt_token_ids": prompt} for _ in given]
    asked = {"edits": given, "capture": Capture("all", SITES, "generated"), "use_tqdm": False}
    expected = pair.plain.generate(prompts, params, **asked)
    assert pair.cached.reset_prefix_cache()
    for hit in (0, WHOLE):
        found = pair.cached.generate(prompts, params, **asked)
        for nth, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            ask = Ask(0, 0, prompt, {}, None, {}, {}, None)
            assert not differences(ask, mine, theirs, Measure())
            assert mine.num_cached_tokens >= hit
            assert nth % 2 or reused(mine) == hit
