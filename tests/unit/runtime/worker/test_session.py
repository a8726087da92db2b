"""A session through thousands of steps, each row of them held against a naive reader of plans."""

import random
from dataclasses import replace

import pytest
import torch
from support.fake_steps import TAPS, Fake, FakeEngine, SlowShipment, check_taken, view_of
from support.nightly import rounds
from support.plans import VECTORS, plan_of, random_plan

from midstream.errors import TapError
from midstream.ops import layout
from midstream.runtime.protocol.segments import APPLIED_0
from midstream.runtime.worker.tables.device_buffers import code
from midstream.runtime.worker.taps.tap_check import check_taps

EVERYWHERE = ((0, None),)
POST = ("resid_post", 1)
STEER = plan_of(edits=[(POST, VECTORS[0], 2.0, EVERYWHERE)])
READ = plan_of(captures=[([POST], EVERYWHERE)])
BOTH = plan_of(edits=[(POST, VECTORS[0], 2.0, EVERYWHERE)], captures=[([POST], EVERYWHERE)])


# ---------------------------------------------------------------- everything at once


class Scheduler:
    """Random batches: chunked prefill beside decode, cache hits, preemption, requests that end."""

    def __init__(self, seed, lag, codecs=("raw",), **sizes):
        self.draw = random.Random(seed)
        self.engine = FakeEngine(seed, lag=lag, **sizes)
        self.codecs = codecs
        self.running = []
        self.lengths = {}
        self.made = 0
        self.checked = 0

    def arrive(self):
        length = self.draw.randint(2, 40)
        plan = random_plan(self.draw, length)
        if plan is not None and self.codecs != ("raw",):
            plan = replace(plan, codec=self.draw.choice(self.codecs))
        fake = Fake(f"r{self.made}", plan)
        self.made += 1
        self.lengths[fake.id] = length
        self.running.append(fake)
        if self.draw.random() < 0.3:  # the beginning is served from the KV cache
            fake.computed = self.draw.randint(1, length - 1)
        self.engine.add(fake)

    def step(self):
        batch, room = [], 64
        for fake in self.draw.sample(self.running, len(self.running)):
            left = self.lengths[fake.id] - fake.computed
            if self.draw.random() < 0.2:  # not in this step
                continue
            if self.draw.random() < 0.05:  # preempted: all of it again, now or later
                fake.computed = 0
                self.engine.add(fake)  # V2 announces a resumed request as a new one
                continue
            count = min(left, room, 1 if self.draw.random() < 0.5 else self.draw.randint(1, 16))
            if count:
                batch.append((fake, count))
                room -= count
        if batch:
            pad = self.draw.randint(0, room)
            self.engine.step(batch, pad=pad)

    def depart(self):
        for fake in list(self.running):
            over = fake.computed >= self.lengths[fake.id]
            if over or self.draw.random() < 0.01:  # ended, or aborted
                self.running.remove(fake)
                self.engine.session.requests.finish([fake.id])
                if self.draw.random() < 0.8:
                    self.take(fake)
                else:
                    self.later.append(fake)

    def take(self, fake):
        taken = self.engine.take(fake.id)
        if fake.plan is None:
            assert taken == []
        else:
            check_taken(taken, [fake], self.engine.width)
            self.checked += 1
        assert self.engine.take(fake.id) == [], "a request was handed out twice"

    def run(self, steps):
        self.later = []
        for _ in range(steps):
            while len(self.running) < 8 and self.draw.random() < 0.6:
                self.arrive()
            self.step()
            self.depart()
        for fake in self.running + self.later:
            self.take(fake)
        self.engine.session.check_integrity()
        assert self.engine.session._tables.in_use == 0
        assert not self.engine.session.requests._finished
        assert not self.engine.session._recorder._in_flight


LAGS = (None, 1, 5, 0, 3, None, 2)  # in steps


@pytest.mark.parametrize("seed", range(rounds(suite=2, nightly=7)))
def test_random_steps_do_for_every_row_what_a_naive_reader_of_its_plan_says(seed):
    scheduler = Scheduler(seed, LAGS[seed])
    scheduler.run(70)
    assert scheduler.checked > 10


@pytest.mark.parametrize("seed", range(rounds(suite=1, nightly=4)))
def test_taps_of_different_widths_get_their_own_vectors_and_rows_in_every_codec(seed):
    codecs = ("raw", "full8", "topk8:k=2")
    lag = LAGS[seed + 1]
    scheduler = Scheduler(10 + seed, lag, codecs, mixed=True, bank_rows=256, ring_rows=64 * 12)
    assert scheduler.engine.buffers.unit == 2
    scheduler.run(70)
    assert scheduler.checked > 10


