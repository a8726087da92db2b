"""A probe's scores are kept with the KV of their tokens: a prompt that is cached is not computed
again for its scores, and these are the ones that its tokens had.

Every answer is held against the same request on an engine without a prefix cache, and how many
tokens the cache served is asserted to the token. A block is 32 tokens.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cached_pair import SIZE, WHOLE, Pair, fresh, vector
from support.engines import engine, generated, greedy
from support.nightly import rounds
from support.updating import Stepped

from midstream import Capture, Probe, Steer
from midstream.plan import AttentionPool, Classes, Stop, Switch


def probe(seed: int = 3, layer: int = 1, **where: Any) -> Probe:
    return Probe(vector(seed), layer, **where)


def over_tokens(**where: Any) -> list[Probe]:
    heads = AttentionPool(query=vector(5, 0.05), value=vector(6))
    return [
        Probe(vector(4), 1, name="largest", pool="max", **where),
        Probe(attention_pool=heads, layer=1, name="attention", **where),
        Probe(classes=Classes([vector(7), vector(8)]), layer=1, name="classes", **where),
    ]


def scores(output: Any, name: str | None = None) -> torch.Tensor:
    """The scores of the prompt's whole blocks."""
    probes = output.probes
    name = next(iter(probes)) if name is None else name
    return probes[name][probes.positions_of(name) < WHOLE]


def test_a_prompt_that_comes_again_is_served_with_its_scores(pair: Pair, prompt: Any) -> None:
    first = pair.ask(prompt, 0, probes=probe())
    again = pair.ask(prompt, WHOLE, probes=probe())
    assert torch.equal(scores(again), scores(first))
    assert scores(again).numel() == WHOLE
    assert again.receipt.status == "ok"
    # Also after a request without the probe, which the cache serves too.
    pair.ask(prompt, WHOLE)
    assert torch.equal(scores(pair.ask(prompt, WHOLE, probes=probe())), scores(first))


def test_tokens_that_were_computed_without_a_probe_are_computed_once_more(
    pair: Pair, prompt: Any
) -> None:
    pair.ask(prompt, 0)
    pair.ask(prompt, 0, probes=probe())
    pair.ask(prompt, WHOLE, probes=probe())
    pair.ask(prompt, 0, probes=probe(4))
    for seed in (3, 4, 3, 4):
        pair.ask(prompt, WHOLE, probes=probe(seed))
    # No block has the scores of both.
    both = [probe(3, name="a"), probe(4, name="b")]
    pair.ask(prompt, 0, probes=both)
    pair.ask(prompt, WHOLE, probes=both)
    pair.ask(prompt, WHOLE, probes=both[::-1])


def test_the_same_vector_elsewhere_or_with_another_reading_is_another_probe(
    pair: Pair, prompt: Any
) -> None:
    pair.ask(prompt, 0, probes=probe())
    for other in (
        probe(layer=2),
        probe(site="mlp_out"),
        probe(bias=1.0),
    ):
        pair.ask(prompt, 0, probes=other)
        pair.ask(prompt, WHOLE, probes=other)
    pair.ask(prompt, WHOLE, probes=probe(name="renamed"))


def test_probes_of_one_vector_at_several_positions_leave_the_scores_of_each(
    pair: Pair, prompt: Any
) -> None:
    """What one does not select is not kept as a score of the other."""
    several = [
        probe(name="all"),
        probe(name="again"),
        probe(name="some", positions=slice(70, 80)),
        probe(name="last", positions="last_prompt"),
    ]
    first = pair.ask(prompt, 0, probes=several)
    assert torch.equal(scores(first, "all"), scores(first, "again"))
    again = pair.ask(prompt, WHOLE, probes=probe())
    assert torch.equal(scores(again), scores(first, "all"))
    for probes in (several, several[::-1], several):
        warm = pair.ask(prompt, None, probes=probes)
        for name in ("all", "again", "some"):
            assert torch.equal(scores(warm, name), scores(first, name))
    assert warm.num_cached_tokens == WHOLE


def test_scores_are_those_after_the_edits_of_the_request(pair: Pair, prompt: Any) -> None:
    steer = Steer(vector(1), layer=1)
    plain = pair.ask(prompt, 0, probes=probe())
    steered = pair.ask(prompt, 0, probes=probe(), edits=steer)
    assert not torch.allclose(scores(plain), scores(steered), rtol=0.01)
    assert torch.equal(scores(pair.ask(prompt, WHOLE, probes=probe())), scores(plain))
    again = pair.ask(prompt, WHOLE, probes=probe(), edits=steer)
    assert torch.equal(scores(again), scores(steered))
    # An edit of the last layer changes no KV, but the score of a probe there.
    late = Steer(vector(1), layer=2, positions=slice(40, 50))
    pair.ask(prompt, 0, probes=probe(layer=2))
    pair.ask(prompt, 32, probes=probe(layer=2), edits=late)
    pair.ask(prompt, WHOLE, probes=probe(layer=2), edits=late)


