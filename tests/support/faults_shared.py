"""Faults of what requests share, and of what is made only when it is looked at; see `faults`."""

from __future__ import annotations

from support.fault import Fault

_ASSEMBLY = "runtime/frontend/results/assembly.py"
_SCORES = "tests/unit/runtime/frontend/results/test_assembly_scores.py::"
_PACKING = "results/serialization.py"
_HEADERS = (
    "tests/unit/results/test_packed_headers.py"
    "::test_files_that_differ_in_one_thing_have_each_their_own_header"
)
_BODIES = "tests/unit/server/test_middleware.py::"
_SPELT = _BODIES + "test_however_it_is_spelt_it_is_never_passed_over"
_CACHED = "@functools.lru_cache(maxsize=_CACHED_HEADERS)\n"


def _cached_by(key: str) -> str:
    """Return a decorator that keeps headers by part of their form: `taps, rows, nothing` of each
    group in `forms`, and `known`, the other arguments.
    """
    return (
        "def _cached(make, found={}):\n"
        "    def header(forms, *known):\n"
        f"        key = {key}\n"
        "        if key not in found:\n"
        "            found[key] = make(forms, *known)\n"
        "        return found[key]\n"
        "    return header\n\n\n"
        "@_cached\n"
    )


SHARED: tuple[Fault, ...] = (
    Fault(
        "A request gets the receipt of another one of its plan, which got other scores",
        "runtime/protocol/results.py",
        "tuple(rows), tuple(scores), tuple(counts)\n",
        "tuple(rows), tuple(counts)\n",
        _SCORES + "test_requests_of_one_plan_have_their_own_scores_and_are_compared_with_it_each",
    ),
    Fault(
        "A request gets the receipt of what the probes of another one of its plan did",
        _ASSEMBLY,
        "        acts = recalled is not None or any(probe.act is not None for probe in plan.probes)\n",
        "        acts = recalled is not None\n",
        _SCORES + "test_requests_of_one_plan_act_by_their_own_scores",
    ),
    Fault(
        "The gate of a conversation leaves no state where another request had its plan",
        _ASSEMBLY,
        "        acts = recalled is not None or any(",
        "        acts = any(",
        _SCORES + "test_requests_of_one_plan_leave_each_the_state_of_its_own_gate",
    ),
    Fault(
        "Rows of one codec are sent with the header of another",
        _PACKING,
        _CACHED,
        _cached_by("(tuple([one[:2] for one in forms]), known[0], known[2:])"),
        _HEADERS,
    ),
    Fault(
        "Rows of one width are sent with the header of another",
        _PACKING,
        _CACHED,
        _cached_by("(tuple([(*one[:2], one[2].codec, one[2].dtype) for one in forms]), known)"),
        _HEADERS,
    ),
    Fault(
        "Rows of heads are sent with the header of rows of other heads",
        _PACKING,
        _CACHED,
        _cached_by("(forms, known[:4])"),
        _HEADERS,
    ),
    Fault(
        "Rows that a caller changed are packed as they were sent",
        "results/encoded_rows.py",
        "            return self._chunk.numpy()\n",
        "            pass\n",
        "tests/unit/runtime/frontend/results/test_assembly.py"
        "::test_rows_are_packed_as_they_are_whether_or_not_they_were_read",
    ),
    Fault(
        "Scores are sent with the tokens of other positions",
        "results/probe_scores.py",
        "            tokens = [given[position] for position in positions]\n",
        "            tokens = list(given[first : first + len(positions)])\n",
        "tests/unit/results/test_probe_scores.py"
        "::test_a_copy_has_the_tokens_whether_or_not_they_were_looked_at",
    ),
    Fault(
        "All tokens of a request are read for each of its probes",
        "results/probe_scores.py",
        "            tokens = [given[position] for position in positions]\n",
        "            every = list(given)\n"
        "            tokens = [every[position] for position in positions]\n",
        "tests/unit/results/test_probe_scores.py"
        "::test_of_the_tokens_of_a_long_request_only_those_of_the_asked_rows_are_read",
    ),
    Fault(
        "A field whose name has escapes is passed over",
        "server/middleware.py",
        "or _ESCAPE in body or _WIDE in body):\n",
        "or _WIDE in body):\n",
        _SPELT,
    ),
    Fault(
        "A field in UTF-16 is passed over",
        "server/middleware.py",
        "or _ESCAPE in body or _WIDE in body):\n",
        "or _ESCAPE in body):\n",
        _SPELT,
    ),
    Fault(
        "The field in the first of two vllm_xargs is passed over",
        "server/middleware.py",
        "json.loads(body, object_pairs_hook=_asking)\n",
        "json.loads(body)\n",
        _SPELT,
    ),
    Fault(
        "A field of another tool whose colon comes late is passed over",
        "compat/foreign_fields.py",
        '        stop = body.find(b":", start + _CHUNK + _KEY) + 1 or len(body)\n',
        "        stop = start + _CHUNK + _KEY\n",
        "tests/unit/compat/test_foreign_fields.py::test_a_key_is_found_however_far_its_colon_is",
    ),
    Fault(
        "A plan of more values than a server reads is read",
        "server/body_values.py",
        "    if has_more_values(body):\n",
        "    if has_more_values(body[:0]):\n",
        _BODIES + "test_more_numbers_than_a_plan_may_have_are_413_and_stop_nobody",
    ),
    Fault(
        "Requests without rows get no answer beside others that have some",
        "runtime/worker/row_index.py",
        "            return {serial: [] for serial in serials}\n",
        "            return {}\n",
        "tests/unit/runtime/worker/test_row_index.py",
    ),
)
