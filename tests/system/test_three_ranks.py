"""Sites inside attention and the MLP over three ranks give what one rank gives, and an edit of each
head moves that head alone.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from support import tiny
from support.engines import GPU_MEMORY, engine, greedy, tokens
from support.ranks import GPUS, assert_same, ranks

from midstream import Ablate, Capture, Replace, Scale, Steer
from midstream.sites import INNER

HEAD, NEURONS, VOCAB = 32, 96, 192  # vLLM's padded vocabulary must be a multiple of three
SITES = [site for site in INNER if site != "router"]
SETTINGS = {
    "max_model_len": 128, "max_num_seqs": 16, "max_num_batched_tokens": 48,
    "enable_prefix_caching": False, **GPU_MEMORY,
}  # fmt: skip
Engines = tuple[Any, Any, tuple[int, int]]
draw = torch.Generator().manual_seed(11)
PROMPT = torch.randint(3, VOCAB, (70,), generator=draw).tolist()
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(GPUS in (1, 2), reason="needs three GPUs, or none"),
]


@pytest.fixture(scope="module", params=[(6, 3), (3, 1)], ids=["a head of keys each", "one for all"])
def both(request: Any, tiny_models: Path) -> Iterator[Engines]:
    """An engine of one rank, one of three, and their heads of queries and of keys."""
    queries, keys = request.param
    more = {"num_attention_heads": queries, "num_key_value_heads": keys, "head_dim": HEAD}
    more |= {"hidden_size": 96}
    spec = tiny.Tiny(lambda: hf.LlamaConfig(**{**tiny._COMMON, "vocab_size": VOCAB, **more}))
    path = tiny.make(f"llama-{queries}-{keys}", tiny_models, spec)
    midstream = {"sites": [*SITES, "resid_post"]}
    with (
        engine(path, midstream=midstream, **SETTINGS) as alone,
        ranks(
            path,
            midstream={**midstream, "check_ranks": True},
            tensor_parallel_size=3,
            **SETTINGS,
        ) as three,
    ):
        yield alone, three, request.param


def vector(size: int) -> list[float]:
    return (torch.randn(size, generator=draw) * 2).tolist()


def edits(queries: int, keys: int) -> list[Any]:
    """Each head of each site, whole vectors, and components of several ranks."""
    counts = {"q": queries, "rot_q": queries, "z": queries, "k": keys, "v": keys, "rot_k": keys}
    found: list[Any] = []
    for site, count in counts.items():
        # The same in all keys would change nothing: attention depends on their differences.
        where: dict[str, Any] = {"site": site, "positions": slice(20, 50)}
        found.append(Steer(vector(count * HEAD), 1, **where))
        found += [Steer(vector(HEAD), 1, head=head, **where) for head in range(count)]
    return [
        *found,
        Scale(0.0, "all", site="z", head=[0, queries - 1]),
        Ablate([vector(HEAD), vector(HEAD)], 1, site="z", head=1),
        Replace(vector(HEAD), 1, site="rot_k", head=keys - 1, positions=slice(40, 60)),
        Scale(0.0, 2, site="mlp_act", dims=[0, 31, 32, 63, 64, 95]),
        Replace(vector(NEURONS), 0, 0.5, site="mlp_pre", dims=range(20, 70)),
        Scale(-1.0, [0, 1], site="mlp_pre_linear"),
    ]


def test_rows_and_edits_of_three_ranks_are_those_of_one(both):
    alone, three, heads = both
    assert [worker.tensor_rank for worker in three.info.workers] == [0, 1, 2]
    assert three.info.shape.num_heads(("z", 1)) == heads[0]
    assert three.info.shape.num_heads(("k", 1)) == heads[1]
    assert set(three.info.workers[0].parts) == {1, 3}
    given = [None, *([edit] for edit in edits(*heads))]
    asked = {"edits": given, "capture": Capture("all", [*SITES, "resid_post"]), "use_tqdm": False}
    prompts, params = [tokens(PROMPT)] * len(given), greedy(3, detokenize=False)
    one, other = (llm.generate(prompts, params, **asked) for llm in (alone, three))
    assert_same(other, one)
    capture = Capture("all", [*SITES, "resid_post"], return_="sharded")
    assert_same(three.generate(prompts[:1], params, capture=capture, use_tqdm=False), one[:1])
    plain = one[0].activations
    for edit, output in zip(given[1:], one[1:], strict=True):
        assert edit is not None
        assert output.receipt.edited.applied == output.receipt.edited.expected > 0
        moved = output.activations["resid_post", 2][:70] - plain["resid_post", 2][:70]
        assert moved.norm() > 1e-3, edit
        tap = edit[0].sites.names[0], 1
        if edit[0].op == "steer" and edit[0].heads:
            change = (output.activations[tap] - plain[tap])[:70].abs().amax((0, 2))
            assert change.nonzero().flatten().tolist() == list(edit[0].heads)
