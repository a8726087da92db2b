"""Faults of what operators and evaluations use; see `support.faults`."""

from __future__ import annotations

from support.fault import Fault

FOLDER = "tests/unit/steering/test_shared_folder.py::"
SERVER = "tests/unit/server/test_operations.py::"
LOGGED = "tests/lab/harness/test_logged.py::"

OPERATIONS: tuple[Fault, ...] = (
    Fault(
        "A change on one server is not seen on the others",
        "SharedFolder._publish",
        "self._counter[0] = version",
        "",
        FOLDER + "test_a_vector_and_an_edit_of_one_hold_on_all_when_the_call_returns",
    ),
    Fault(
        "A server changes the shared folder while another one does",
        "SharedFolder._locked",
        "fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        FOLDER + "test_a_lock_that_is_not_released_is_busy",
    ),
    Fault(
        "A change that a killed server did not announce is overwritten",
        "SharedFolder._load_last",
        """
        self._load()
        self._counter[0] = self._read
        """,
        "self.refresh",
        FOLDER + "test_a_change_that_was_not_announced_holds_with_the_next_one",
    ),
    Fault(
        "A change that the disk had no room for holds on one server",
        "SharedFolder.changing",
        "self._vectors.entries, self._steering.state = before",
        "",
        FOLDER + "test_a_full_disk_changes_nothing",
    ),
    Fault(
        "A server that shuts down is ready",
        "Server.is_ready",
        "llm is not None and not llm.errored and not llm.intake.is_closed",
        "llm is not None and not llm.errored",
        SERVER + "test_a_server_is_ready_until_its_engine_fails_or_it_shuts_down",
    ),
    Fault(
        "A vector by value is in the log of an evaluation",
        "_has_numbers",
        'return "f32" in value or any(map(_has_numbers, value.values()))',
        "return any(map(_has_numbers, value.values()))",
        LOGGED + "test_numbers_and_mistakes_are_rejected_before_anything_is_sent",
    ),
    Fault(
        "The first request of a plan that ends releases the capacity of the others",
        "CapacityBudget.release_tables",
        """
        if self._requests[id(need.kinds)]:
            return
        """,
        "",
        "tests/unit/runtime/frontend/request/test_budget.py"
        "::test_running_plans_take_the_union_of_their_things_whether_or_not_they_share_a_need",
    ),
    Fault(
        "Rows make room for others before they are fetched",
        "CapacityBudget.release_tables",
        "if name != ROWS:",
        "if True:",
        "tests/unit/runtime/frontend/request/test_budget.py"
        "::test_rows_are_in_the_way_until_they_are_fetched_and_what_readers_hold_until_they_let_go",
    ),
    Fault(
        "Requests of several completions take the states of gates once",
        "Need.times",
        "count * amount",
        "amount",
        "tests/unit/runtime/frontend/request/test_budget.py"
        "::test_requests_wait_where_gates_would_need_more_states_than_the_setting",
    ),
    Fault(
        "The hooks of the server are not installed with those of the engine",
        "activate",
        """
        for install in INSTALLERS:
            install()
        """,
        "",
        "tests/unit/test_plugin.py::test_enabled_the_hooks_are_in_and_no_others",
    ),
    Fault(
        "Each rank's rows of a parameter are placed at the beginning of what was requested",
        "read_parameter",
        "at = slice(piece.first - first, piece.first - first + rows.shape[0])",
        "at = slice(0, rows.shape[0])",
        "tests/unit/runtime/frontend/rpc/test_parameters.py"
        "::test_a_parameter_is_put_together_from_any_split_over_ranks_and_parts",
    ),
)
