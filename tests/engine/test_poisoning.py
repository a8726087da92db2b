"""KV of one request is served to another exactly where both ask for the same, and nowhere else.

Every answer is held against the same request on an engine without a prefix cache, and how many
tokens the cache served is asserted to the token. A block is 32 tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import tiny
from support.cached_pair import SIZE, WHOLE, Pair, fresh, reused
from support.engines import generated
from support.oracle_edits import EVERY_SITE

from midstream import Capture, Gate, Probe, Reading, Replace, Scale, Steer, TokenIds


@pytest.fixture
def pair(wide: Any, uncached: Any) -> Pair:
    return Pair(wide, uncached)


@pytest.fixture
def prompt() -> list[int]:
    """A prompt that no other test has seen."""
    return fresh(SIZE)


def vector(seed: int, size: float = 3.0) -> torch.Tensor:
    return size * torch.randn(tiny.HIDDEN, generator=torch.Generator().manual_seed(seed))


def steer(seed: int = 1, **where: Any) -> Steer:
    return Steer(vector(seed), **{"layer": 1, **where})


def test_steered_first_then_plain(pair: Pair, prompt: list[int]) -> None:
    first = pair.ask(prompt, 0, edits=steer())
    plain = pair.ask(prompt, 0)
    assert generated(first) != generated(plain)
    pair.ask(prompt, WHOLE)
    assert reused(pair.ask(prompt, WHOLE, edits=steer())) == WHOLE


def test_two_vectors_on_one_prefix_and_then_each_again(pair: Pair, prompt: list[int]) -> None:
    one = pair.ask(prompt, 0, edits=steer(1))
    two = pair.ask(prompt, 0, edits=steer(2))
    assert generated(one) != generated(two)
    assert generated(pair.ask(prompt, WHOLE, edits=steer(1))) == generated(one)
    assert generated(pair.ask(prompt, WHOLE, edits=steer(2))) == generated(two)


def test_whatever_is_different_about_an_edit_its_kv_is_its_own(
    pair: Pair, prompt: list[int]
) -> None:
    other = steer(2, site="mlp_out", layer=0)
    scores = Reading(vector(3), layer=0, site="resid_pre")
    others = [
        [steer()],
        [steer(scale=1.5)],
        [steer(norm="match")],
        [steer(layer=2)],
        [steer(layer=[1, 2])],
        [steer(site="resid_mid")],
        [steer(site="attn_in")],
        [steer(site="attn_in", layer=2)],
        [Scale(1.5, layer=1)],
        [steer(), Scale(1.5, layer=1)],
        [Scale(1.5, layer=1), steer()],
        [steer(), other],
        [Replace(vector(1), layer=1)],
        [Gate(steer(), scores, threshold=0.0)],
        [Gate(steer(), scores, threshold=1.0)],
        [Gate(steer(), scores, threshold=0.0, sharpness=2.0)],
        [Gate(steer(), Reading(vector(4), layer=0, site="resid_pre"), threshold=0.0)],
        [Gate(steer(), Reading(vector(3), layer=0, site="resid_mid"), threshold=0.0)],
        [Gate(steer(), Reading(vector(3), bias=0.5, layer=0, site="resid_pre"), threshold=0.0)],
    ]
    for edits in others:
        pair.ask(prompt, 0, count=2, edits=edits)
    for edits in others:
        assert reused(pair.ask(prompt, WHOLE, count=2, edits=edits)) > 0


@pytest.mark.parametrize("layer", [0, 2])
def test_edits_of_what_attention_reads_are_in_the_keys_and_values_of_that_very_layer(
    pair: Pair, prompt: list[int], layer: int
) -> None:
    """The last layer's too, where an edit of what comes later would be in no keys and values."""
    edit = steer(site="attn_in", layer=layer, positions=slice(70, 80))
    first = pair.ask(prompt, 0, edits=edit)
    plain = pair.ask(prompt, 64)
    assert generated(first) != generated(plain)
    assert reused(pair.ask(prompt, WHOLE, edits=edit)) == 10
    pair.ask(prompt, WHOLE)
    pair.ask(prompt, 64, edits=steer(2, site="attn_in", layer=layer, positions=slice(70, 80)))
    pair.ask(prompt, 64, edits=steer(site="mlp_in", layer=layer, positions=slice(70, 80)))