# ---------------------------------------------------------------- one thing at a time


def test_who_takes_a_request_waits_for_its_own_steps_and_for_no_later_one(monkeypatch):
    waited: list[int] = []
    wait = SlowShipment.tally
    monkeypatch.setattr(SlowShipment, "tally", lambda self: waited.append(self.due) or wait(self))
    engine, first, second = FakeEngine(lag=9), Fake("a", READ), Fake("b", READ)
    for fake in (first, second):
        engine.add(fake)
    engine.step([(first, 3), (second, 2)])
    engine.step([(first, 1)])
    engine.step([(second, 1)])
    engine.step([(second, 1)])
    waited.clear()
    check_taken(engine.take("a"), [first])
    assert len(waited) == 2
    check_taken(engine.take("b"), [second])
    assert len(waited) == 4
    engine.session.check_integrity()


def test_the_children_of_one_prompt_are_taken_together():
    engine = FakeEngine()
    children = [Fake(f"{n}_x", BOTH, uid="u") for n in range(3)]
    other = Fake("x", BOTH, uid="v")
    for fake in [*children, other]:
        engine.add(fake)
    engine.step([(fake, n + 1) for n, fake in enumerate([*children, other])])
    engine.session.requests.finish(["1_x"])
    check_taken(engine.take("u"), children)
    check_taken(engine.take("v"), [other])


def test_an_id_used_again_belongs_to_its_new_bearer():
    engine = FakeEngine(lag=5)
    first, second = Fake("a", STEER, uid="first"), Fake("a", READ, uid="second")
    engine.add(first)
    engine.step([(first, 3)])
    engine.session.requests.finish(["a"])
    engine.add(second)
    engine.step([(second, 2)])
    check_taken(engine.take("first"), [first])
    check_taken(engine.take("second"), [second])
    engine.session.check_integrity()


def test_adding_a_request_twice_or_finishing_it_twice_changes_nothing():
    engine, fake = FakeEngine(lag=3), Fake("a", STEER)
    engine.add(fake)
    engine.add(fake)
    engine.step([(fake, 2)])
    engine.session.requests.finish(["a"])
    engine.session.requests.finish(["a"])
    engine.session.requests.finish(["never heard of"])
    check_taken(engine.take("a"), [fake])
    engine.session.check_integrity()
    assert engine.take("a") == []


def test_a_plain_request_with_the_id_of_one_that_just_ended_is_left_alone():
    # Its rows must not be mapped to the old slot, whose program is another request's by now.
    engine = FakeEngine(lag=2)
    first, plain = Fake("X", STEER, uid="u1"), Fake("X")
    other = Fake("B", plan_of([(POST, VECTORS[1], 9.0, EVERYWHERE)]), uid="u2")
    engine.add(first)
    for count in (3, 1, 1):
        engine.step([(first, count)])
    engine.session.requests.finish(["X"])
    engine.add(other)
    engine.step([(plain, 3), (other, 3)])
    engine.step([(plain, 1), (other, 1)])
    check_taken(engine.take("u1"), [first])


# ---------------------------------------------------------------- nothing asked


def test_without_requests_the_buffers_stay_zero_and_nothing_is_shipped():
    engine, fake = FakeEngine(lag=0), Fake("plain")
    for count in (5, 3, 1, 1):
        engine.session.before_forward(view_of(["plain"], [count], [fake.computed]))
        assert not bool(engine.buffers.tokens.any()), "an idle step was armed"
        engine.session.after_forward()
        fake.computed += count
    assert engine.transport.shipped == 0
    engine.session.check_integrity()


def test_a_forward_outside_of_steps_captures_nothing_and_its_counts_are_not_taken():
    engine, fake = FakeEngine(), Fake("a", BOTH)
    engine.buffers.ring.fill_(-7)
    engine.add(fake)
    for count in (4, 1, 1):
        engine.step([(fake, count)])
        ring = engine.buffers.ring.clone()
        engine.forward(64)
        assert torch.equal(engine.buffers.ring, ring)
    check_taken(engine.take("a"), [fake])


# ---------------------------------------------------------------- taps that do not fire


