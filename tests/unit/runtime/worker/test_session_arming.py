"""What stays armed from step to step, scores that travel, and edits that depend on token ids."""

import pytest
from support.fake_steps import Fake, FakeEngine, SlowTransport, check_taken, view_of
from support.plans import VECTORS, plan_of, rows

from midstream.ops import layout
from midstream.plan import Match, Where
from midstream.runtime.protocol.segments import APPLIED_0, RankShare
from midstream.runtime.worker.rank_agreement import RankLinks
from midstream.runtime.worker.session import StepRules, WorkerSession
from midstream.runtime.worker.step import armed_buffers

EVERYWHERE = ((0, None),)
PRE, POST = ("resid_pre", 0), ("resid_post", 1)
STEER = plan_of(edits=[(POST, VECTORS[0], 2.0, EVERYWHERE)])
READ = plan_of(captures=[([POST], EVERYWHERE)])
SCORED = ("p", POST, EVERYWHERE)


def ids(*wanted, start=0, others=False):
    """Tokens from `start` on, by their ids."""
    return Where((), (Match(((start, None),), wanted, others),))


def run(engine, *batch):
    """One step, of (fake, count)."""
    engine.step(list(batch))


@pytest.fixture
def uploads(monkeypatch):
    """Rows of `tokens` each time they are sent to the device."""
    sent = []
    real = armed_buffers.upload

    def note(target, values):
        if target.shape[-1] == layout.TOKEN_COLUMNS and target.ndim == 2:
            sent.append(target.shape[0])
        real(target, values)

    monkeypatch.setattr(armed_buffers, "upload", note)
    return sent


def test_edits_stay_armed_while_decode_steps_are_alike_and_nothing_is_sent(uploads):
    engine, one, two = FakeEngine(), Fake("1", STEER), Fake("2", STEER)
    engine.add(one)
    engine.add(two)
    run(engine, (one, 3), (two, 2))
    assert uploads == [5]
    for _ in range(4):
        run(engine, (one, 1), (two, 1))
    assert uploads == [5, 2]
    run(engine, (one, 1))
    assert uploads == [5, 2, 1]
    assert not bool(engine.buffers.tokens[1:].any())
    check_taken(engine.take("1"), [one])
    check_taken(engine.take("2"), [two])


def test_rows_by_position_are_sent_anew_in_every_step_of_theirs_and_only_there(uploads):
    plan = plan_of(edits=[(POST, rows(4, 2), ((2, 6),)), (PRE, VECTORS[0], 1.0, EVERYWHERE)])
    engine, fake = FakeEngine(), Fake("a", plan)
    engine.add(fake)
    for _ in range(9):
        run(engine, (fake, 1))
    # Positions 0 and 1 are alike, as are 6 and later.
    assert len(uploads) == 1 + 4 + 1
    check_taken(engine.take("a"), [fake])


def test_rows_are_in_the_part_of_the_ring_that_their_step_reserved_though_nothing_is_sent(uploads):
    engine, fake = FakeEngine(lag=9), Fake("a", READ)
    engine.buffers.ring.fill_(-7)
    engine.add(fake)
    for step in range(1, 7):
        run(engine, (fake, 2))
        written = (engine.buffers.ring != -7).any(1)
        assert bool(written[: 2 * step].all())
        assert not bool(written[2 * step :].any())
    assert uploads == [2]
    check_taken(engine.take("a"), [fake])


def test_what_every_forward_is_armed_for_is_neither_disarmed_nor_set_again(uploads):
    engine = FakeEngine()
    armed = engine.session._recorder._armed
    armed._only_armed = True
    fake, filled = Fake("a", plan_of(captures=[([POST], EVERYWHERE)])), []
    armed._set_first = filled.append
    engine.add(fake)
    for _ in range(4):
        engine.session.before_forward(view_of(["a"], [1], [fake.computed]))
        engine.forward(1)
        engine.session.after_forward()
        engine.session.before_forward(view_of(["plain"], [1], [0]))  # taps do not fire here
        engine.session.after_forward()
        engine.session.check_integrity()
        fake.computed += 1
    assert uploads == [1]
    assert filled == [0] * 4


@pytest.fixture
def shipped(monkeypatch):
    """Rows of scores of each shipment."""
    sent = []
    real = SlowTransport.ship

    def ship(self, parcels, tally, scores):
        sent.append(scores.shape[0])
        return real(self, parcels, tally, scores)

    monkeypatch.setattr(SlowTransport, "ship", ship)
    return sent


def test_a_rank_that_does_not_capture_edits_all_the_same_and_ships_nothing(shipped):
    plan = plan_of([(POST, VECTORS[0], 2.0, EVERYWHERE)], [([POST], EVERYWHERE)], [SCORED])
    engine, fake = FakeEngine(lag=0), Fake("a", plan)
    engine.session = WorkerSession(engine.memory, StepRules(64), RankLinks(RankShare(1, 2)))
    engine.add(fake)
    run(engine, (fake, 4))
    request = engine.take("a")[0]
    assert shipped == [0]
    assert request.blocks == request.scores == []
    assert request.problem == ""
    assert request.done.tolist() == fake.done == [APPLIED_0 + 2] * 4


def test_scores_travel_only_in_steps_that_have_some(shipped):
    engine = FakeEngine(lag=0)
    scores, steers = Fake("p", plan_of(probes=[("p", POST, ((0, 2),))])), Fake("s", STEER)
    for fake in (scores, steers):
        engine.add(fake)
    for _ in range(3):
        run(engine, (scores, 1), (steers, 1))
    assert shipped == [2, 2, 0]


def test_ids_are_asked_for_only_in_steps_that_have_an_edit_by_id():
    plan = plan_of(edits=[(POST, VECTORS[0], 1.0, ids(1, start=4))], prompt_len=4)
    engine, fake = FakeEngine(), Fake("a", plan)
    engine.add(fake)
    engine.session.before_forward(view_of(["a"], [4], [0]))  # without ids
    engine.forward(4)
    engine.session.after_forward()
    with pytest.raises(AssertionError, match="token ids were asked for"):
        engine.session.before_forward(view_of(["a"], [1], [4]))


def test_a_count_outside_of_what_ids_allow_is_found():
    where = Where(((0, 4),), (Match(((4, None),), (1,)),))
    plan = plan_of(
        edits=[(POST, VECTORS[0], 1.0, where), (PRE, VECTORS[1], 1.0, EVERYWHERE)], prompt_len=4
    )
    for column, problem in ((0, "position 4: expected 1 to 2 edits"), (1, "counted 0 and 0")):
        engine, fake = FakeEngine(), Fake("a", plan)
        engine.add(fake)
        run(engine, (fake, 4))
        # The device leaves out every edit: fewer than the one that does not depend on the id.
        engine.buffers.table[:, :, layout.EDIT_COUNT] = 0
        engine.session.before_forward(view_of(["a"], [1], [4], [column]))
        engine.forward(1)
        engine.session.after_forward()
        assert problem in engine.take("a")[0].problem
