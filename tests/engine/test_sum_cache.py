"""Sums of rows that a capture reduces are kept with the KV of their tokens: a prompt that is cached
is not computed again for its mean, and this is the one that its tokens have.

Every answer is held against the same request on an engine without a prefix cache, and the count of
tokens that the cache served is that of a plain request. A block is 32 tokens.
"""

import random
from typing import Any

import pytest
import torch
from engine.test_reduce import TOLERANCE, error_of, reduced
from support.cached_pair import SIZE, WHOLE, Pair, fresh, vector
from support.engine_view import inspect
from support.engines import HAS_GPU, greedy
from support.nightly import rounds
from support.updating import Stepped

from midstream import Capture, Probe, Steer

KINDS = ("mean", "max", "moments")


def asked(kind: str = "mean", layers: Any = "all", where: Any = "prompt", **more: Any) -> Capture:
    return Capture(layers, reduce=kind, positions=where, **more)


def rows(output: Any) -> dict[Any, torch.Tensor]:
    return dict(output.activations.items())


def assert_equal(first: Any, second: Any) -> None:
    """To the last bit; on a GPU, whose rows depend on how many tokens a step has, but for that."""
    first, second = rows(first), rows(second)
    assert first.keys() == second.keys()
    for tap in first:
        assert_equal_values(first[tap], second[tap])


def assert_equal_values(first: torch.Tensor, second: torch.Tensor) -> None:
    assert torch.equal(first, second) or HAS_GPU
    assert error_of(first, second.double()) <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_comes_again_is_served_as_a_plain_one_is(
    pair: Pair, prompt: Any, kind: str, oracle: Any
) -> None:
    first = pair.ask(prompt, 0, capture=asked(kind))
    again = pair.ask(prompt, WHOLE, capture=asked(kind))
    assert_equal(again, first)
    assert again.receipt.status == "ok"
    assert {(c.expected, c.actual) for c in again.receipt.captured} == {(SIZE, SIZE)}
    pair.ask(prompt, WHOLE)
    longer = [*prompt[:70], *fresh(60)]
    forked = pair.ask(longer, 64, capture=asked(kind))
    for ids, output in ((prompt, again), (longer, forked)):
        seen = oracle.run(ids).values
        for tap, values in rows(output).items():
            assert error_of(values, reduced(seen[tap][: len(ids)], kind)) <= TOLERANCE


def test_the_sums_are_kept_from_a_request_that_had_other_blocks_of_the_same_tokens(
    pair: Pair, prompt: Any
) -> None:
    pair.ask(prompt, 0)
    first = pair.ask(prompt, 0, capture=asked())
    pair.ask(prompt, WHOLE)
    assert_equal(pair.ask(prompt, WHOLE, capture=asked()), first)


@pytest.mark.parametrize(
    "other",
    [
        {"capture": asked("max")},
        {"capture": asked("moments")},
        {"capture": asked(layers=[0, 1])},
        {"capture": asked(sites="mlp_out")},
        {"capture": asked(where=slice(1, SIZE))},
        {"capture": asked(where=slice(0, SIZE, 2))},
        {"capture": asked(where=[*range(40), *range(41, SIZE)])},
        {"capture": asked(), "edits": Steer(vector(1), layer=1)},
    ],
    ids=["kind", "kind of more numbers", "layers", "site", "start", "stride", "gap", "edit"],
)
def test_what_is_reduced_otherwise_is_never_shared(
    pair: Pair, prompt: Any, other: dict[str, Any]
) -> None:
    first = pair.ask(prompt, 0, capture=asked())
    another = pair.ask(prompt, None, **other)
    assert another.num_cached_tokens in (0, 32)  # of the gap, the block before it
    assert_equal(pair.ask(prompt, WHOLE, **other), another)
    assert_equal(pair.ask(prompt, WHOLE, capture=asked()), first)


def test_another_salt_and_a_reset_share_no_sums(pair: Pair, prompt: Any) -> None:
    pair.ask(prompt, 0, capture=asked(), salt="a")
    pair.ask(prompt, 0, capture=asked(), salt="b")
    pair.ask(prompt, WHOLE, capture=asked(), salt="a")
    assert pair.cached.reset_prefix_cache()
    pair.ask(prompt, 0, capture=asked(), salt="a")


SOME: list[tuple[Any, int]] = [
    (slice(40, 97), WHOLE),
    (slice(3, 70, 7), 64),  # a hit ends before the last selected token, which has the row
    ([3, 9, 80, 98], WHOLE),
    ([3, 9, 80], 64),
    ([64, 99], WHOLE),
    ("last_prompt", WHOLE),
]


