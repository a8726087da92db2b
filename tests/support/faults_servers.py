"""Faults of servers and of several API server processes; see `faults`."""

from __future__ import annotations

from support.fault import Fault

WORKER = "tests/unit/runtime/worker/"
PEERS = "tests/unit/server/test_peers.py::"

SERVERS: tuple[Fault, ...] = (
    Fault(
        "A front end takes vectors from the requests of another",
        "VectorStore.update",
        "if not front_ends:",
        "if True:",
        WORKER
        + "test_vector_store.py"
        + "::test_a_vector_stays_until_each_front_end_that_added_it_has_dropped_it",
    ),
    Fault(
        "The answer to one front end ends the reads of another",
        "ResultBuffer.inline",
        "total = 0",
        """
        total = 0
        self._inlined.clear()
        """,
        WORKER + "test_result_buffer.py::test_each_front_end_reads_its_own_answer_to_the_end",
    ),
    Fault(
        "Memory of captured rows stays mapped in a front end that hears of no retired segment",
        "Arena.take_retired",
        "described.difference_update(retired)",
        """
        for each in self._described.values():
            each.difference_update(retired)
        """,
        "tests/unit/transport/test_arena.py"
        "::test_each_reader_hears_of_the_segments_it_knows_that_are_gone",
    ),
    Fault(
        "Front ends admit more programs together than the tables have room for",
        "FrontEnds.room",
        "1 + (room.programs - 1) // self.count",
        "room.programs",
        "tests/unit/runtime/frontend/test_front_ends.py"
        "::test_their_parts_of_the_tables_fit_together",
    ),
    Fault(
        "A capture of every request is set in one process of a server only",
        "Peers._change_all",
        "for number in self._others:",
        "for number in ():",
        PEERS + "test_server_wide_captures_are_changed_in_both_and_by_one_after_the_other",
    ),
    Fault(
        "Streams of a server that is told to end stay open until their clients leave",
        "fail_streams",
        "handler.get_loop().call_soon_threadsafe(tell, EngineDeadError())",
        "del tell",
        "tests/unit/runtime/frontend/test_engine_death.py"
        "::test_streams_of_an_engine_that_is_shut_down_end_with_an_error",
    ),
    Fault(
        "Features of an SAE that a request names have the order of another request",
        "RegisteredSae.weights_of",
        "key = tuple(ids), mode",
        "key = tuple(sorted(ids)), mode",
        "tests/unit/runtime/frontend/test_sae_registry.py"
        "::test_features_that_requests_name_again_are_the_same_vectors",
    ),
    Fault(
        "A reader that ends its lease while the worker looks for ended ones ends the engine",
        "Leases.ended",
        "done = np.array(self._flags[: self._used]).nonzero()[0].tolist()",
        "done = self._flags[: self._used].nonzero()[0].tolist()",
        "tests/unit/transport/test_leases.py"
        "::test_a_flag_that_is_set_while_flags_are_read_ends_its_lease_and_not_the_engine",
    ),
    Fault(
        "Memory of rows that nobody reads is used again while their copy is under way",
        "ArenaRows.free",
        "self.shipment.wait()",
        "",
        "tests/unit/runtime/worker/test_freed_rows.py"
        "::test_rows_that_were_streamed_before_they_were_computed_again",
    ),
    Fault(
        "A thread that waits for a copy waits for the copies of later steps",
        "Arrival.wait",
        "lent.event.synchronize()",
        """
        event, lent = lent.event, None
        event.synchronize()
        """,
        "tests/unit/transport/test_ring_copy.py"
        "::test_an_event_is_not_recorded_again_while_a_thread_waits_for_it",
    ),
    Fault(
        "A chunk of one of several choices has its results as those of the whole response",
        "ResponseWriter._with_updates",
        "if self._context.is_single and _is_chunk(event):",
        "if _is_chunk(event):",
        "tests/unit/server/test_stream_events.py"
        "::test_a_chunk_of_one_of_several_choices_gets_its_own_results_inside_the_choice",
    ),
    Fault(
        "The results of a choice are put into an event without a choice",
        "_is_chunk",
        "not event.name and _CHOICE in event.data and _is_object(event.data)",
        "not event.name and _is_object(event.data)",
        "tests/unit/server/test_stream_events.py"
        "::test_an_event_gets_the_results_of_its_choice_whatever_else_it_has",
    ),
)
