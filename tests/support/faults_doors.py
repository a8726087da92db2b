"""Faults of what a server lets in: web pages, bodies, ids, processes and limits; see `faults`."""

from __future__ import annotations

from support.fault import Fault

SERVER = "tests/unit/server/"
PAGES = SERVER + "test_web_pages.py::"
BODIES = SERVER + "routes/test_request_body.py::"
NAMES = "tests/unit/sinks/test_name_claims.py::"
PEERS = SERVER + "test_peer_errors.py::"
FILES = SERVER + "cached_rows/test_descriptors.py::"

DOORS: tuple[Fault, ...] = (
    Fault(
        "A setting turns off the guard of a local server against web pages",
        "Guard.check_host",
        "if not self._is_loopback or self._has_key:",
        "if not self._is_loopback or self._has_key or self._allowed is not None:",
        PAGES + "test_a_setting_alone_lets_no_page_in",
    ),
    Fault(
        "An admin key turns off the guard of a local server against web pages",
        "Guard.check_host",
        "if not self._is_loopback or self._has_key:",
        "if not self._is_loopback or self._has_key or self._admin_digest is not None:",
        PAGES + "test_every_setting_key_address_and_page_is_answered_by_the_rule",
    ),
    Fault(
        "A web page of another origin reads what a local server has",
        "Guard.check_host",
        "self._check_origin(headers)",
        "",
        PAGES + "test_pages_of_the_origins_that_the_server_names_are_its_own",
    ),
    Fault(
        "A server that everybody may change is changed by web pages of other origins",
        "Guard.check",
        "self._check_origin(headers)",
        "pass",
        SERVER
        + "app/test_admin_auth.py"
        + "::test_without_a_key_a_page_of_another_place_may_change_nothing",
    ),
    Fault(
        "Bodies of midstream's own routes have any number of values",
        "request_body:_read",
        "check_values(data)",
        "",
        BODIES + "test_a_body_of_too_many_values_is_413_before_it_is_parsed",
    ),
    Fault(
        "Long bodies of midstream's own routes are parsed on the event loop",
        "StrictRequest.json",
        "if is_long(data):",
        "if False:",
        BODIES + "test_a_long_body_is_never_parsed_on_the_event_loop",
    ),
    Fault(
        "The body of an update is read though no such request runs",
        "running_calls",
        """
        @before_body
        async def running_calls(request: Request) -> list[RunningCall]:
        """,
        "async def running_calls(request: Request) -> list[RunningCall]:",
        BODIES + "test_the_body_of_an_update_is_not_read_if_no_such_request_runs",
    ),
    Fault(
        "A route of midstream reads its body past the limits",
        "tokens:router",
        'APIRouter(route_class=MidstreamRoute, tags=["midstream: tokens"])',
        'APIRouter(tags=["midstream: tokens"])',
        BODIES + "test_every_route_of_midstream_reads_its_body_by_the_one_way",
    ),
    Fault(
        "Rows are stored under an id that a store has already",
        "StoreSink.check",
        "if is_stored:",
        "if False:",
        NAMES + "test_an_id_that_an_earlier_run_stored_is_refused",
    ),
    Fault(
        "Of requests with one id at once, more than one is computed",
        "NameClaims.take",
        "if name in self._users:",
        "if False:",
        NAMES + "test_of_eight_requests_with_one_id_at_once_one_has_it",
    ),
    Fault(
        "Two processes store rows under one id",
        "NameClaims._set",
        "return False",
        "return True",
        NAMES + "test_another_process_has_an_id_until_it_ends_and_a_killed_one_leaves_nothing",
    ),
    Fault(
        "An id is free while the rows under it wait for their sink",
        "SinkQueue._append",
        "names.keep_until(entry.done, name)",
        "del name",
        NAMES + "test_an_id_is_taken_until_its_rows_are_stored_and_then_the_sink_has_it",
    ),
    Fault(
        "A call of an AsyncLLM takes no ids",
        "AsyncEngineCall.outputs",
        "await call.take_names(front.sinks)",
        "",
        "tests/system/test_sinks_async.py"
        "::test_of_eight_requests_that_give_their_rows_one_id_one_runs_and_the_others_are_told",
    ),
    Fault(
        "A call of an LLM takes no ids",
        "TakenNames.taken",
        "if names is None:",
        "if True:",
        "tests/engine/test_sinks.py::test_an_id_that_the_store_has_is_refused_before_anything_runs",
    ),
    Fault(
        "An id that is taken is answered as a malformed request",
        "HttpError.of",
        "status = 409 if isinstance(error, ExistsError) else 400",
        "status = 400",
        SERVER
        + "test_taken_ids.py"
        + "::test_an_id_that_is_taken_is_409_with_the_field_as_the_client_wrote_it",
    ),
    Fault(
        "Ids of shards that were pruned stay taken",
        "StoredIds._refresh",
        "gone or len(self._recent) > max(_UNSORTED, len(self._sorted) // 8)",
        "len(self._recent) > max(_UNSORTED, len(self._sorted) // 8)",
        "tests/unit/store/test_stored_ids.py::test_an_id_is_there_if_and_only_if_a_reader_finds_it",
    ),
    Fault(
        "An API server process that is slow is said to have ended",
        "failure_of",
        "if isinstance(error, httpx.TimeoutException):",
        "if False:",
        PEERS + "test_a_process_that_ended_one_that_is_slow_and_one_that_breaks_off_are_told_apart",
    ),
    Fault(
        "A process without descriptors says that another one has ended",
        "failure_of",
        "if number in _NO_MEMORY:",
        "if False:",
        PEERS + "test_a_process_without_descriptors_does_not_say_that_another_one_has_ended",
    ),
    Fault(
        "What another API server process rejects is left out of the answer",
        "Peers.each",
        "raise rejection(answer)",
        "pass",
        PEERS + "test_what_another_process_rejects_is_told_with_its_own_words",
    ),
    Fault(
        "One of several API server processes reads the body of a change before the admin key",
        "Middleware._answer",
        "if path.startswith(CAPTURES):",
        "if False:",
        SERVER + "test_peers.py::test_a_body_is_not_read_before_the_admin_key_is_checked",
    ),
    Fault(
        "Cached rows stay until somebody calls",
        "Server.start",
        "expire_in_time(self.captures)",
        "asyncio.sleep(3600)",
        FILES + "test_rows_expire_though_nobody_calls_and_the_timer_ends_with_the_server",
    ),
    Fault(
        "Cached rows take every file descriptor",
        "CaptureCache._check",
        "self._descriptors.check(client, ENTRY * captures)",
        "",
        FILES + "test_a_client_has_a_part_and_all_clients_have_a_part",
    ),
    Fault(
        "Readers of cached rows take every file descriptor",
        "CaptureCache.open",
        "self._descriptors.check(client, READER)",
        "",
        FILES + "test_readers_count_until_they_have_read",
    ),
    Fault(
        "Requests at once are computed though their rows cannot all be cached",
        "Server.begin",
        "context.reservation = self.captures.reserve(client, completions_of(body))",
        "self.captures.release(self.captures.reserve(client, completions_of(body)))",
        FILES + "test_of_requests_at_once_those_that_could_not_be_cached_are_not_computed",
    ),
    Fault(
        "Answers of vLLM's other paths do not name the steering",
        "Middleware.__call__",
        'scope["method"] == "POST" and (path == SWEEP or not path.startswith(_OWN))',
        "path in PATHS or path == SWEEP",
        SERVER + "test_security_page.py::test_answers_name_the_steering_by_epoch_and_digest",
    ),
)
