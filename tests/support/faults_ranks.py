"""Faults of ranks that must do the same, and of the loops of an engine's processes; see `faults`."""

from __future__ import annotations

from support.fault import Fault

RANKS: tuple[Fault, ...] = (
    Fault(
        "Groups of captures are counted as one rank has them, and a request that was let in fails",
        "need_of",
        "piece.captured if ranks == 1 else piece.shared(plan.sharded)",
        "piece.captured",
        "tests/unit/runtime/frontend/request/test_budget.py"
        "::test_no_rank_has_more_groups_of_captures_than_are_counted",
    ),
    Fault(
        "A rank of a tensor-parallel group runs vLLM's own model beside ranks that capture",
        "cut",
        "PlanSegment(start, end, edits, mine, scored, reads, bool(here))",
        "PlanSegment(start, end, edits, mine, scored, reads, bool(edits or mine or reads))",
        "tests/unit/runtime/protocol/test_segments.py"
        "::test_all_ranks_run_the_tapped_model_at_the_same_positions",
    ),
    Fault(
        "A rank that cannot run a request's plan runs vLLM's own model beside ranks that can",
        "PlanTable.without_work",
        "bare = [piece._replace(edits=(), taps=(), scored=False, patterns=()) for piece in pieces]",
        "[piece._replace(edits=(), taps=(), scored=False, patterns=()) for piece in pieces]",
        "tests/unit/runtime/worker/test_rank_check.py"
        "::test_a_rank_that_cannot_run_a_plan_runs_the_tapped_model_where_others_do",
    ),
    Fault(
        "Ranks that run different models are not found out",
        "RankChecksum.add_step",
        "[plan is not None, runs]",
        "[one for one in runs if one[-1]]",
        "tests/unit/runtime/worker/test_rank_check.py::test_a_rank_that_runs_another_model_is_found",
    ),
    Fault(
        "Each step of an engine maps and unmaps memory for the frames of its calls",
        "activate",
        "loop = with_room_for_calls(_unchanged)",
        "loop = _unchanged",
        "tests/system/test_call_frames.py"
        "::test_the_engine_core_and_each_worker_make_room_once_and_not_for_each_step",
    ),
)
