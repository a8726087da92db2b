"""Faults of what operators and evaluations use; see `support.faults`."""

from __future__ import annotations

from support.fault import Fault

FOLDER = "tests/unit/steering/test_shared_folder.py::"
SERVER = "tests/unit/server/test_operations.py::"
LOGGED = "tests/unit/harness/test_logged.py::"

OPERATIONS: tuple[Fault, ...] = (
    Fault(
        "A change on one server is not seen on the others",
        "steering/shared_folder.py",
        "        self._counter[0] = version\n",
        "",
        FOLDER + "test_a_vector_and_an_edit_of_one_hold_on_all_when_the_call_returns",
    ),
    Fault(
        "A server changes the shared folder while another one does",
        "steering/shared_folder.py",
        "fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        FOLDER + "test_a_lock_that_is_not_released_is_busy",
    ),
    Fault(
        "A change that a killed server did not announce is overwritten",
        "steering/shared_folder.py",
        "            self._load()\n            self._counter[0] = self._read\n",
        "            self.refresh\n",
        FOLDER + "test_a_change_that_was_not_announced_holds_with_the_next_one",
    ),
    Fault(
        "A change that the disk had no room for holds on one server",
        "steering/shared_folder.py",
        "                self._vectors.entries, self._steering.state = before\n",
        "",
        FOLDER + "test_a_full_disk_changes_nothing",
    ),
    Fault(
        "A server that shuts down is ready",
        "server/server.py",
        " and not llm.intake.is_closed",
        "",
        SERVER + "test_a_server_is_ready_until_its_engine_fails_or_it_shuts_down",
    ),
    Fault(
        "A vector by value is in the log of an evaluation",
        "harness/logged.py",
        '"f32" in value or ',
        "",
        LOGGED + "test_numbers_and_mistakes_are_rejected_before_anything_is_sent",
    ),
)
