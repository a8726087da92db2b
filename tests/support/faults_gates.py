"""Faults of gates with memory. See `faults`."""

from __future__ import annotations

from support.fault import Fault

_ENGINE = "tests/engine/test_gate_memory.py::"
_SCAN = "tests/unit/ops/test_scan.py::"
_LOOP = _SCAN + "test_scores_are_those_of_a_loop_over_the_tokens_however_the_steps_are_cut"

GATES: tuple[Fault, ...] = (
    Fault(
        "A gate goes on from the state of a draft token that was rejected",
        "_State.__init__",
        "marks[marks > position] = 0",
        "",
        _LOOP,
    ),
    Fault(
        "A gate forgets at the end of each step",
        "scan_ref",
        "state.keep(int(position))",
        "",
        _LOOP,
    ),
    Fault(
        "A gate with memory goes on at the sites of other gates too",
        "scan_ref",
        "is_here = armed[:, layout.SCAN_SITE] == site[0, layout.CODE]",
        "is_here = armed[:, layout.SCAN_SITE] != 0",
        _LOOP,
    ),
    Fault(
        "Rows of an ended request stay armed for the gate of another",
        "GateStates.release",
        "self._runs = None",
        "",
        "tests/unit/runtime/worker/test_gate_states.py"
        "::test_a_request_with_the_slot_of_an_ended_one_is_armed_though_the_step_has_the_same_rows",
    ),
    Fault(
        "Decode steps with edits by position keep the positions of the first",
        "StepPlanner._repeat",
        "plan.tokens[plan.active, layout.POSITION] = read",
        "",
        "tests/unit/runtime/worker/step/test_step_planner.py"
        "::test_edits_by_position_are_laid_out_once_for_decode_steps_and_get_their_positions",
    ),
    Fault(
        "The kernel of gates with memory reads rows of a tile that another program edits",
        "scan_kernel",
        "programs == program",
        "rows < stop",
        "tests/unit/ops/test_site_triton.py"
        "::test_the_interpreted_kernels_do_what_their_references_do",
    ),
    Fault(
        "The prefix cache serves tokens that a gate with memory must read",
        "probed",
        "probe.name or probe.is_scan",
        "probe.name",
        _ENGINE + "test_cached_prompts_are_used_up_to_the_first_token_that_is_read",
    ),
    Fault(
        "A request gets the state that the gate of an ended request left",
        "GateStates.acquire",
        "states.index_fill_(0, on_device(torch.from_numpy(free), states.device), 0)",
        "",
        _ENGINE + "test_gates_remember_earlier_tokens_as_a_loop_does",
    ),
    Fault(
        "A gate with memory reads tokens that its edit does not select by their ids",
        "segments:_parts",
        "if index is not None and probe.is_scan:",
        "if False:",
        _ENGINE + "test_tokens_that_an_edit_does_not_select_leave_its_gate_as_it_is",
    ),
    Fault(
        "Other gates move the score of a gate with memory, so that an update is rejected",
        "_memory_first",
        "not remembers[index]",
        "0",
        "tests/unit/plan/resolve/test_resolve_gates.py"
        "::test_the_score_of_a_gate_with_memory_keeps_its_column_whatever_other_gates_there_are",
    ),
    Fault(
        "Ended requests never get their results if the last one that runs is aborted",
        "FrontEnd.after_abort",
        "if is_wanted and not self._has_unfinished():",
        "if False:",
        "tests/engine/test_updates.py"
        "::test_requests_that_ended_have_their_results_once_the_last_other_one_is_aborted",
    ),
)