def test_edits_that_do_the_same_to_a_block_share_it_whatever_else_they_say(
    pair: Pair, prompt: list[int]
) -> None:
    pair.ask(prompt, 0, edits=steer())
    # To the prompt, to all of it, or to all positions up to beyond it: these blocks are the same.
    pair.ask(prompt, WHOLE, edits=steer(phase="prompt"))
    pair.ask(prompt, WHOLE, edits=steer(positions=slice(0, SIZE)))
    shorter, longer = prompt[:70], [*prompt[:70], *fresh(60)]
    pair.ask(shorter, 64, edits=steer(phase="prompt"))
    pair.ask(longer, 64, edits=steer(phase="prompt"))
    pair.ask(longer[:125], WHOLE, edits=steer())
    # What is only read changes nothing; but for what is read of the prompt there must be rows.
    pair.ask(prompt, WHOLE, edits=steer(), capture=Capture(1, positions="generated"))
    pair.ask(prompt, 64, edits=steer(), probes=Probe(vector(5), 2, positions=slice(70, 75)))


@pytest.mark.parametrize(
    ("where", "hit"),
    [
        ({"positions": 99}, 96),
        ({"positions": slice(70, 80)}, 64),
        ({"positions": [40, 90]}, 32),
        ({"positions": 31}, 0),
        ({"positions": "last_prompt"}, 96),
        ({"phase": "generated"}, 96),
        ({"exclude": slice(0, 66)}, 64),
    ],
)
def test_the_plain_prefix_of_an_edit_of_some_positions_is_shared_both_ways(
    pair: Pair, prompt: list[int], where: dict[str, Any], hit: int
) -> None:
    pair.ask(prompt, 0)
    assert reused(pair.ask(prompt, hit, edits=steer(**where))) == 0
    pair.ask(prompt, WHOLE)
    pair.ask(prompt, WHOLE, edits=steer(**where))
    # And the other way round, on a prompt that is new to the cache.
    other = fresh(SIZE)
    pair.ask(other, 0, edits=steer(**where))
    pair.ask(other, hit)
    pair.ask(other, WHOLE, edits=steer(**where))


def test_edits_at_other_positions_of_one_block_are_kept_apart(
    pair: Pair, prompt: list[int]
) -> None:
    pair.ask(prompt, 0)
    places: list[Any] = [slice(70, 80), slice(70, 81), slice(71, 80), [70, 79], 70, 71]
    for positions in places:
        pair.ask(prompt, 64, edits=steer(positions=positions))
    for positions in places:
        assert reused(pair.ask(prompt, WHOLE, edits=steer(positions=positions))) > 0
    # What is beyond the block makes no difference to it.
    pair.ask(prompt, WHOLE, edits=steer(positions=[*range(70, 80), 98]))


def test_rows_laid_over_a_span_are_cached_as_they_lie(pair: Pair, prompt: list[int]) -> None:
    rows = torch.stack([vector(nth, 1.0) for nth in range(40)])

    def replace(start: int, count: int, first: int = 0) -> Replace:
        return Replace(rows[first : first + count], layer=1, positions=slice(start, start + count))

    pair.ask(prompt, 0)
    pair.ask(prompt, 32, edits=replace(40, 36))
    assert reused(pair.ask(prompt, WHOLE, edits=replace(40, 36))) == 36
    pair.ask(prompt, 32, edits=replace(41, 36))
    pair.ask(prompt, 32, edits=replace(40, 36, first=1))
    pair.ask(prompt, 64, edits=replace(64, 32))
    # The same rows lie in the second block as they did in the third.
    pair.ask(prompt, 32, edits=replace(32, 32))
    # One row at many positions is no span of rows.
    pair.ask(prompt, 32, edits=Replace(rows[0], layer=1, positions=slice(40, 76)))


