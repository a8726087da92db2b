"""Faults of waits: what hangs, what is cancelled, and who else waits; see `faults`."""

from __future__ import annotations

from support.fault import Fault

_WAITS = "tests/unit/test_deadlines.py::"
_STALLED = "tests/unit/sinks/test_stalled_sinks.py::"
_HANGING = "tests/unit/test_hanging.py::"
_TURNS = "tests/lab/server/test_sweep_pace.py::"
_USES = "tests/unit/runtime/frontend/test_engine_use.py::"

DEADLINES: tuple[Fault, ...] = (
    Fault(
        "A cancellation is lost that comes when what is awaited is done",
        "within",
        "if undo is not None:",
        """
        if task.done():
            return task.result()
        if undo is not None:
        """,
        _WAITS + "test_a_cancellation_is_never_lost_in_whatever_turn_of_the_loop_it_comes",
    ),
    Fault(
        "A lock that a cancelled request was just given stays held",
        "within",
        "task.add_done_callback(partial(_undo, undo))",
        "pass",
        "tests/unit/server/test_cancelled_requests.py"
        "::test_at_whatever_await_a_coroutine_is_cancelled_it_ends_and_leaves_nothing",
    ),
    Fault(
        "The end of a task that lost a cancellation is waited for without end",
        "end_tasks",
        "min(rest, _AGAIN_SECONDS)",
        "None",
        _WAITS + "test_a_task_that_loses_its_first_cancellation_ends_all_the_same",
    ),
    Fault(
        "Runs of a batch go on when one has failed",
        "all_of",
        "await end_tasks(tasks)",
        "pass",
        _WAITS + "test_when_one_fails_the_others_have_ended_before_its_error_is_raised",
    ),
    Fault(
        "A sink that does not return keeps its requests",
        "CallWatch._watch",
        "if wait <= 0:",
        "if False:",
        _STALLED + "test_a_call_that_does_not_return_is_the_error_of_all_that_the_sink_was_given",
    ),
    Fault(
        "Deliveries have the results of others once a sink that hung has returned",
        "SinkQueue._write",
        "self._written.append(entry)",
        """
        if not entry.is_reported:
            self._written.append(entry)
        """,
        _STALLED
        + "test_a_sink_that_returns_after_all_takes_deliveries_again_with_results_of_their_own",
    ),
    Fault(
        "A sink that was stalled takes nothing any more when it has returned",
        "SinkQueue._call",
        'self.stalled = ""',
        "pass",
        _STALLED
        + "test_a_sink_that_returns_after_all_takes_deliveries_again_with_results_of_their_own",
    ),
    Fault(
        "The end of an engine waits for a sink without limit",
        "SinkQueue.close",
        "thread.is_alive() and not self.stalled and time.monotonic() < until",
        "thread.is_alive() and not self.stalled",
        _STALLED + "test_closing_ends_after_its_own_time_though_each_call_returns",
    ),
    Fault(
        "A thread that hangs in a sink keeps the process from exiting",
        "in_threads",
        'threading.Thread(target=run, name="midstream files", daemon=True)',
        'threading.Thread(target=run, name="midstream files", daemon=False)',
        _STALLED + "test_a_thread_that_hangs_in_a_sink_does_not_keep_the_process_from_exiting",
    ),
    Fault(
        "Requests for a sink that takes nothing are computed",
        "SinkSet.check",
        "self._check_answers(sink)",
        "pass",
        _HANGING + "test_a_sink_that_is_stalled_refuses_requests_before_they_are_computed",
    ),
    Fault(
        "Request validation waits without limit for a sink's file system",
        "SinkSet._check_place",
        "if not wait((call,), CHECK_SECONDS).done:",
        "if not wait((call,), 1000000.0).done:",
        _HANGING + "test_a_sink_whose_check_hangs_refuses_requests_and_names_itself",
    ),
    Fault(
        "A sink's file system is waited for on the event loop",
        "GenerateCall.take_names",
        "await asyncio.to_thread(sinks.check_places, self.plan)",
        "sinks.check_places(self.plan)",
        _HANGING + "test_the_event_loop_turns_while_a_sink_checks_a_request",
    ),
    Fault(
        "The lock of an id is waited for without limit",
        "NameClaims.take",
        "not wait((locked,), TAKE_SECONDS).done",
        "not wait((locked,)).done",
        _HANGING + "test_a_folder_whose_lock_hangs_refuses_ids_and_holds_nobody_who_gives_one_back",
    ),
    Fault(
        "Giving an id back waits for the file system",
        "NameClaims.give",
        "wait((unlocked,), _GIVE_SECONDS)",
        "wait((unlocked,))",
        _HANGING + "test_a_folder_whose_lock_hangs_refuses_ids_and_holds_nobody_who_gives_one_back",
    ),
    Fault(
        "An id whose lock came too late stays locked",
        "NameClaims.take",
        "if not locked.done():",
        "if False:",
        _HANGING + "test_a_folder_whose_lock_hangs_refuses_ids_and_holds_nobody_who_gives_one_back",
    ),
    Fault(
        "A file that is a pipe is waited for",
        "check_regular",
        "if not stat.S_ISREG(file_stat.st_mode):",
        "if False:",
        _HANGING + "test_a_named_pipe_in_place_of_a_file_is_an_error_and_no_wait",
    ),
    Fault(
        "An engine that answers nothing is waited for",
        "replicas:call",
        "if time.monotonic() >= until:",
        "if False:",
        _HANGING + "test_an_engine_that_answers_nothing_is_an_error_after_the_limit",
    ),
    Fault(
        "Changes of server-wide captures wait without limit for each other",
        "Peers._change_all",
        "async with locked(self._changing, _SECONDS * len(self._others)):",
        "async with self._changing:",
        _HANGING
        + "test_a_peer_process_that_is_stopped_is_an_error_for_every_request_that_needs_it",
    ),
    Fault(
        "A client waits without limit for a parameter that others read",
        "parameters:parameter",
        "await within(seconds, lock.acquire(), lambda _: lock.release())",
        "await lock.acquire()",
        "tests/unit/server/routes/test_parameters.py"
        "::test_a_client_that_waits_too_long_for_others_is_503",
    ),
    Fault(
        "Traffic that never ends leaves sweeps no run",
        "SweepPace.turn",
        "if not self.running and time.monotonic() >= until:",
        "if False:",
        _TURNS + "test_traffic_that_never_ends_leaves_one_run_at_a_time_to_sweeps_and_fits",
    ),
    Fault(
        "A run of a sweep that has waited its time is behind all others of a scheduler by priority",
        "SweepPace.turn",
        'yield {"priority": PRIORITY if by_priority and is_free else 0}',
        'yield {"priority": PRIORITY if by_priority else 0}',
        _TURNS + "test_traffic_that_never_ends_leaves_one_run_at_a_time_to_sweeps_and_fits",
    ),
    Fault(
        "Runs of sweeps do not wait for ordinary requests",
        "SweepPace.turn",
        "until = time.monotonic() + self.wait_seconds",
        "until = 0.0",
        _TURNS + "test_a_run_waits_its_time_for_ordinary_requests_before_it_takes_a_seat",
    ),
    Fault(
        "Two threads use one LLM at the same time",
        "EngineUse._take",
        "if is_under_way:",
        "if False:",
        _USES
        + "test_while_one_thread_is_in_a_call_another_gets_an_error_that_names_it_and_the_remedy",
    ),
    Fault(
        "A call returns outputs of requests that were queued before it",
        "EngineUse.whole_call",
        "if self._depth == 1 and self._has_unfinished():",
        "if False:",
        _USES + "test_a_call_that_would_return_outputs_of_requests_queued_before_is_refused",
    ),
    Fault(
        "A second thread adds a request to the engine that another one steps",
        "_process",
        "front.use.claim()",
        "pass",
        "tests/engine/test_threads.py"
        "::test_while_a_call_runs_every_other_way_to_the_engine_is_refused_in_another_thread",
    ),
)
