"""Room for captured rows, as the front end counts it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.plans import VECTORS, add, mapped, plan_of
from support.stored import worker_info

from midstream.config.config import Config
from midstream.errors import SpecError
from midstream.ops.layout import Flags, Op
from midstream.plan import Capture, Instruction, ModelShape, Plan, ResolvedPlan, Vector
from midstream.plan.resolved import Pattern
from midstream.runtime.frontend.request.admission import Admission
from midstream.runtime.frontend.request.budget import (
    CapacityBudget,
    Need,
    RowLimit,
    check_returned,
    check_rows,
    max_row_bytes,
    need_of,
    prompt_bytes,
    returned_captures,
    row_limit,
)
from midstream.runtime.protocol.segments import RankShare, Room, cut

PRE, POST = ("resid_pre", 0), ("resid_post", 1)
ROOM = Room(64, 64, 64, 64, 4)


def shape(dtype: str = "float32") -> ModelShape:
    """A model 8 wide."""
    return ModelShape(8, 8, (), dtype=dtype)


def worker(tensor_rank: int, arena_bytes: int, held: int = 0):
    info = worker_info(tensor_rank=tensor_rank, arena_bytes=arena_bytes)
    return SimpleNamespace(info=info, held=held, arena_bytes=arena_bytes)


def need(rows: int) -> Need:
    kinds = ("bank_rows", "programs", "groups", "max_edits", "token_ids")
    return Need({kind: {} for kind in kinds}, {"rows": rows})


W = Vector.parse([1.0] * 16)
OTHER = Vector.parse([2.0] * 16)


def needed(*edits, room=ROOM, hidden=4) -> Need:
    return need_of(plan_of(edits), {PRE: 0, POST: 1}, room, 64, hidden)


CODE = Instruction(Op.CODE, read=W, flags=Flags.FRESH)
MADE = Instruction(Op.RECONSTRUCT, a=1.0, b=1.0, flags=Flags.COUNTED)


def test_one_sae_at_a_time_reconstructs_a_token():
    taps = {("mlp_in", 0): 0, ("resid_mid", 0): 1, ("mlp_out", 0): 2, ("mlp_in", 1): 3, POST: 4}
    steer, everywhere, there = add(VECTORS[1]), ((0, 9),), ((9, 12),)
    sae, reads, writes = (CODE, MADE), (CODE,), (MADE,)

    def check(*edits):
        return need_of(plan_of(edits), taps, ROOM, 64, 4)

    transcoder = ((("mlp_in", 0), reads, everywhere), (("mlp_out", 0), writes, everywhere))
    check(*transcoder, (POST, sae, everywhere), (("mlp_in", 1), sae, everywhere))
    check((POST, sae, everywhere), (POST, steer, everywhere), (POST, sae, there))
    check(*transcoder, (("resid_mid", 0), sae, there), (("mlp_out", 0), steer, everywhere))
    first = "must be the first edit of a token"
    for edits, problem in (
        (((POST, steer, everywhere), (POST, sae, everywhere)), first),
        (((POST, sae, everywhere), (POST, sae, ((8, 9),))), first),
        (((POST, sae, everywhere), (POST, mapped(W), everywhere)), "first edit"),
        ((*transcoder, (("mlp_out", 0), sae, everywhere)), "another is at mlp_out"),
        ((*transcoder, (("resid_mid", 0), sae, everywhere)), "another is at resid_mid"),
    ):
        with pytest.raises(SpecError, match=problem):
            need_of(plan_of(edits), taps, Room(64, 64, 64, 64, 4, maps=1), 64, 4)


def test_no_rank_has_more_groups_of_captures_than_are_counted():
    taps, everywhere = {PRE: 0, POST: 1}, ((0, None),)

    def made(kind: str, *reads) -> ResolvedPlan:
        (capture,) = plan_of(captures=[(reads, everywhere)]).captures
        pattern = Pattern(kind, 1, (), (), tuple(reads), (1,) * len(reads))
        return replace(plan_of(), captures=(replace(capture, pattern=pattern),))

    both, one = (plan_of(captures=[(each, everywhere)]) for each in ((PRE, POST), (POST,)))
    plans = [both, replace(both, sharded=True), one, made("norm", PRE, POST), made("lens", POST)]
    for ranks in (1, 2):
        budget, pieces = CapacityBudget(ROOM), {}
        for plan in plans:
            budget.take(need_of(plan, taps, ROOM, 64, 4, ranks))
            for rank in range(ranks):
                cuts = cut(plan, taps, RankShare(rank, ranks))
                pieces.setdefault(rank, set()).update(one.captured for one in cuts if one.captured)
        most = max(map(len, pieces.values()))
        assert budget.used["groups"] >= most
        assert ranks > 1 or budget.used["groups"] == most


def test_matrices_are_counted_by_themselves_each_once():
    room = Room(64, 64, 64, 64, 4, maps=2)
    found = needed(
        (PRE, mapped(W), ((0, 2),)), (POST, mapped(W), ((0, 2),)), (PRE, mapped(OTHER), ((2, 4),)),
        room=room,
    )  # fmt: skip
    assert found.total("maps") == 2
    assert found.total("bank_rows") == 1, "the shift, which they share"
    budget = CapacityBudget(room)
    budget.take(found)
    assert not budget.fits(needed((PRE, mapped(Vector.parse([3.0] * 16)), ((0, 1),)), room=room))
    assert budget.fits(needed((PRE, mapped(W), ((5, 6),)), room=room))


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ([(PRE, mapped(W), ((0, 2),))], "needs 1 matrices, and there is room for 0; .* maps"),
        (
            [(PRE, add(), ((1, 2),)), (PRE, mapped(W), ((0, 2),))],
            "must be the first edit .* comes before it at resid_pre of layer 0 .server-wide",
        ),
        ([(PRE, mapped(W), ((0, 2),)), (PRE, mapped(OTHER), ((1, 3),))], "the only one with a"),
    ],
)
def test_a_matrix_without_room_or_of_what_was_edited_before_is_refused(edits, message):
    with pytest.raises(SpecError, match=message):
        needed(*edits)


def test_a_matrix_may_follow_edits_of_other_sites_and_tokens_and_be_followed_by_any():
    edits = [(PRE, add(), ((0, 1),)), (POST, add(), ((0, 9),)), (PRE, mapped(W), ((1, 9),))]
    found = needed(*edits, (PRE, add(VECTORS[1]), ((0, 9),)), room=Room(64, 64, 64, 64, 4, maps=1))
    assert found.total("maps") == 1


def test_a_matrix_wider_than_the_stream_is_refused():
    with pytest.raises(SpecError, match="as wide as the residual stream, 2, .* have 4 numbers"):
        needed((PRE, mapped(W), ((0, 2),)), room=Room(64, 64, 64, 64, 4, maps=1), hidden=2)


def test_the_most_that_a_plan_can_capture_is_counted_once_for_each_tap_and_position():
    plan = plan_of(captures=[([PRE, POST], ((0, 4),)), ([POST], ((2, None),))])
    # PRE: positions 0–3; POST: 0–9, although two captures name 2 and 3.
    assert max_row_bytes(plan, shape("bfloat16"), 10, 1) == (4 + 10) * 16
    assert max_row_bytes(plan, shape(), 3, 1) == (3 + 3) * 32
    assert max_row_bytes(replace(plan, codec="full8"), shape(), 10, 1) == 14 * (8 + 8)
    assert max_row_bytes(plan_of(), shape(), 10, 1) == 0


def test_of_what_ranks_share_the_part_of_the_first_is_counted_and_of_the_rest_all():
    three = [("resid_pre", layer) for layer in range(3)]
    plan = plan_of(captures=[(three, ((0, 4),)), ([POST], ((2, None),))])
    assert max_row_bytes(plan, shape(), 10, 2) == (3 * 4 + 8) * 32
    shared = replace(plan, sharded=True)
    # Of two ranks the first moves 2 of 3 vectors at positions 0 and 1, 2 of 4 at 2 and 3, then 1.
    assert max_row_bytes(shared, shape(), 10, 2) == (2 * 2 + 2 * 2 + 6) * 32
    assert max_row_bytes(shared, shape(), 10, 4) == (2 + 2 + 6) * 32
    assert max_row_bytes(shared, shape(), 10, 1) == max_row_bytes(plan, shape(), 10, 1)


def test_all_workers_that_capture_have_room_and_one_request_half_of_it():
    workers = [worker(0, 1000, 10), worker(1, 5000, 77), worker(0, 3000, 20)]
    room = row_limit(workers, Config())
    assert room.limits["rows"] == 4000
    assert room.held() == 30
    check_rows(need(2000), room)
    with pytest.raises(SpecError, match=r"may take 2001 bytes, .* room for 2000; .*spill"):
        check_rows(need(2001), room)


def test_requests_wait_where_gates_would_need_more_states_than_the_setting():
    limit = row_limit([], Config(gate_states=5))
    budget, one = CapacityBudget(ROOM, limit), Need({}, {"gate_states": 2})
    assert budget.fits(one.times(2))
    budget.take(one)
    assert not budget.fits(one.times(2))
    assert budget.fits(one)
    budget.release_tables(one)
    assert budget.fits(one.times(2))
    with pytest.raises(SpecError, match="need 6 states .* room for 5; .* setting gate_states"):
        check_rows(one.times(3), limit)
    lenses = row_limit([worker(0, 1000)], Config(readout_rows=50))
    check_rows(Need({}, {"readout_rows": 50}), lenses)
    with pytest.raises(SpecError, match=r"may read 51 rows .* room for 50; .*setting readout_rows"):
        check_rows(Need({}, {"readout_rows": 51}), lenses)


@pytest.mark.parametrize("overflow", ["spill", "drop"])
def test_where_rows_may_go_elsewhere_nobody_waits(overflow):
    room = row_limit([worker(0, 10)], Config(overflow=overflow))
    assert "rows" not in room.limits
    check_rows(need(10**12), room)
    assert CapacityBudget(ROOM, room).fits(need(10**12))


def test_rows_are_in_the_way_until_they_are_fetched_and_what_readers_hold_until_they_let_go():
    held = [0]
    admission = Admission([CapacityBudget(ROOM, RowLimit({"rows": 100}, lambda: held[0]))])
    sent: list[str] = []
    for name in "abc":
        admission.submit(name, need(50), lambda name=name: sent.append(name))
    assert sent == ["a", "b"]
    admission.end(["a"])
    assert sent == ["a", "b"], "its rows have not been fetched"
    held[0] = 40
    admission.finish(["a"])
    assert sent == ["a", "b"], "a reader has them"
    held[0] = 0
    admission.finish(["nobody"])
    assert sent == ["a", "b", "c"]
    admission.finish(["b", "c"])
    assert admission._budgets[0].counts["rows"] == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60), st.booleans()), max_size=40))
def test_no_more_than_there_is_room_for_is_ever_inside(steps):
    budget = CapacityBudget(ROOM, RowLimit({"rows": 100}, lambda: 0))
    admission, inside = Admission([budget]), {}
    for name, rows, ends in steps:
        uid = str(name)
        if ends or uid in inside or admission.is_waiting(uid):
            inside.pop(uid, None)
            admission.finish([uid])
        else:
            admission.submit(uid, need(rows), lambda uid=uid, rows=rows: inside.update({uid: rows}))
        assert budget.counts["rows"] == sum(inside.values()) <= 100
    for uid in [*inside, *"012345"]:
        inside.pop(uid, None)
        admission.finish([uid])
    assert budget.counts["rows"] == 0 or inside


@given(st.data())
def test_running_plans_take_the_union_of_their_things_whether_or_not_they_share_a_need(data):
    vectors = st.dictionaries(st.integers(0, 6), st.just(2), min_size=1, max_size=4)
    needs = data.draw(st.lists(vectors, min_size=1, max_size=4))
    # A plan that requests share, and plans that are equal.
    plans = [Need({"bank_rows": dict(each)}) for each in needs for _ in range(2)]
    budget, running = CapacityBudget(Room(10, 64, 64, 64, 4)), []
    turns = st.lists(st.tuples(st.booleans(), st.integers(0, 99)), min_size=20, max_size=40)
    for ends, nth in data.draw(turns):
        if ends and running:
            budget.release_tables(running.pop(nth % len(running)))
        else:
            one = plans[nth % len(plans)]
            union = {thing for each in (*running, one) for thing in each.kinds["bank_rows"]}
            assert budget.fits(one) == (2 * len(union) <= 10)
            if budget.fits(one):
                budget.take(one)
                running.append(one)
        taken = {thing for each in running for thing in each.kinds["bank_rows"]}
        assert budget.used["bank_rows"] == 2 * len(taken)


def test_rows_of_a_prompt_that_can_never_be_returned_are_rejected_before_they_are_computed():
    plan = replace(plan_of(captures=[([PRE, POST], ((0, None),))]), prompt_len=5)
    own = Plan((Capture("all"),))
    size = 2 * 5 * 8 * 4
    returned = prompt_bytes(plan, returned_captures(plan, own), shape())
    assert returned == size
    check_returned(returned, size)
    with pytest.raises(SpecError, match=rf"{size} bytes.*returns at most {size - 1}") as caught:
        check_returned(returned, size - 1)
    assert caught.value.path == "capture"
    stored = Plan((Capture("all", sink="store"),))
    assert prompt_bytes(plan, returned_captures(plan, stored), shape()) == 0
