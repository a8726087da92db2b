"""Faults of what requests share, and of what is made only when it is looked at; see `faults`."""

from __future__ import annotations

from support.fault import Fault

_SCORES = "tests/unit/runtime/frontend/results/test_assembly_scores.py::"
_HEADERS = (
    "tests/unit/results/test_packed_headers.py"
    "::test_files_that_differ_in_one_thing_have_each_their_own_header"
)
_BODIES = "tests/unit/server/test_middleware.py::"
_SPELT = _BODIES + "test_however_it_is_spelt_it_is_never_passed_over"
_CACHE = "functools.lru_cache(maxsize=_CACHED_HEADERS)"


def _cached_by(key: str) -> str:
    """Return a decorator that keeps headers by part of their form: `taps, rows, nothing` of each
    group in `forms`, and `known`, the other arguments.
    """
    return (
        "lambda make, headers={}: lambda forms, *known: "
        f"headers.setdefault({key}, make(forms, *known))"
    )


SHARED: tuple[Fault, ...] = (
    Fault(
        "A request gets the receipt of another one of its plan, which got other scores",
        "WorkerResult.outline",
        "(self.problem, self.dropped, self.versions, tuple(rows), tuple(scores), tuple(counts))",
        "(self.problem, self.dropped, self.versions, tuple(rows), tuple(counts))",
        _SCORES + "test_requests_of_one_plan_have_their_own_scores_and_are_compared_with_it_each",
    ),
    Fault(
        "A request gets the receipt of what the probes of another one of its plan did",
        "assemble",
        "any(probe.act is not None for probe in plan.probes)",
        "False",
        _SCORES + "test_requests_of_one_plan_act_by_their_own_scores",
    ),
    Fault(
        "Rows of one codec are sent with the header of another",
        "_header_of",
        _CACHE,
        _cached_by("(tuple(form[:2] for form in forms), known[0], known[2:])"),
        _HEADERS,
    ),
    Fault(
        "Rows of one width are sent with the header of another",
        "_header_of",
        _CACHE,
        _cached_by("(tuple((*form[:2], form[2].codec, form[2].dtype) for form in forms), known)"),
        _HEADERS,
    ),
    Fault(
        "Rows of heads are sent with the header of rows of other heads",
        "_header_of",
        _CACHE,
        _cached_by("(forms, known[:4])"),
        _HEADERS,
    ),
    Fault(
        "Rows that a caller changed are packed as they were sent",
        "UnreadChunks.array",
        "return self._chunk.numpy()",
        "pass",
        "tests/unit/runtime/frontend/results/test_assembly.py"
        "::test_rows_are_packed_as_they_are_whether_or_not_they_were_read",
    ),
    Fault(
        "Scores are sent with the tokens of other positions",
        "Probes.rows_from",
        "tokens = [token_ids[position] for position in positions]",
        "tokens = list(token_ids[first : first + len(positions)])",
        "tests/unit/results/test_probe_scores.py"
        "::test_a_copy_has_the_tokens_whether_or_not_they_were_looked_at",
    ),
    Fault(
        "All tokens of a request are read for each of its probes",
        "Probes.rows_from",
        "tokens = [token_ids[position] for position in positions]",
        """
        every = list(token_ids)
        tokens = [every[position] for position in positions]
        """,
        "tests/unit/results/test_probe_scores.py"
        "::test_of_the_tokens_of_a_long_request_only_those_of_the_asked_rows_are_read",
    ),
    Fault(
        "A field whose name has escapes is passed over",
        "middleware:_parse",
        "has_key or names_in(body, fields or ()) or _ESCAPE in body or _WIDE in body",
        "has_key or names_in(body, fields or ()) or _WIDE in body",
        _SPELT,
    ),
    Fault(
        "A field in UTF-16 is passed over",
        "middleware:_parse",
        "has_key or names_in(body, fields or ()) or _ESCAPE in body or _WIDE in body",
        "has_key or names_in(body, fields or ()) or _ESCAPE in body",
        _SPELT,
    ),
    Fault(
        "The field in the first of two vllm_xargs is passed over",
        "_parse_if_asked",
        "value = json.loads(body, object_pairs_hook=_asking)",
        "value = json.loads(body)",
        _SPELT,
    ),
    Fault(
        "A field of another tool whose colon comes late is passed over",
        "names_in",
        'stop = body.find(b":", start + _CHUNK + _KEY) + 1 or len(body)',
        "stop = start + _CHUNK + _KEY",
        "tests/unit/compat/test_foreign_fields.py::test_a_key_is_found_however_far_its_colon_is",
    ),
    Fault(
        "A plan of more values than a server reads is read",
        "check_values",
        "if has_more_values(body):",
        "if has_more_values(body[:0]):",
        _BODIES + "test_more_numbers_than_a_plan_may_have_are_413_and_stop_nobody",
    ),
    Fault(
        "Requests without rows get no answer beside others that have some",
        "CapturedRowIndex.take",
        "return {serial: [] for serial in serials}",
        "return {}",
        "tests/unit/runtime/worker/test_row_index.py",
    ),
)
