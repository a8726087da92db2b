"""That ranks which were told, or do, different things are found out, and others are not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.fake_steps import TAPS, Fake, FakeEngine
from support.plans import VECTORS, plan_of
from support.stored import worker_info

from midstream.errors import RankError
from midstream.runtime.frontend.rpc.fetch import check_traces
from midstream.runtime.protocol.segments import RankShare
from midstream.runtime.worker.rank_check import RankChecksum
from midstream.runtime.worker.session import WorkerSession

(PRE, POST), EVERYWHERE = (list(TAPS)[0], list(TAPS)[-1]), ((0, None),)
STEER = plan_of(edits=[(POST, VECTORS[0], 2.0, EVERYWHERE)], captures=[([PRE, POST], EVERYWHERE)])
OTHER = plan_of(edits=[(POST, VECTORS[1], 2.0, EVERYWHERE)], captures=[([PRE, POST], EVERYWHERE)])
WORKERS = [worker_info(tensor_rank=rank) for rank in range(2)]


class Rank:
    """One rank at work on steps that never run: only the planning is looked at."""

    def __init__(self, share: RankShare, taps=TAPS) -> None:
        engine = FakeEngine()
        self.trace = RankChecksum()
        engine.session = WorkerSession(
            engine.buffers, taps, engine.transport, engine.arena, 64, share, self.trace
        )
        self.engine = engine

    def add(self, name: str, plan=STEER, uid: str = "") -> Fake:
        fake = Fake(name, plan, uid=uid) if uid else Fake(name, plan)
        self.engine.add(fake)
        return fake

    def step(self, *batch: tuple[Fake, int]) -> None:
        self.engine.session.before_forward(self.engine.view(list(batch)))
        for fake, count in batch:
            fake.computed += count

    @property
    def answer(self):
        return self.trace.marks


def two() -> tuple[Rank, Rank]:
    return Rank(RankShare(0, 2)), Rank(RankShare(1, 2))


def check(*ranks: Rank, workers=WORKERS) -> None:
    check_traces(workers, [rank.answer for rank in ranks])


@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_that_share_captures_differ_in_nothing_else(sharded):
    ranks = two()
    for rank in ranks:
        fake = rank.add("a", replace(STEER, sharded=sharded))
        rank.step((fake, 4))
        rank.step((fake, 1))
    check(*ranks)
    assert ranks[0].trace.marks[-1].step == 2


def test_another_plan_is_found_even_before_a_row_of_it_is_computed():
    first, second = two()
    fakes = first.add("a"), second.add("a")
    first.add("b", STEER)
    second.add("b", OTHER)
    first.step((fakes[0], 2))
    second.step((fakes[1], 2))
    with pytest.raises(
        RankError,
        match=r"by step 1 worker 0\.0\.1 received other requests or batches than .*0\.0\.0",
    ):
        check(first, second)


def test_another_batch_is_found():
    first, second = two()
    for rank, count in ((first, 2), (second, 3)):
        rank.step((rank.add("a"), count))
    with pytest.raises(RankError, match="received other requests"):
        check(first, second)


def test_another_uid_is_found():
    first, second = two()
    first.step((first.add("a", uid="one"), 2))
    second.step((second.add("a", uid="two"), 2))
    with pytest.raises(RankError, match="received other requests"):
        check(first, second)


def test_a_rank_that_leaves_out_an_edit_is_found_though_it_was_told_the_same():
    first, second = two()
    for rank in (first, second):
        fake = rank.add("a")
        if rank is second:
            rank.engine.session._tables.edits_of = lambda index: ()
        rank.step((fake, 2))
    with pytest.raises(
        RankError, match=r"worker 0\.0\.1 executed other operations than worker 0\.0\.0"
    ):
        check(first, second)


def test_stages_of_a_pipeline_do_different_things_and_are_told_the_same():
    taps = {tap: nth for nth, tap in enumerate(list(TAPS)[:1])}
    first, second = Rank(RankShare(0, 1)), Rank(RankShare(0, 1), taps)
    for rank in (first, second):
        rank.step((rank.add("a"), 2))
    assert first.trace.marks[-1].executed != second.trace.marks[-1].executed
    check(
        first,
        second,
        workers=[worker_info(stage=stage) for stage in range(2)],
    )


def test_a_rank_that_is_some_steps_ahead_is_compared_where_both_have_been():
    first, second = two()
    for rank in (first, second):
        fake = rank.add("a")
        rank.step((fake, 2))
    first.step((fake, 1))
    check(first, second)
    for _ in range(300):
        first.step((fake, 1))
    with pytest.raises(RankError, match=r"worker 0\.0\.0 is more than 256 steps ahead"):
        check(first, second)


def test_without_checksums_nothing_is_compared():
    check_traces(WORKERS, [[], []])
