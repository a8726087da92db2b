"""KV of one request is served to another exactly where both ask for the same, and nowhere else.

Every answer is held against the same request on an engine without a prefix cache, and how many
tokens the cache served is asserted to the token. A block is 32 tokens.
"""

from typing import Any

import pytest
from support.cached_pair import SIZE, WHOLE, Pair, fresh, reused, vector
from support.engines import generated
from support.oracle_edits import EVERY_SITE

from midstream import Capture, Probe, Steer


def steer(seed: int = 1, **where: Any) -> Steer:
    return Steer(vector(seed), **{"layer": 1, **where})


def test_steered_first_then_plain(pair, prompt):
    first = pair.ask(prompt, 0, edits=steer())
    plain = pair.ask(prompt, 0)
    assert generated(first) != generated(plain)
    pair.ask(prompt, WHOLE)
    assert reused(pair.ask(prompt, WHOLE, edits=steer())) == WHOLE


def test_two_vectors_on_one_prefix_and_then_each_again(pair, prompt):
    one = pair.ask(prompt, 0, edits=steer(1))
    two = pair.ask(prompt, 0, edits=steer(2))
    assert generated(one) != generated(two)
    assert generated(pair.ask(prompt, WHOLE, edits=steer(1))) == generated(one)
    assert generated(pair.ask(prompt, WHOLE, edits=steer(2))) == generated(two)


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


@pytest.mark.parametrize(
    ("where", "hit"),
    [
        ({"positions": slice(70, 80)}, 64),
        ({"positions": [40, 90]}, 32),
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
    other = fresh(SIZE)
    pair.ask(other, 0, edits=steer(**where))
    pair.ask(other, hit)
    pair.ask(other, WHOLE, edits=steer(**where))


def test_a_conversation_steered_as_it_was_generated_goes_on_plain_and_steered(pair):
    start = fresh(40)
    first = pair.ask(start, 0, count=61, edits=steer(phase="generated"))
    talk = [*start, *generated(first)]
    assert len(talk) == 101
    pair.ask(talk, 32)
    pair.ask(talk, WHOLE)
    # Whoever asks for the same at those positions is served what was generated under it,
    again = pair.ask(talk, WHOLE, edits=steer(positions=slice(40, None)))
    assert reused(again) == WHOLE - 40
    # whoever steers what is generated from here on is not.
    pair.ask(talk, WHOLE, edits=steer(phase="generated"))
    pair.ask(talk, 32, edits=steer(2, positions=slice(40, None)))
    pair.ask(talk, 0, edits=steer())


@pytest.mark.parametrize(("position", "hit"), [(99, 96), (96, 96), (95, 64), (31, 0)])
def test_a_hit_ends_at_the_block_below_the_first_position_that_is_read(pair, prompt, position, hit):
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


def test_a_prompt_of_whole_blocks_that_is_read_at_its_end(pair, prompt):
    whole = prompt[:WHOLE]
    pair.ask(whole, 0)
    pair.ask(whole, 64)
    pair.ask(whole, 64, capture=Capture(1, positions="last_prompt"))
    pair.ask(whole, 64, count=1, capture=Capture(1, positions="last_row"))
    pair.ask(whole, 64, count=4, capture=Capture(1, positions="last_row"))


def test_server_wide_edits_are_set_and_cleared(pair, prompt):
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


def test_a_name_that_is_registered_anew_stands_for_its_new_vector(pair, prompt):
    by_name = Steer("mood", layer=1)
    for seed, hit in ((1, 0), (1, WHOLE), (2, 0), (2, WHOLE), (1, WHOLE)):
        pair.cached.vectors.register("mood", vector(seed))
        pair.ask(prompt, hit, alone={"edits": steer(seed)}, edits=by_name)
    pair.cached.vectors.register("temper", vector(2))
    pair.ask(prompt, WHOLE, alone={"edits": steer(2)}, edits=Steer("temper", layer=1))
    pair.ask(prompt, WHOLE, edits=steer(2))
    pair.ask(prompt, 0)


def test_whole_edits_of_a_name_share_kv_by_their_content(pair, prompt):
    for seed, hit in ((1, 0), (1, WHOLE), (2, 0), (2, WHOLE), (1, WHOLE)):
        pair.cached.vectors.register("calm", {"prompt": steer(seed)})
        alone = steer(seed, phase="prompt")
        pair.ask(prompt, hit, alone={"edits": alone}, edits=Steer("calm"))
    pair.ask(prompt, WHOLE, edits=steer(2))  # the prompt has the same edits
    pair.ask(prompt, 0)


def test_the_callers_own_salt_still_keeps_apart(pair, prompt):
    for edits in (None, steer()):
        for salt in ("a", "b", None):
            pair.ask(prompt, 0, salt=salt, edits=edits)
    for edits in (None, steer()):
        for salt in ("a", "b", None):
            pair.ask(prompt, WHOLE, salt=salt, edits=edits)
