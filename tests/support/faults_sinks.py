"""Faults of sinks: rows that are lost, told as stored, or written elsewhere; see `faults`."""

from __future__ import annotations

from support.fault import Fault

SINKS: tuple[Fault, ...] = (
    Fault(
        "Rows are reported as stored before they are",
        "SinkQueue._write",
        "self._written.append(entry)",
        "self._report(entry, entry.result)",
        "tests/unit/sinks/test_queue.py::test_nothing_is_told_before_the_flush",
    ),
    Fault(
        "A full sink loses rows",
        "ByteBudget._admit",
        "self.used and self.used + size > self._most and not grant.cancelled()",
        "False",
        "tests/unit/sinks/test_queue.py"
        "::test_a_slow_sink_makes_whoever_brings_more_wait_and_loses_nothing",
    ),
    Fault(
        "A sink gets rows of captures with another destination",
        "delivery:_rows_of",
        "np.flatnonzero(np.isin(there.numpy(), selected))",
        "np.arange(len(there))",
        "tests/unit/runtime/frontend/results/test_delivery.py"
        "::test_each_place_gets_the_rows_of_its_own_captures_and_no_others",
    ),
    Fault(
        "A failing sink is not reported",
        "_set_results",
        'if result.status != "ok":',
        "if False:",
        "tests/unit/runtime/frontend/results/test_delivery.py::test_two_sinks_at_once_each_say_what_became_of_theirs",
    ),
    Fault(
        "A link below a sink's root redirects a request's files",
        "_folder_beneath",
        "inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)",
        "inner = os.open(part, _FOLDER, dir_fd=folder)",
        "tests/unit/sinks/test_files.py"
        "::test_a_tag_that_is_a_link_is_refused_at_the_door_and_when_it_is_written",
    ),
)
