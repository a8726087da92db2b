"""Faults of requests that change while they run; see `faults`."""

from __future__ import annotations

from support.fault import Fault

CORE = "tests/unit/runtime/core/test_plan_versions.py::"
ENGINE = "tests/engine/test_updates.py::"
CONTROLLERS = "tests/unit/runtime/core/test_controllers.py::"

LIVE: tuple[Fault, ...] = (
    Fault(
        "An update changes every running request with an id that a client chose twice",
        "server/running_requests.py",
        "        if (count := len({call.request for call in found})) > 1:\n",
        "        if (count := len({call.request for call in found})) > 99:\n",
        "tests/unit/server/routes/test_requests.py",
    ),
    Fault(
        "Blocks keep the keys of the edits that an update replaced",
        "runtime/core/plan_versions.py",
        "        del request.block_hashes[first:]\n",
        "",
        CORE + "test_blocks_are_hashed_again_from_where_a_version_begins",
    ),
    Fault(
        "A preempted request computes tokens again under edits that came later",
        "runtime/core/plan_versions.py",
        "    if request.num_preemptions:\n",
        "    if False:\n",
        ENGINE + "test_what_is_computed_again_after_a_preemption_is_as_it_was",
    ),
    Fault(
        "A plan reaches the workers before the vectors that an update brought",
        "runtime/core/plan_versions.py",
        "    if update.vectors is not None:\n",
        "    if False:\n",
        CORE + "test_the_engine_core_answers_for_the_requests_that_run",
    ),
    Fault(
        "A step repeats the program that an update replaced",
        "runtime/worker/step/slot_table.py",
        "            self._latest = None\n            last = dict(changed)\n",
        "            last = dict(changed)\n",
        ENGINE + "test_other_edits_hold_from_the_next_position_on",
    ),
    Fault(
        "A request takes the versions of an update for those of its neighbours with an equal plan",
        "runtime/worker/request_state.py",
        "            self.segments = list(self.segments)\n",
        "            pass\n",
        ENGINE + "test_scale_multiplies_the_edits_given_last",
    ),
    Fault(
        "A controller that failed is called again",
        "runtime/frontend/request/controller_run.py",
        "        self.is_over = True\n        problem =",
        "        problem =",
        "tests/unit/api/test_controller.py"
        "::test_a_failure_is_what_the_policy_says_and_it_is_not_called_again",
    ),
    Fault(
        "A controller that stopped its request is called again",
        "runtime/frontend/request/controller_run.py",
        '        if "stop" in asked:\n            self.is_over = True\n',
        '        if "stop" in asked:\n            pass\n',
        "tests/unit/api/test_controller.py"
        "::test_after_an_answer_that_stops_the_request_it_is_not_called_again",
    ),
    Fault(
        "A controller stops a later request that has the id of its own",
        "runtime/core/ended_requests.py",
        "if request is not None and uid_of(request.sampling_params) == asked.uid:",
        "if request is not None:",
        "tests/unit/runtime/core/test_ended_requests.py"
        "::test_one_that_ends_by_itself_before_ends_once_and_another_of_its_id_goes_on",
    ),
    Fault(
        "A request that its controller stopped has no last output",
        "runtime/core/ended_requests.py",
        "            add_end(outputs, request, reason)\n    return outputs\n",
        "            pass\n    return outputs\n",
        "tests/unit/runtime/core/test_ended_requests.py"
        "::test_they_end_with_the_tokens_of_the_next_step_and_no_others_do",
    ),
    Fault(
        "Requests with one controller share its state",
        "runtime/frontend/request/controller_run.py",
        "        self._decide = copy.copy(controller.decide)\n",
        "        self._decide = controller.decide\n",
        "tests/unit/api/test_controller.py::test_each_request_has_a_state_of_its_own",
    ),
    Fault(
        "A controller that still computes is called once more",
        "runtime/frontend/step_controllers.py",
        "            if one.call is not None or one.run.is_over:\n",
        "            if one.run.is_over:\n",
        "tests/unit/runtime/frontend/test_step_controllers.py"
        "::test_one_that_computes_delays_nobody_and_is_forgotten_with_its_request",
    ),
    Fault(
        "A controller is given the scores of positions that are computed again",
        "runtime/core/controllers.py",
        "        start, end = max(first, self.reached), min(",
        "        start, end = first, min(",
        CONTROLLERS + "test_a_position_is_given_once_and_a_rejected_draft_never",
    ),
    Fault(
        "A step waits for a controller that hangs",
        "runtime/core/controller_calls.py",
        "        if not batch.finished.wait(max(0.0, deadline - time.monotonic())):\n",
        "        if not batch.finished.wait(60):\n",
        CONTROLLERS + "test_a_step_waits_no_longer_than_the_limit_and_the_others_are_called_in_the_"
        "next_one",
    ),
    Fault(
        "The scores of a request behind a controller that hangs are lost",
        "runtime/core/controllers.py",
        "            if answered is not None:\n",
        "            if answered is None:\n                requests[nth].unseen.clear()\n            else:\n",
        CONTROLLERS + "test_a_step_waits_no_longer_than_the_limit_and_the_others_are_called_in_the_"
        "next_one",
    ),
    Fault(
        "A controller in the engine core that failed is called again",
        "runtime/core/controllers.py",
        "    one.has_failed = True\n",
        "",
        CONTROLLERS + "test_an_answer_is_a_version_a_stop_or_a_failure",
    ),
    Fault(
        "A controller that stops a request shows what was sampled after the score",
        "runtime/core/probe_stops.py",
        "        at = controller.reached - 1\n",
        "        at = controller.reached\n",
        "tests/engine/test_controllers.py"
        "::test_it_chooses_edits_by_name_and_stops_at_the_last_token_with_a_score",
    ),
    Fault(
        "A client changes the running request of another",
        "server/running_requests.py",
        " if call.client == client]",
        "]",
        "tests/unit/server/routes/test_requests.py::test_another_client_changes_nothing",
    ),
    Fault(
        "A receipt counts the edits of a version at positions where it did not hold",
        "runtime/frontend/results/held_plans.py",
        "        start = min(position, stop)\n",
        "        start = position\n",
        "tests/unit/runtime/frontend/results/test_held_plans.py"
        "::test_a_version_holds_until_the_next_begins",
    ),
    Fault(
        "A controller beside the engine never gets the scores of a prompt that waited",
        "runtime/frontend/step_controllers.py",
        "            if tokens:  # before the first, not all of the prompt was computed\n",
        "            if state is not None:\n",
        "tests/unit/runtime/frontend/test_step_controllers.py"
        "::test_scores_of_a_prompt_are_given_once_all_of_it_was_computed",
    ),
)