def test_edits_of_some_token_ids_are_cached_by_the_tokens_that_they_fall_on(pair: Pair) -> None:
    rare, plain = 7, [token for token in fresh(400) if token != 7]
    prompt = plain[:SIZE]
    prompt[75] = rare
    by_id = steer(positions=TokenIds([rare]), phase="prompt")
    pair.ask(prompt, 0)
    pair.ask(prompt, 64, edits=by_id)
    pair.ask(prompt, WHOLE, edits=by_id)
    # The same position by its number: done to the same tokens, it is the same.
    pair.ask(prompt, WHOLE, edits=steer(positions=75))
    pair.ask(prompt, 0, edits=steer(exclude=TokenIds([rare])))
    pair.ask(prompt, WHOLE, edits=steer(exclude=TokenIds([rare])))


def test_a_conversation_steered_as_it_was_generated_goes_on_plain_and_steered(
    pair: Pair,
) -> None:
    start = fresh(40)
    first = pair.ask(start, 0, count=61, edits=steer(phase="generated"))
    talk = [*start, *generated(first)]
    assert len(talk) == 101
    # The second block holds the first generated tokens.
    pair.ask(talk, 32)
    pair.ask(talk, WHOLE)
    # Whoever asks for the same at those positions is served what was generated under it,
    again = pair.ask(talk, WHOLE, edits=steer(positions=slice(40, None)))
    assert reused(again) == WHOLE - 40
    # whoever steers what is generated from here on is not.
    pair.ask(talk, WHOLE, edits=steer(phase="generated"))
    pair.ask(talk, 32, edits=steer(2, positions=slice(40, None)))
    pair.ask(talk, 0, edits=steer())


def test_a_conversation_with_edits_of_generated_token_ids_goes_on(pair: Pair) -> None:
    start, ids = fresh(40), list(range(0, tiny.VOCAB, 2))
    edit = steer(positions=TokenIds(ids), phase="generated")
    first = pair.ask(start, 0, count=61, edits=edit)
    talk = [*start, *generated(first)]
    assert 10 < sum(token in ids for token in generated(first)[:56]) < 56
    pair.ask(talk, 32)
    pair.ask(talk, WHOLE, edits=edit)
    pair.ask(start, 32, count=61, edits=edit)


@pytest.mark.parametrize(("position", "hit"), [(99, 96), (96, 96), (95, 64), (31, 0)])
def test_a_hit_ends_at_the_block_below_the_first_position_that_is_read(
    pair: Pair, prompt: list[int], position: int, hit: int
) -> None:
    pair.ask(prompt, 0)
    read = slice(position, None)
    out = pair.ask(
        prompt, hit, capture=Capture(layers="all", sites=list(EVERY_SITE), positions=read)
    )
    assert out.activations.positions.tolist() == list(range(position, SIZE + 4))
    assert out.receipt.status == "ok"
    out = pair.ask(prompt, hit, probes=Probe(vector(3), 1, positions=position))
    assert out.probes.positions_of("probe").tolist() == [position]
    pair.ask(prompt, WHOLE, capture=Capture(1, positions="generated"))
    pair.ask(prompt, hit, capture=[[Capture(1, positions="generated"), Capture(0, positions=read)]])
    pair.ask(prompt, WHOLE)


def test_a_prompt_of_whole_blocks_that_is_read_at_its_end(pair: Pair, prompt: list[int]) -> None:
    whole = prompt[:WHOLE]
    pair.ask(whole, 0)
    pair.ask(whole, 64)
    pair.ask(whole, 64, capture=Capture(1, positions="last_prompt"))
    pair.ask(whole, 64, count=1, capture=Capture(1, positions="last"))
    pair.ask(whole, 64, count=4, capture=Capture(1, positions="last"))