@pytest.mark.parametrize(
    ("where", "hits"),
    [
        (slice(40, 70), (32, WHOLE)),
        (slice(70, None), (64, WHOLE)),
        ([3, 50, 99], (0, WHOLE)),
        ("last_prompt", (WHOLE, WHOLE)),
    ],
)
def test_a_probe_of_some_positions_has_the_blocks_before_them_computed_by_anybody(
    pair: Pair, prompt: Any, where: Any, hits: tuple[int, int]
) -> None:
    pair.ask(prompt, 0)
    for hit in hits:
        pair.ask(prompt, hit, probes=probe(positions=where))
    # Of more positions than a block has scores of, it is computed again.
    wider = pair.ask(prompt, None, probes=probe())
    assert wider.num_cached_tokens < WHOLE
    pair.ask(prompt, WHOLE, probes=probe())
    pair.ask(prompt, WHOLE, probes=probe(positions=where))


def test_the_scores_of_generated_tokens_are_kept_for_the_next_turn(pair: Pair) -> None:
    prompt = fresh(40)
    first = pair.ask(prompt, 0, probes=probe(), count=60)
    turn = [*prompt, *generated(first), 7, 8, 9]
    second = pair.ask(turn, WHOLE, probes=probe())
    assert torch.equal(scores(second), scores(first))


def test_a_longer_prompt_has_the_scores_of_the_prefix_that_it_shares(
    pair: Pair, prompt: Any
) -> None:
    pair.ask(prompt, 0, probes=probe())
    pair.ask([*prompt[:70], *fresh(60)], 64, probes=probe())


def test_a_capture_is_computed_as_before(pair: Pair, prompt: Any) -> None:
    pair.ask(prompt, 0, probes=probe())
    pair.ask(prompt, None, probes=probe(), capture=Capture(1, positions=slice(50, None)))
    pair.ask(prompt, 32, probes=probe(), capture=Capture(1, positions=slice(50, None)))


def test_another_salt_shares_neither_kv_nor_scores(pair: Pair, prompt: Any) -> None:
    pair.ask(prompt, 0, probes=probe(), salt="a")
    pair.ask(prompt, 0, probes=probe(), salt="b")
    pair.ask(prompt, WHOLE, probes=probe(), salt="a")


def test_a_reset_of_the_cache_forgets_scores_too(pair: Pair, prompt: Any) -> None:
    pair.ask(prompt, 0, probes=probe())
    assert pair.cached.reset_prefix_cache()
    pair.ask(prompt, 0)
    pair.ask(prompt, 0, probes=probe())


def test_a_probe_that_stops_or_switches_acts_on_a_cached_token_as_on_a_computed_one(
    pair: Pair, prompt: Any
) -> None:
    first = pair.ask(prompt, 0, probes=probe())
    top = float(scores(first).max())
    at = int(scores(first).argmax())
    stop = probe(name="guard", act=Stop(above=top - 1e-3))
    for hit in (WHOLE, WHOLE):
        out = pair.ask(prompt, hit, probes=stop)
        assert out.outputs[0].stop_reason == "probe:guard"
        assert [action.position for action in out.receipt.actions] == [at]
    switch = probe(name="s", act=Switch(above=top - 1e-3, edits=[Steer(vector(1), layer=1)]))
    switched = pair.ask(prompt, WHOLE, probes=switch, count=20)
    assert generated(switched) != generated(pair.ask(prompt, WHOLE, count=20))


def test_scores_of_one_step_are_served_to_another_request_in_the_same_step(
    wide: Any, uncached: Any, prompt: Any
) -> None:
    """vLLM lets a request have blocks that are computed in the very step in which it begins."""
    prompts = [{"prompt_token_ids": [*prompt, 5 + number]} for number in range(4)]
    outputs = [
        engine.generate(prompts, greedy(3, detokenize=False), use_tqdm=False, probes=probe())
        for engine in (wide, uncached)
    ]
    for found, expected in zip(*outputs, strict=True):
        name = next(iter(found.probes))
        torch.testing.assert_close(found.probes[name], expected.probes[name], rtol=1e-4, atol=1e-4)
        assert found.receipt.status == "ok"
    assert sum(found.num_cached_tokens for found in outputs[0]) in (0, 3 * WHOLE)


