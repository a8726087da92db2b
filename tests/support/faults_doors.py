"""Faults of what a server lets in: web pages, bodies, ids, processes and limits; see `faults`."""

from __future__ import annotations

from support.fault import Fault

SERVER = "tests/unit/server/"
PAGES = SERVER + "test_web_pages.py::"
BODIES = SERVER + "routes/test_request_body.py::"
NAMES = "tests/unit/sinks/test_name_claims.py::"
PEERS = SERVER + "test_peer_errors.py::"
FILES = SERVER + "test_descriptors.py::"

DOORS: tuple[Fault, ...] = (
    Fault(
        "A setting turns off the guard of a local server against web pages",
        "server/admin_auth.py",
        "        if not self._is_loopback or self._has_key:\n",
        "        if not self._is_loopback or self._has_key or self._allowed is not None:\n",
        PAGES + "test_a_setting_alone_lets_no_page_in",
    ),
    Fault(
        "An admin key turns off the guard of a local server against web pages",
        "server/admin_auth.py",
        "        if not self._is_loopback or self._has_key:\n",
        "        if not self._is_loopback or self._has_key or self._admin_digest is not None:\n",
        PAGES + "test_every_setting_key_address_and_page_is_answered_by_the_rule",
    ),
    Fault(
        "A web page of another origin reads what a local server has",
        "server/admin_auth.py",
        "        self._check_origin(headers)\n\n    def check(",
        "\n    def check(",
        PAGES + "test_pages_of_the_origins_that_the_server_names_are_its_own",
    ),
    Fault(
        "A server that everybody may change is changed by web pages of other origins",
        "server/admin_auth.py",
        "        if self._admin_digest is None:\n            self._check_origin(headers)\n",
        "        if self._admin_digest is None:\n            pass\n",
        SERVER
        + "test_admin_auth.py"
        + "::test_without_a_key_a_page_of_another_place_may_change_nothing",
    ),
    Fault(
        "Bodies of midstream's own routes have any number of values",
        "server/routes/request_body.py",
        "    check_values(data)\n",
        "",
        BODIES + "test_a_body_of_too_many_values_is_413_before_it_is_parsed",
    ),
    Fault(
        "Long bodies of midstream's own routes are parsed on the event loop",
        "server/routes/request_body.py",
        "            if is_long(data):\n",
        "            if False:\n",
        BODIES + "test_a_long_body_is_never_parsed_on_the_event_loop",
    ),
    Fault(
        "The body of an update is read though no such request runs",
        "server/routes/requests.py",
        "@before_body\n",
        "",
        BODIES + "test_the_body_of_an_update_is_not_read_if_no_such_request_runs",
    ),
    Fault(
        "A route of midstream reads its body past the limits",
        "server/routes/tokens.py",
        "route_class=MidstreamRoute, ",
        "",
        BODIES + "test_every_route_of_midstream_reads_its_body_by_the_one_way",
    ),
    Fault(
        "Rows are stored under an id that a store has already",
        "sinks/store_sink.py",
        "        if is_stored:\n",
        "        if False:\n",
        NAMES + "test_an_id_that_an_earlier_run_stored_is_refused",
    ),
    Fault(
        "Of requests with one id at once, more than one is computed",
        "sinks/name_claims.py",
        "            if name in self._users or not self._set(fcntl.F_WRLCK, name):\n",
        "            if not self._set(fcntl.F_WRLCK, name):\n",
        NAMES + "test_of_eight_requests_with_one_id_at_once_one_has_it",
    ),
    Fault(
        "Two processes store rows under one id",
        "sinks/name_claims.py",
        "            if error.errno in _TAKEN:\n                return False\n",
        "            if error.errno in _TAKEN:\n                return True\n",
        NAMES + "test_another_process_has_an_id_until_it_ends_and_a_killed_one_leaves_nothing",
    ),
    Fault(
        "An id is free while the rows under it wait for their sink",
        "sinks/queue.py",
        "        sink.names.keep_until(entry.done, name)\n",
        "        del name\n",
        NAMES + "test_an_id_is_taken_until_its_rows_are_stored_and_then_the_sink_has_it",
    ),
    Fault(
        "A call of an AsyncLLM takes no ids",
        "api/async_call.py",
        "            await call.take_names(front.sinks)\n",
        "",
        "tests/system/test_sinks_async.py"
        "::test_of_eight_requests_that_give_their_rows_one_id_one_runs_and_the_others_are_told",
    ),
    Fault(
        "A call of an LLM takes no ids",
        "runtime/frontend/taken_names.py",
        "        if names is None:\n",
        "        if True:\n",
        "tests/engine/test_sinks.py::test_an_id_that_the_store_has_is_refused_before_anything_runs",
    ),
    Fault(
        "An id that is taken is answered as a malformed request",
        "errors.py",
        "            status = 409 if isinstance(error, ExistsError) else 400\n",
        "            status = 400\n",
        SERVER
        + "test_taken_ids.py"
        + "::test_an_id_that_is_taken_is_409_with_the_field_as_the_client_wrote_it",
    ),
    Fault(
        "Ids of shards that were pruned stay taken",
        "store/stored_ids.py",
        "        if gone or len(",
        "        if len(",
        "tests/unit/store/test_stored_ids.py::test_an_id_is_there_if_and_only_if_a_reader_finds_it",
    ),
    Fault(
        "An API server process that is slow is said to have ended",
        "server/peer_errors.py",
        "    if isinstance(error, httpx.TimeoutException):\n",
        "    if False:\n",
        PEERS + "test_a_process_that_ended_one_that_is_slow_and_one_that_breaks_off_are_told_apart",
    ),
    Fault(
        "A process without descriptors says that another one has ended",
        "server/peer_errors.py",
        "    if number in _NO_MEMORY:\n",
        "    if False:\n",
        PEERS + "test_a_process_without_descriptors_does_not_say_that_another_one_has_ended",
    ),
    Fault(
        "What another API server process rejects is left out of the answer",
        "server/peers.py",
        "                raise rejection(answer)\n\n    async def refresh_metrics",
        "                pass\n\n    async def refresh_metrics",
        PEERS + "test_what_another_process_rejects_is_told_with_its_own_words",
    ),
    Fault(
        "One of several API server processes reads the body of a change before the admin key",
        "server/middleware.py",
        "            if path.startswith(CAPTURES):\n",
        "            if False:\n",
        SERVER + "test_peers.py::test_a_body_is_not_read_before_the_admin_key_is_checked",
    ),
    Fault(
        "Cached rows stay until somebody calls",
        "server/server.py",
        "asyncio.create_task(expire_in_time(self.captures))",
        "asyncio.create_task(asyncio.sleep(3600))",
        FILES + "test_rows_expire_though_nobody_calls_and_the_timer_ends_with_the_server",
    ),
    Fault(
        "Cached rows take every file descriptor",
        "server/capture_cache.py",
        "        self._descriptors.check(client, ENTRY * captures)\n",
        "",
        FILES + "test_a_client_has_a_part_and_all_clients_have_a_part",
    ),
    Fault(
        "Readers of cached rows take every file descriptor",
        "server/capture_cache.py",
        "            self._descriptors.check(client, READER)\n",
        "",
        FILES + "test_readers_count_until_they_have_read",
    ),
    Fault(
        "Requests at once are computed though their rows cannot all be cached",
        "server/server.py",
        "            context.reservation = self.captures.reserve(client, completions_of(body))\n",
        "            self.captures.release(self.captures.reserve(client, completions_of(body)))\n",
        FILES + "test_of_requests_at_once_those_that_could_not_be_cached_are_not_computed",
    ),
    Fault(
        "Answers of vLLM's other paths do not name the steering",
        "server/middleware.py",
        '        if scope["method"] == "POST" and (path == SWEEP or not path.startswith(_OWN)):\n',
        "        if path in PATHS or path == SWEEP:\n",
        SERVER + "test_security_page.py::test_answers_name_the_steering_by_epoch_and_digest",
    ),
)
