"""Keys, hits and failures where tokens of an image attend to later tokens of it, against a model of
which token's KV depends on which other token.
"""

import random
from itertools import pairwise
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import rounds
from support.plans import SMALL, plan_of, random_plan
from unit.runtime.core.blocks import Scheduler

from midstream.plan import ResolvedPlan
from midstream.plan.resolve.wire import to_bytes
from midstream.runtime.core.prefix_cache import computed_blocks, extra_keys
from midstream.runtime.protocol.cache_keys import cache_keys
from midstream.runtime.protocol.failures import Failure
from midstream.runtime.protocol.request_payload import RequestPayload

TAP = ("resid_post", 0)
LENGTH = 24


def _request(plan, images, mm_prefix=True, audio=()):
    payload = RequestPayload("r", to_bytes(plan), cache_keys(plan), mm_prefix=mm_prefix)
    params = SimpleNamespace(extra_args={"midstream": payload})
    features = [
        SimpleNamespace(
            modality="audio" if (start, stop) in audio else "image",
            mm_position=SimpleNamespace(offset=start, length=stop - start),
        )
        for start, stop in sorted([*images, *audio])
    ]
    return SimpleNamespace(request_id="r", sampling_params=params, mm_features=features)


def _chain(request, size, blocks):
    """Return the extra keys of the first blocks: what the hash of the last one depends on."""
    return [
        extra_keys(lambda *_: (None, 0), request, nth * size, (nth + 1) * size, 0)[0]
        for nth in range(blocks)
    ]


def _reached(stop: int, images) -> set[int]:
    """Return the tokens on which the KV of the tokens before `stop` depends, by following which
    token attends to which, layer after layer.
    """

    def attended(token):
        mine = [range(*image) for image in images if token in range(*image)]
        return {*range(token + 1), *(other for image in mine for other in image)}

    found: set[int] = set()
    new = set(range(stop))
    while new:
        found |= new
        new = set().union(*(attended(token) for token in new)) - found
    return found


def _edits_at(plan: ResolvedPlan, position: int) -> list[object]:
    """Return what is edited at a position, in order."""

    def has(ranges):
        return any(a <= position and (b is None or position < b) for a, b in ranges)

    edits = []
    for edit in plan.edits:
        content = (edit.site, edit.layer, edit.steps.digest)
        edits += [content] if has(edit.where.ranges) else []
        edits += [(content, one.ids, one.others) for one in edit.where.matches if has(one.ranges)]
    return edits


def _images(draw: random.Random) -> list[tuple[int, int]]:
    cuts = sorted(draw.sample(range(LENGTH + 1), 2 * draw.randint(1, 3)))
    return list(pairwise(cuts))[::2]


@given(st.integers(0, 10**9), st.integers(1, 9), st.data())
@settings(max_examples=rounds(suite=300, nightly=3000))
def test_two_requests_share_a_block_exactly_if_no_token_that_its_kv_depends_on_differs(
    seed, size, data
):
    draw = random.Random(seed)
    images = _images(draw)
    one = random_plan(draw, LENGTH) or plan_of()
    other = random_plan(draw, LENGTH) or plan_of()
    # Another plan that is often alike in part.
    kept = tuple(edit for edit in one.edits if data.draw(st.booleans()))
    added = other.edits if data.draw(st.booleans()) else ()
    plans = [ResolvedPlan(LENGTH, edits, ()) for edits in (one.edits, kept + added)]
    blocks = data.draw(st.integers(1, LENGTH // size))
    depends = _reached(blocks * size, images)
    edited = [[_edits_at(plan, token) for token in sorted(depends)] for plan in plans]
    chains = [_chain(_request(plan, images), size, blocks) for plan in plans]
    assert (chains[0] == chains[1]) == (edited[0] == edited[1])


@given(st.integers(0, 10**9), st.integers(1, 9))
@settings(max_examples=rounds(suite=100, nightly=800))
def test_causal_models_and_text_and_audio_keep_the_keys_of_their_own_tokens(seed, size):
    draw = random.Random(seed)
    images = _images(draw)
    plan = random_plan(draw, LENGTH) or plan_of()
    keys = cache_keys(plan)
    own = [keys.of_block(start, start + size) for start in range(0, LENGTH - size + 1, size)]
    expected = [None if mark is None else (("midstream", mark),) for mark in own]
    for request in (
        _request(plan, images, mm_prefix=False),
        _request(plan, []),
        _request(plan, [], audio=images),
    ):
        assert _chain(request, size, len(own)) == expected


def test_an_edit_at_the_last_token_of_an_image_is_in_the_key_of_the_block_of_its_first():
    plan = plan_of([(TAP, SMALL[0], 1.0, [(32, 33)])])
    plain, middle, edited = _chain(_request(plan, [(29, 33)]), 16, 3)
    assert plain is None
    assert middle is not None
    assert edited is not None
    assert _chain(_request(plan, [(33, 37)]), 16, 3)[:2] == [None, None]


@given(st.integers(0, 10**9), st.integers(0, LENGTH), st.integers(1, 9))
@settings(max_examples=rounds(suite=200, nightly=1600))
def test_a_hit_ends_in_no_image_and_below_what_is_read_and_is_the_longest_of_these(
    seed, read, size
):
    draw = random.Random(seed)
    images = _images(draw)
    reads = draw.random() < 0.5
    captures = [([TAP], [(read, None)])] if reads else []
    request, causal = (_request(plan_of([], captures), images, prefix) for prefix in (True, False))
    cached = 0

    class Coordinator:
        def find_longest_cache_hit(self, hashes, most):
            blocks = min(cached, most) // size
            return hashes[:blocks], blocks * size, 0

    manager = SimpleNamespace(coordinator=Coordinator())
    hashes = list(range(LENGTH))

    def original(manager, request):
        return manager.coordinator.find_longest_cache_hit(hashes, LENGTH)

    for cached in range(LENGTH + 1):
        found, hit, _ = computed_blocks(original, manager, request)
        assert len(found) * size == hit
        most = min(cached, read if reads else LENGTH)
        allowed = [
            length
            for length in range(0, most + 1, size)
            if not any(start < length < stop for start, stop in images)
        ]
        assert hit == max(allowed)
        # Without such attention, hits may end anywhere; without a plan, with what is read too.
        assert computed_blocks(original, manager, causal)[1] == most // size * size
        plain = SimpleNamespace(sampling_params=None)
        assert computed_blocks(original, manager, plain)[1] == cached // size * size


def test_a_request_that_was_served_an_image_ends_with_the_one_that_failed_to_edit_it():
    plan = plan_of([(TAP, SMALL[0], 1.0, [(6, 7)])])
    for mm_prefix, ended in ((True, {"bad", "reader"}), (False, {"bad"})):
        bad, reader = (_request(plan, [(2, 7)], mm_prefix) for _ in range(2))
        scheduler = Scheduler(bad=(bad, [1, 2]), reader=(reader, [1, 3]))
        assert set(scheduler.end(bad=Failure(0, "broken"))) == ended
