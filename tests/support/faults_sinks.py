"""Faults of sinks: rows that are lost, told as stored, or written elsewhere; see `faults`."""

from __future__ import annotations

from support.fault import Fault

SINKS: tuple[Fault, ...] = (
    Fault(
        "Rows are reported as stored before they are",
        "sinks/queue.py",
        "        self._written.append(entry)\n",
        "        self._report(entry, entry.result)\n",
        "tests/unit/sinks/test_queue.py::test_nothing_is_told_before_the_flush",
    ),
    Fault(
        "A full sink loses rows",
        "sinks/byte_budget.py",
        "            if self._used and self._used + size > self._most and not grant.cancelled():\n",
        "            if False:\n",
        "tests/unit/sinks/test_queue.py"
        "::test_a_slow_sink_makes_whoever_brings_more_wait_and_loses_nothing",
    ),
    Fault(
        "A sink gets rows of captures with another destination",
        "runtime/frontend/results/delivery.py",
        "np.flatnonzero(np.isin(there.numpy(), selected))",
        "np.arange(len(there))",
        "tests/unit/runtime/frontend/results/test_delivery.py"
        "::test_each_place_gets_the_rows_of_its_own_captures_and_no_others",
    ),
    Fault(
        "A failing sink is not reported",
        "runtime/frontend/results/delivery.py",
        '            if result.status != "ok":\n',
        "            if False:\n",
        "tests/unit/runtime/frontend/results/test_delivery.py::test_two_sinks_at_once_each_say_what_became_of_theirs",
    ),
    Fault(
        "A link below a sink's root redirects a request's files",
        "sinks/safe_paths.py",
        "FOLDER | os.O_NOFOLLOW",
        "FOLDER",
        "tests/unit/sinks/test_files.py"
        "::test_a_tag_that_is_a_link_is_refused_at_the_door_and_when_it_is_written",
    ),
)
