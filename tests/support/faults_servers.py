"""Faults of servers and of several API server processes; see `faults`."""

from __future__ import annotations

from support.fault import Fault

WORKER = "tests/unit/runtime/worker/"
PEERS = "tests/unit/server/test_peers.py::"

SERVERS: tuple[Fault, ...] = (
    Fault(
        "A front end takes vectors from the requests of another",
        "runtime/worker/vector_store.py",
        "            if not front_ends:\n",
        "            if True:\n",
        WORKER
        + "test_vector_store.py"
        + "::test_a_vector_stays_until_each_front_end_that_added_it_has_dropped_it",
    ),
    Fault(
        "The answer to one front end ends the reads of another",
        "runtime/worker/result_buffer.py",
        "        inlined = self._inlined[front_end] = set()\n",
        "        self._inlined.clear()\n        inlined = self._inlined[front_end] = set()\n",
        WORKER + "test_result_buffer.py::test_each_front_end_reads_its_own_answer_to_the_end",
    ),
    Fault(
        "Memory of captured rows stays mapped in a front end that hears of no retired segment",
        "transport/arena.py",
        "        described.difference_update(retired)\n",
        "        for each in self._described.values():\n"
        "            each.difference_update(retired)\n",
        "tests/unit/transport/test_arena.py"
        "::test_each_reader_hears_of_the_segments_it_knows_that_are_gone",
    ),
    Fault(
        "Front ends admit more programs together than the tables have room for",
        "runtime/frontend/engine_info.py",
        "            programs=1 + (room.programs - 1) // self.count,\n",
        "            programs=room.programs,\n",
        "tests/unit/runtime/frontend/test_front_ends.py"
        "::test_their_parts_of_the_tables_fit_together",
    ),
    Fault(
        "A capture of every request is set in one process of a server only",
        "server/peers.py",
        "                    for number in self._others:\n                        found =",
        "                    for number in ():\n                        found =",
        PEERS + "test_server_wide_captures_are_changed_in_both_and_by_one_after_the_other",
    ),
    Fault(
        "Streams of a server that is told to end stay open until their clients leave",
        "runtime/frontend/engine_death.py",
        "    handler.get_loop().call_soon_threadsafe(tell, EngineDeadError())\n",
        "    del tell\n",
        "tests/unit/runtime/frontend/test_engine_death.py"
        "::test_streams_of_an_engine_that_is_shut_down_end_with_an_error",
    ),
    Fault(
        "Features of an SAE that a request names have the order of another request",
        "runtime/frontend/sae_registry.py",
        "        key = tuple(ids), mode\n",
        "        key = tuple(sorted(ids)), mode\n",
        "tests/unit/runtime/frontend/test_sae_registry.py"
        "::test_features_that_requests_name_again_are_the_same_vectors",
    ),
    Fault(
        "A reader that ends its lease while the worker looks for ended ones ends the engine",
        "transport/leases.py",
        "np.array(self._flags[: self._used]).nonzero()",
        "self._flags[: self._used].nonzero()",
        "tests/unit/transport/test_leases.py"
        "::test_a_flag_that_is_set_while_flags_are_read_ends_its_lease_and_not_the_engine",
    ),
    Fault(
        "Memory of rows that nobody reads is used again while their copy is under way",
        "runtime/worker/row_index.py",
        "        self.shipment.wait()\n        self.arena.release(",
        "        self.arena.release(",
        "tests/unit/runtime/worker/test_freed_rows.py"
        "::test_rows_that_were_streamed_before_they_were_computed_again",
    ),
    Fault(
        "A thread that waits for a copy waits for the copies of later steps",
        "transport/ring_copy.py",
        "            lent.event.synchronize()\n",
        "            event, lent = lent.event, None\n            event.synchronize()\n",
        "tests/unit/transport/test_ring_copy.py"
        "::test_an_event_is_not_recorded_again_while_a_thread_waits_for_it",
    ),
    Fault(
        "A chunk of one of several choices has its results as those of the whole response",
        "server/response_writer.py",
        "        if self._context.is_single and _is_chunk(event):\n",
        "        if _is_chunk(event):\n",
        "tests/unit/server/test_stream_events.py"
        "::test_a_chunk_of_one_of_several_choices_gets_its_own_results_inside_the_choice",
    ),
    Fault(
        "The results of a choice are put into an event without a choice",
        "server/response_writer.py",
        "    return not event.name and _CHOICE in event.data and _is_object(event.data)\n",
        "    return not event.name and _is_object(event.data)\n",
        "tests/unit/server/test_stream_events.py"
        "::test_an_event_gets_the_results_of_its_choice_whatever_else_it_has",
    ),
)