def test_edited_and_read_is_computed_from_the_first_row_that_is_read(
    pair: Pair, prompt: list[int]
) -> None:
    read = Capture("all", list(EVERY_SITE), positions=70)
    first = pair.ask(prompt, 0, edits=steer(), capture=read)
    assert reused(first) == 0
    second = pair.ask(prompt, 64, edits=steer(), capture=read)
    assert reused(second) == 64
    torch.testing.assert_close(
        second.activations["resid_post", 2], first.activations["resid_post", 2]
    )


def test_a_gate_and_the_probe_that_it_reads(pair: Pair, prompt: list[int]) -> None:
    reading = {"direction": vector(8), "layer": 0, "site": "resid_pre"}
    gate = Gate(steer(), Reading(**reading), threshold=0.0)
    pair.ask(prompt, 0, edits=gate)
    assert reused(pair.ask(prompt, WHOLE, edits=gate)) == WHOLE
    # The caller's own probe of the same has its scores, from the rows that are computed for it.
    score = Probe(name="score", positions=slice(50, None), **reading)
    pair.ask(prompt, None, edits=gate, probes=score)
    out = pair.ask(prompt, 32, edits=gate, probes=score)
    assert len(out.probes["score"]) == SIZE + 4 - 50
    pair.ask(prompt, 0, edits=steer())
    pair.ask(prompt, WHOLE, edits=gate)


def test_server_wide_edits_are_set_and_cleared(pair: Pair, prompt: list[int]) -> None:
    steering = pair.cached.steering
    edit = steer()
    pair.ask(prompt, 0)
    try:
        steering.set(base=edit)
        pair.ask(prompt, 0, alone={"edits": edit})
        pair.ask(prompt, WHOLE, alone={"edits": edit})
        steering.set(base=steer(2))
        pair.ask(prompt, 0, alone={"edits": steer(2)})
        steering.clear()
        pair.ask(prompt, WHOLE)
        # By content: whoever asks for the same himself, or sets it once more, is served.
        pair.ask(prompt, WHOLE, edits=edit)
        steering.set(base=edit)
        pair.ask(prompt, WHOLE, alone={"edits": edit})
        pair.ask(prompt, 0, alone={"edits": [edit, steer(3)]}, edits=steer(3))
        steering.clear()
        steering.set(generated=edit)
        pair.ask(prompt, WHOLE, alone={"edits": steer(phase="generated")})
    finally:
        steering.clear()


def test_a_name_that_is_registered_anew_stands_for_its_new_vector(
    pair: Pair, prompt: list[int]
) -> None:
    by_name = Steer("mood", layer=1)
    for seed, hit in ((1, 0), (1, WHOLE), (2, 0), (2, WHOLE), (1, WHOLE)):
        pair.cached.vectors.register("mood", vector(seed))
        pair.ask(prompt, hit, alone={"edits": steer(seed)}, edits=by_name)
    pair.cached.vectors.register("temper", vector(2))
    pair.ask(prompt, WHOLE, alone={"edits": steer(2)}, edits=Steer("temper", layer=1))
    pair.ask(prompt, WHOLE, edits=steer(2))
    pair.ask(prompt, 0)


def test_whole_edits_of_a_name_share_kv_by_their_content(pair: Pair, prompt: list[int]) -> None:
    for seed, hit in ((1, 0), (1, WHOLE), (2, 0), (2, WHOLE), (1, WHOLE)):
        pair.cached.vectors.register("calm", {"prompt": steer(seed)})
        alone = steer(seed, phase="prompt")
        pair.ask(prompt, hit, alone={"edits": alone}, edits=Steer("calm"))
    pair.ask(prompt, WHOLE, edits=steer(2))  # the prompt has the same edits
    pair.ask(prompt, 0)


def test_the_callers_own_salt_still_keeps_apart(pair: Pair, prompt: list[int]) -> None:
    for edits in (None, steer()):
        for salt in ("a", "b", None):
            pair.ask(prompt, 0, salt=salt, edits=edits)
    for edits in (None, steer()):
        for salt in ("a", "b", None):
            pair.ask(prompt, WHOLE, salt=salt, edits=edits)