@pytest.mark.parametrize(
    ("where", "hit", "kind"),
    [  # by day one kind of each
        pytest.param(*some, kind, marks=[] if nth % 3 == number else [pytest.mark.nightly])
        for nth, some in enumerate(SOME)
        for number, kind in enumerate(KINDS)
    ],
)
def test_some_tokens_of_a_prompt_are_reduced_without_the_cached_ones(
    pair: Pair, prompt: Any, where: Any, hit: int, kind: str
) -> None:
    first = pair.ask(
        prompt, 0 if where != "last_prompt" else None, capture=asked(kind, where=where)
    )
    pair.ask(prompt, WHOLE)
    assert_equal(pair.ask(prompt, hit, capture=asked(kind, where=where)), first)
    # A prompt whose selection goes on in the same way shares it.
    if where == slice(40, 97):
        pair.ask([*prompt, *fresh(30)], WHOLE, capture=asked(kind, where=slice(40, 120)))


def test_several_reductions_beside_rows_and_scores(pair: Pair, prompt: Any) -> None:
    reduced_rows = [asked("mean", [0, 1]), asked("moments", 2, slice(10, 90))]
    several = {
        "capture": [[*reduced_rows, asked("max", "all", slice(0, 64, 3), sites="mlp_out")]],
        "probes": Probe(vector(3), 1, name="p"),
    }
    first = pair.ask(prompt, 0, **several)
    for _ in range(2):
        assert_equal(pair.ask(prompt, 32, **several), first)  # before position 63
    late = {**several, "capture": [[*reduced_rows, Capture(1, "attn_out", slice(70, None))]]}
    kept = pair.ask(prompt, 64, **late)  # of what is reduced alike
    for tap in [tap for tap in rows(kept) if tap[0] == "resid_post"]:
        assert_equal_values(rows(kept)[tap], rows(first)[tap])


def test_requests_of_one_step_go_on_from_each_others_sums(
    wide: Any, uncached: Any, prompt: Any
) -> None:
    """vLLM lets a request have blocks that are computed in the very step in which it begins."""
    ids = [[*prompt[:65], 5], [*prompt[:97], 6, 7], [*prompt[:97], 8], [*prompt[:40], 9, 10]]
    prompts = [{"prompt_token_ids": mine} for mine in ids]
    outputs = [
        engine.generate(
            prompts, greedy(3, detokenize=False), use_tqdm=False, capture=asked("moments")
        )
        for engine in (wide, uncached)
    ]
    for found, expected in zip(*outputs, strict=True):
        assert found.receipt.status == "ok"
        for tap, values in rows(found).items():
            torch.testing.assert_close(values, rows(expected)[tap], rtol=1e-4, atol=1e-4)
    assert sum(found.num_cached_tokens for found in outputs[0]) in (0, 64 + 96 + 32)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_preemption_and_hits_of_any_length_leave_the_bits_of_the_sums(
    llm: Any, oracle: Any, kind: str
) -> None:
    """The rows of equal tokens are equal on this engine: steps of 64 tokens, blocks of 32."""
    prompts = [fresh(150) for _ in range(3)]
    prompts.append([*prompts[0][:100], *fresh(50)])

    def run(stops: tuple[int, ...]) -> dict[str, Any]:
        stepped = Stepped(llm)
        for number, prompt in enumerate(prompts):
            settings = greedy(20, detokenize=False)
            where = slice(5, 149, 3) if number == 2 else "prompt"
            stepped.add(f"{number}", prompt, settings, capture=asked(kind, where=where))
        for stop in stops:
            stepped.step(stop)
            stepped.preempt()
        return stepped.finish()

    results = []
    for stops in ((), (3, 4, 5), (9, 1), ()):
        if stops:
            llm.reset_prefix_cache()
        results.append(run(stops))
    for outputs in results:
        for name, output in outputs.items():
            one = output.outputs[0]
            assert one.receipt.status == "ok"
            prompt = prompts[int(name)]
            where = list(range(150))[5:149:3] if name == "2" else list(range(150))
            seen = oracle.run(prompt).values
            for tap, values in rows(one).items():
                assert error_of(values, reduced(seen[tap][where], kind)) <= TOLERANCE
    assert not inspect(llm).leftovers()


def test_random_requests_on_shared_prefixes_have_the_sums_of_an_engine_without_a_cache(
    pair: Pair,
) -> None:
    draw = random.Random(6)
    trunks = [fresh(200) for _ in range(2)]
    edits = [None, None, Steer(vector(1), layer=0, positions=slice(20, 32))]
    hits, tries = 0, rounds(suite=15, nightly=40)
    for _ in range(tries):
        trunk = draw.choice(trunks)[: draw.randrange(33, 200)]
        size = len(trunk)
        captures = [
            [asked(draw.choice(KINDS[::2]))],
            [asked("mean", 1), asked("max", 2, slice(20, size - 1, 3))],
            [asked("moments", [0, 2], slice(draw.choice([0, 7]), size))],
            [],
        ]
        more: dict[str, Any] = {}
        if chosen := draw.choice(captures):
            more["capture"] = [chosen]
        if (edit := draw.choice(edits)) is not None:
            more["edits"] = edit
        output = pair.ask(trunk, None, count=draw.choice([1, 3, 40]), **more)
        assert not more or output.receipt.status == "ok"
        hits += output.num_cached_tokens if "capture" in more else 0
    assert hits > 8 * tries
    inspect(pair.cached).check_integrity()
