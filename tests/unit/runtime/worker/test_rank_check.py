"""That ranks which were told, or do, different things are found out, and others are not."""

from dataclasses import replace

import pytest
from support.fake_steps import TAPS, Fake, FakeEngine
from support.plans import VECTORS, plan_of
from support.stored import worker_info

from midstream.errors import NoRoomError, RankError
from midstream.plan.resolve.wire import to_bytes
from midstream.runtime.frontend.rpc.fetch import check_traces
from midstream.runtime.protocol.plan_version import PlanChange
from midstream.runtime.protocol.segments import RankShare
from midstream.runtime.worker.plan_table import PlanTable
from midstream.runtime.worker.rank_agreement import RankLinks
from midstream.runtime.worker.rank_check import RankChecksum
from midstream.runtime.worker.request_state import idle_segment
from midstream.runtime.worker.session import StepRules, WorkerSession

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
            replace(engine.memory, taps=taps), StepRules(64), RankLinks(share, self.trace)
        )
        self.engine = engine

    def add(self, name: str, plan=STEER, uid: str = "") -> Fake:
        fake = Fake(name, plan, uid=uid) if uid else Fake(name, plan)
        self.engine.add(fake)
        return fake

    def step(self, *batch: tuple[Fake, int]) -> bool:
        runs_tapped = self.engine.session.before_forward(self.engine.view(list(batch)))
        for fake, count in batch:
            fake.computed += count
        return runs_tapped

    @property
    def answer(self):
        return self.trace.marks


def two() -> tuple[Rank, Rank]:
    return Rank(RankShare(0, 2)), Rank(RankShare(1, 2))


def fail(*_args):
    raise NoRoomError("", "there is no room")


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


ROW = plan_of(captures=[([POST], ((2, 5),))])


def test_a_rank_that_cannot_run_a_plan_runs_the_tapped_model_where_others_do(monkeypatch):
    """Until the request ends, which takes a step or two."""
    (first, second), models = two(), []
    for rank in (first, second):
        requests = rank.engine.session.requests
        fakes = [rank.add("changed", plan_of())]
        with monkeypatch.context() as patch:
            if rank is second:
                patch.setattr(PlanTable, "acquire", fail)
            fakes.append(rank.add("failed", ROW))
            requests.change([PlanChange("changed", "changed", 1, 2, to_bytes(ROW))])
        assert bool(requests.failures) == (rank is second)
        models += [[rank.step((fake, count)) for count in (2, 3, 1)] for fake in fakes]
    changed, failed = models[::2], models[1::2]
    assert changed == failed == [[False, True, False]] * 2


def test_a_rank_that_runs_another_model_is_found():
    first, second = two()
    for rank in (first, second):
        fake = rank.add("a", ROW)
        if rank is second:
            (request,) = rank.engine.session.requests.of_uids(["a"])
            request.segments = [idle_segment()]
            rank.engine.session._planner._slots.enter(request.slot, idle_segment())
        rank.step((fake, 3))
    with pytest.raises(RankError, match="executed other operations"):
        check(first, second)


@pytest.mark.parametrize("differs", ["rows", "uid", "a plan without a row so far"])
def test_another_batch_is_found(differs):
    first, second = two()
    for rank in (first, second):
        is_other = rank is second
        fake = rank.add("a", uid=f"u{is_other and differs == 'uid'}")
        rank.add("b", OTHER if is_other and differs.startswith("a plan") else STEER)
        rank.step((fake, 2 + (is_other and differs == "rows")))
    with pytest.raises(
        RankError,
        match=r"by step 1 worker 0\.0\.1 received other requests or batches than .*0\.0\.0",
    ):
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
    check(first, second, workers=[worker_info(stage=stage) for stage in range(2)])


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
