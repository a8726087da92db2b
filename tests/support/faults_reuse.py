"""Faults of what requests find of earlier ones (rows, groups of captures), and of Python functions.
See `faults`.
"""

from __future__ import annotations

from support.fault import Fault

_UNIT = "tests/unit/runtime/frontend/test_row_reuse.py::"
_REUSE = "tests/engine/test_reuse.py::"
_LOCAL = "tests/engine/test_local.py::"

REUSE: tuple[Fault, ...] = (
    Fault(
        "A group of captures that a later request found is freed as if nobody used it",
        "ProgramTable.acquire_group",
        "self._unused_groups.discard(taps)",
        "",
        "tests/unit/runtime/worker/tables/test_program_table.py",
    ),
    Fault(
        "A prefix hit is granted where a kept row is missing",
        "ReusedRows.find",
        "break",
        "continue",
        _UNIT + "test_kept_rows_beyond_a_missing_one_are_not_counted",
    ),
    Fault(
        "Rows of before a reset of the prefix cache are reused",
        "RequestPayload.first_read",
        "kept is None or kept.resets != resets",
        "kept is None",
        _UNIT + "test_kept_rows_count_only_as_long_as_the_prefix_cache_is_not_reset",
    ),
    Fault(
        "Rows of a request with other edits are reused",
        "ReusedRows._chained",
        'mark = self._keys.of_block(start, start + CHUNK) or ""',
        'mark = ""',
        _REUSE + "test_rows_of_other_edits_are_never_reused",
    ),
    Fault(
        "Rows of a request that failed are reused",
        "assemble",
        'if receipt.status == "ok" and same:',
        "if same:",
        _LOCAL + "test_rows_and_kv_of_a_failed_request_are_not_kept",
    ),
    Fault(
        "KV that a function made is served to a request with another function",
        "cache_keys:_parts",
        "parts.append((function.where.ranges, [function.site, function.layer, function.key]))",
        "parts.append((function.where.ranges, [function.site, function.layer]))",
        _LOCAL + "test_kv_is_shared_by_requests_with_the_same_function_alone",
    ),
    Fault(
        "A function gets rows of another request in the batch",
        "LocalCalls.prepare",
        "call.rows += range(first + low - start, first + high - start)",
        "call.rows += range(low - start, high - start)",
        _LOCAL + "test_others_in_the_batch_are_not_touched",
    ),
    Fault(
        "A function that was not called passes unnoticed",
        "WorkerSession.after_forward",
        "self._local.finish()",
        "pass",
        _LOCAL + "test_a_function_that_was_not_called_is_noticed",
    ),
)