@pytest.mark.parametrize(
    ("firing", "message"),
    [
        ({"skip": (POST,)}, "the tap resid_post of layer 1 did not fire"),
        ({"skip": (("resid_pre", 0),)}, "the tap resid_pre of layer 0 did not fire"),
        ({"twice": (POST,)}, "the tap resid_post of layer 1 fired twice"),
        ({"skip": tuple(TAPS)}, "no tap fired"),
        ({"twice": tuple(TAPS)}, "every tap fired twice"),
        ({"skip": (POST, ("resid_pre", 0))}, "several taps did not fire, or fired twice"),
    ],
)
@pytest.mark.parametrize("lag", [None, 2])
def test_a_tap_that_fails_stops_a_trial_run_and_is_noted_on_the_requests_of_a_step(
    firing, message, lag
):
    engine = FakeEngine(lag=lag)
    check_taps(engine.buffers, TAPS, lambda: engine.forward(3))
    engine.session.check_integrity()
    assert not bool(engine.buffers.tokens.any())
    with pytest.raises(TapError, match=f"did not all fire once in a trial run.*: {message}"):
        check_taps(engine.buffers, TAPS, lambda: engine.forward(3, **firing))
    there, absent = Fake("there", BOTH), Fake("absent", BOTH)
    engine.add(there)
    engine.add(absent)
    engine.step([(there, 2), (absent, 3)])
    engine.session.before_forward(view_of(["there", "plain"], [2, 1], [2, 0]))
    engine.forward(3, **firing)
    engine.session.after_forward()
    found = engine.take("there")[0]
    assert message in found.problem
    assert found.problem.startswith("position 2: expected 1 edits and 1 captured vectors, ")
    assert engine.take("absent")[0].problem == ""


@pytest.mark.parametrize(
    ("column", "did"), [(layout.EDIT_COUNT, "0 and 1"), (layout.PLACE, "1 and 0")]
)
def test_an_edit_or_a_capture_that_the_device_left_out_is_noted_though_every_tap_fired(column, did):
    engine, fake = FakeEngine(), Fake("a", BOTH)
    engine.add(fake)
    engine.step([(fake, 2)])
    engine.buffers.table[:, :, column] = 0
    engine.session.before_forward(view_of(["a"], [1], [2]))
    engine.forward(1)
    engine.session.after_forward()
    assert engine.take("a")[0].problem == (
        f"position 2: expected 1 edits and 1 captured vectors, the device counted {did}; "
        "every tap fired once"
    )


def test_a_request_keeps_its_first_problem():
    engine, fake = FakeEngine(), Fake("a", READ)
    engine.add(fake)
    engine.step([(fake, 2)])
    for tap in (("resid_pre", 0), ("resid_pre", 1)):
        engine.step([(fake, 1)], skip=(tap,))
    assert "resid_pre of layer 0 did not fire" in engine.take("a")[0].problem


def test_the_codes_of_taps_tell_them_apart():
    taps = [
        (site, layer) for site in ("resid_pre", "resid_mid", "resid_post") for layer in range(128)
    ]
    codes = {code(tap) for tap in taps}
    assert len(codes) == len(taps)
    assert 0 not in codes
    # No two missing taps look like one missing or doubled tap.
    sums = {(a + b) % 2**32 for a in list(codes)[:60] for b in list(codes)[:60]}
    assert not sums & {found % 2**32 for found in codes}


# ---------------------------------------------------------------- no room


@pytest.mark.parametrize(
    ("sizes", "setting"),
    [
        ({"bank_rows": 1}, "bank_rows"),
        ({"max_edits": 1}, "max_edits"),
        ({"programs": 3}, "programs"),
    ],
)
def test_a_request_without_room_runs_without_its_edits_and_names_the_setting(sizes, setting):
    engine = FakeEngine(**sizes)
    fits, waits = Fake("fits", STEER), Fake("waits", plan_of([(POST, VECTORS[1], 1.0, EVERYWHERE)]))
    engine.add(fits)
    engine.add(waits)
    plain = Fake("waits")  # runs as if it asked for nothing
    engine.step([(fits, 3), (plain, 4)])
    refused = engine.take("waits")[0]
    assert f"raise the setting `{setting}`" in refused.problem
    assert refused.done.tolist() == [APPLIED_0] * 4  # computed without an edit
    check_taken(engine.take("fits"), [fits])
    # There is room again.
    again = Fake("again", plan_of([(POST, VECTORS[1], 1.0, EVERYWHERE)]))
    engine.add(again)
    engine.step([(again, 4)])
    check_taken(engine.take("again"), [again])
    engine.session.check_integrity()


def test_a_plan_for_taps_of_other_ranks_asks_nothing_of_this_one():
    plan = plan_of(
        edits=[(("resid_post", 9), VECTORS[0], 1.0, EVERYWHERE)],
        captures=[([("resid_post", 9)], EVERYWHERE)],
    )
    engine, fake = FakeEngine(), Fake("a", plan)
    engine.add(fake)
    engine.step([(fake, 3)])
    request = engine.take("a")[0]
    assert request.blocks == []
    assert request.problem == ""
    assert request.done.tolist() == [0, 0, 0]
