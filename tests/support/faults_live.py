"""Faults of requests that change while they run; see `faults`."""

from __future__ import annotations

from support.fault import Fault

CORE = "tests/unit/runtime/core/test_plan_versions.py::"
ENGINE = "tests/engine/test_updates.py::"
CONTROLLERS = "tests/unit/runtime/core/test_controllers.py::"

LIVE: tuple[Fault, ...] = (
    Fault(
        "An update changes every running request with an id that a client chose twice",
        "RunningRequests.find",
        "if (count := len({call.request for call in calls})) > 1:",
        "if (count := len({call.request for call in calls})) > 99:",
        "tests/unit/server/routes/test_requests.py",
    ),
    Fault(
        "Blocks keep the keys of the edits that an update replaced",
        "_set_keys",
        "del request.block_hashes[first:]",
        "",
        CORE + "test_blocks_are_hashed_again_from_where_a_version_begins",
    ),
    Fault(
        "A preempted request computes tokens again under edits that came later",
        "next_position",
        "if request.num_preemptions:",
        "if False:",
        ENGINE + "test_what_is_computed_again_after_a_preemption_is_as_it_was",
    ),
    Fault(
        "A plan reaches the workers before the vectors that an update brought",
        "_update",
        "if update.vectors is not None:",
        "if False:",
        CORE + "test_the_engine_core_answers_for_the_requests_that_run",
    ),
    Fault(
        "A step repeats the program that an update replaced",
        "SlotTable.change",
        "self._latest = None",
        "",
        ENGINE + "test_other_edits_hold_from_the_next_position_on",
    ),
    Fault(
        "A request takes the versions of an update for those of its neighbours with an equal plan",
        "RequestState.change",
        "self.segments = list(self.segments)",
        "pass",
        ENGINE + "test_scale_multiplies_the_edits_given_last",
    ),
    Fault(
        "A controller that failed is called again",
        "ControllerRun.fail",
        "self.is_over = True",
        "",
        "tests/unit/api/test_controller.py"
        "::test_a_failure_is_what_the_policy_says_and_it_is_not_called_again",
    ),
    Fault(
        "A controller that stopped its request is called again",
        "ControllerRun.changing",
        "self.is_over = True",
        "pass",
        "tests/unit/api/test_controller.py"
        "::test_after_an_answer_that_stops_the_request_it_is_not_called_again",
    ),
    Fault(
        "A controller stops a later request that has the id of its own",
        "stop_later",
        "request is not None and uid_of(request.sampling_params) == asked.uid",
        "request is not None",
        "tests/unit/runtime/core/test_ended_requests.py"
        "::test_one_that_ends_by_itself_before_ends_once_and_another_of_its_id_goes_on",
    ),
    Fault(
        "A request that its controller stopped has no last output",
        "ended_requests:update_from_output",
        "add_end(outputs, request, reason)",
        "pass",
        "tests/unit/runtime/core/test_ended_requests.py"
        "::test_they_end_with_the_tokens_of_the_next_step_and_no_others_do",
    ),
    Fault(
        "Requests with one controller share its state",
        "ControllerRun.__init__",
        "self._decide = copy.copy(controller.decide)",
        "self._decide = controller.decide",
        "tests/unit/api/test_controller.py::test_each_request_has_a_state_of_its_own",
    ),
    Fault(
        "A controller that still computes is called once more",
        "StepControllers.step",
        "if controlled.call is not None or controlled.run.is_over:",
        "if controlled.run.is_over:",
        "tests/unit/runtime/frontend/test_step_controllers.py"
        "::test_one_that_computes_delays_nobody_and_is_forgotten_with_its_request",
    ),
    Fault(
        "A controller is given the scores of positions that are computed again",
        "RunningController.take",
        "max(first, self.reached)",
        "first",
        CONTROLLERS + "test_a_position_is_given_once_and_a_rejected_draft_never",
    ),
    Fault(
        "A step waits for a controller that hangs",
        "DeclaredCalls.finish",
        "max(0.0, deadline - time.monotonic())",
        "60",
        CONTROLLERS + "test_a_step_waits_no_longer_than_the_limit_and_the_others_are_called_in_the_"
        "next_one",
    ),
    Fault(
        "The scores of a request behind a controller that hangs are lost",
        "controllers:decide",
        """
        if answered is not None:
            decisions[index] = requests[index].take_answer(answered.answer, answered.error)
        """,
        """
        if answered is None:
            requests[index].unseen.clear()
        else:
            decisions[index] = requests[index].take_answer(answered.answer, answered.error)
        """,
        CONTROLLERS + "test_a_step_waits_no_longer_than_the_limit_and_the_others_are_called_in_the_"
        "next_one",
    ),
    Fault(
        "A controller in the engine core that failed is called again",
        "_failed",
        "running.has_failed = True",
        "",
        CONTROLLERS + "test_an_answer_is_a_version_a_stop_or_a_failure",
    ),
    Fault(
        "A controller that stops a request shows what was sampled after the score",
        "_evaluate",
        "at = controller.reached - 1",
        "at = controller.reached",
        "tests/engine/test_controllers.py"
        "::test_it_chooses_edits_by_name_and_stops_at_the_last_token_with_a_score",
    ),
    Fault(
        "A client changes the running request of another",
        "RunningRequests.find",
        "[call for call in self._calls.values() if call.client == client]",
        "[call for call in self._calls.values()]",
        "tests/unit/server/routes/test_requests.py::test_another_client_changes_nothing",
    ),
    Fault(
        "A receipt counts the edits of a version at positions where it did not hold",
        "held_plans",
        "start = min(position, stop)",
        "start = position",
        "tests/unit/runtime/frontend/results/test_held_plans.py"
        "::test_a_version_holds_until_the_next_begins",
    ),
    Fault(
        "A controller beside the engine never gets the scores of a prompt that waited",
        "StepControllers.step",
        "if tokens:",
        "if state is not None:",
        "tests/unit/runtime/frontend/test_step_controllers.py"
        "::test_scores_of_a_prompt_are_given_once_all_of_it_was_computed",
    ),
)