def test_with_unscored_tokens_skipped_a_new_probe_costs_no_cache_hit(
    tiny_llama: Path, uncached: Any, prompt: Any
) -> None:
    longer = [*prompt[:70], *fresh(60)]
    settings = {"midstream": {"unscored_tokens": "skip"}, "block_size": 32}
    stop = probe(name="guard", act=Stop(above=-1e9))
    with engine(tiny_llama, **settings, enable_prefix_caching=True) as skipping:

        def ask(some: Any, ids: list[int], **asked: Any) -> Any:
            request = {"prompt_token_ids": ids}
            return some.generate(request, greedy(3, detokenize=False), use_tqdm=False, **asked)[0]

        ask(skipping, prompt)
        first, *again = (ask(skipping, ids, probes=probe()) for ids in (prompt, longer, longer))
        stopped = ask(skipping, prompt, probes=stop)
        pooled = ask(skipping, prompt, probes=over_tokens())
    for one, wanted in zip(
        pooled.receipt.probed, over_tokens(positions=slice(WHOLE, None)), strict=True
    ):
        # What is over the tokens so far is over those that have a score.
        values = pooled.probes[one.name]
        assert values[:WHOLE].isnan().all()
        expected = ask(uncached, prompt, probes=wanted).probes[one.name]
        torch.testing.assert_close(values[WHOLE:], expected, rtol=1e-4, atol=1e-4)
        assert one.unscored == WHOLE
    assert first.num_cached_tokens == WHOLE
    assert first.receipt.probed[0].unscored == WHOLE
    assert first.receipt.status == "partial"
    expected = ask(uncached, longer, probes=probe()).probes["probe"]
    for output, hit in zip(again, (64, 128), strict=True):
        assert output.num_cached_tokens == hit
        assert output.outputs[0].token_ids == ask(uncached, longer).outputs[0].token_ids
        values = output.probes["probe"]
        assert values[:64].isnan().all()
        torch.testing.assert_close(values[64:], expected[64:], rtol=1e-4, atol=1e-4)
        assert output.receipt.probed[0].unscored == 64
        assert "64 of them NaN" in str(output.receipt)
    # A token without a score meets no condition: the first that has one does.
    assert [action.position for action in stopped.receipt.actions] == [WHOLE]


def test_a_preempted_request_has_its_scores_and_keeps_them_where_its_new_blocks_are(
    wide: Any, uncached: Any
) -> None:
    prompts = [fresh(SIZE) for _ in range(4)]

    def run(engine: Any, stops: tuple[int, ...]) -> dict[str, Any]:
        stepped = Stepped(engine)
        for number, prompt in enumerate(prompts):
            stepped.add(f"{number}", prompt, greedy(40, detokenize=False), probes=probe())
        for stop in stops:
            stepped.step(stop)
            stepped.preempt()
        return stepped.finish()

    expected = run(uncached, ())
    for outputs in (run(wide, (8, 9)), run(wide, ())):
        for name, output in outputs.items():
            assert output.outputs[0].receipt.status == "ok"
            torch.testing.assert_close(
                all_scores(output), all_scores(expected[name]), rtol=1e-4, atol=1e-4
            )


def all_scores(output: Any) -> torch.Tensor:
    (values,) = output.outputs[0].probes.values()
    return values


def test_random_requests_on_shared_prefixes_have_the_scores_of_an_engine_without_a_cache(
    pair: Pair,
) -> None:
    draw = random.Random(5)
    trunks = [fresh(200) for _ in range(3)]
    choices = [
        [probe(3)],
        [probe(4, layer=2)],
        [probe(3), probe(4, layer=2, name="second")],
        [probe(3, positions=slice(20, 90))],
        [],
    ]
    edits = [None, Steer(vector(1), layer=0, positions=slice(64, 80)), Steer(vector(2), layer=2)]
    hits, tries = 0, rounds(suite=12, nightly=30)
    for _ in range(tries):
        trunk = draw.choice(trunks)[: draw.randrange(33, 200)]
        asked: dict[str, Any] = {}
        if chosen := draw.choice(choices):
            asked["probes"] = chosen
        if (edit := draw.choice(edits)) is not None:
            asked["edits"] = edit
        output = pair.ask(trunk, None, count=draw.choice([1, 3, 40]), **asked)
        assert output.receipt is None or output.receipt.status == "ok"
        hits += output.num_cached_tokens if "probes" in asked else 0
    assert hits > 12 * tries
