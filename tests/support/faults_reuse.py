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
        "runtime/worker/tables/program_table.py",
        "        self._unused_groups.discard(taps)\n",
        "",
        "tests/unit/runtime/worker/tables/test_program_table.py",
    ),
    Fault(
        "A prefix hit is granted where a kept row is missing",
        "runtime/frontend/row_reuse.py",
        "            if rows is None:\n                break\n",
        "            if rows is None:\n                continue\n",
        _UNIT + "test_kept_rows_beyond_a_missing_one_are_not_counted",
    ),
    Fault(
        "Rows of before a reset of the prefix cache are reused",
        "runtime/protocol/request_payload.py",
        "if kept is None or kept.resets != resets else",
        "if kept is None else",
        _UNIT + "test_kept_rows_count_only_as_long_as_the_prefix_cache_is_not_reset",
    ),
    Fault(
        "Rows of a request with other edits are reused",
        "runtime/frontend/row_reuse.py",
        'mark = self._keys.of_block(start, start + CHUNK) or ""',
        'mark = ""',
        _REUSE + "test_rows_of_other_edits_are_never_reused",
    ),
    Fault(
        "Rows of a request that failed are reused",
        "runtime/frontend/results/assembly.py",
        'if receipt.status == "ok" and same:',
        "if same:",
        _LOCAL + "test_rows_and_kv_of_a_failed_request_are_not_kept",
    ),
    Fault(
        "KV that a function made is served to a request with another function",
        "runtime/protocol/cache_keys.py",
        "[one.site, one.layer, one.key]",
        "[one.site, one.layer]",
        _LOCAL + "test_kv_is_shared_by_requests_with_the_same_function_alone",
    ),
    Fault(
        "A function gets rows of another request in the batch",
        "runtime/worker/taps/local_calls.py",
        "range(first + low - start, first + high - start)",
        "range(low - start, high - start)",
        _LOCAL + "test_others_in_the_batch_are_not_touched",
    ),
    Fault(
        "A function that was not called passes unnoticed",
        "runtime/worker/session.py",
        "            self._local.finish()\n",
        "            pass\n",
        _LOCAL + "test_a_function_that_was_not_called_is_noticed",
    ),
)
