"""Faults of captures, edits and probes of a request, and of the caches that they meet."""

from __future__ import annotations

from support.fault import Fault

ENGINE = "tests/engine/"
SYSTEM = "tests/system/"

CORE: tuple[Fault, ...] = (
    Fault(
        "A SamplingParams object is changed by use, or loses its plan when it is reused",
        "with_plan",
        "own = copy.copy(params)",
        "own = params",
        ENGINE + "test_isolation.py::test_sampling_params_are_not_changed_and_can_be_used_again",
    ),
    Fault(
        "An edit of prompt positions also applies to generated tokens",
        "cut",
        "[part.ranges for part in parts]",
        "[tuple((start, None) for start, _ in part.ranges[:1]) for part in parts]",
        ENGINE + "test_isolation.py::test_position_limits_hold_over_prompt_and_decode",
    ),
    Fault(
        "KV of an edited request is found under a plain prompt's hash",
        "extra_keys",
        "if mark is not None:",
        "if False:",
        ENGINE + "test_poisoning.py::test_steered_first_then_plain",
    ),
    Fault(
        "Prefix-cache keys use the name of an edit instead of its effect",
        "cache_keys:_parts",
        "[edit.site, edit.layer, edit.steps.digest]",
        "[edit.site, edit.layer]",
        ENGINE + "test_poisoning.py::test_two_vectors_on_one_prefix_and_then_each_again",
    ),
    Fault(
        "Edits of generated tokens are missing from the keys of their blocks",
        "cache_keys:_parts",
        "if edit.where.ranges:",
        "if edit.where.ranges and edit.where.ranges[0][0] < plan.prompt_len:",
        ENGINE + "test_poisoning.py"
        "::test_a_conversation_steered_as_it_was_generated_goes_on_plain_and_steered",
    ),
    Fault(
        "A gate's reading is missing from the prefix-cache key",
        "cache_keys:_parts",
        "if not probe.name and not probe.part_of:",
        "if False:",
        "tests/unit/runtime/protocol/test_cache_keys.py::test_what_a_gate_reads_is_in_the_key",
    ),
    Fault(
        "A prefix-cache hit removes rows from a capture",
        "computed_blocks",
        "cap = payload.first_read(RESETS.get(manager) or 0)",
        "cap = 1 << 60",
        ENGINE
        + "test_poisoning.py::test_a_hit_ends_at_the_block_below_the_first_position_that_is_read",
    ),
    Fault(
        "An exception on a worker is swallowed, and the output is unsteered",
        "RequestTable.add",
        'problem = f"{type(error).__name__}: {error}"',
        """
        problem = ""
        return
        """,
        ENGINE + "test_failures.py"
        "::test_a_fault_on_the_worker_ends_the_request_that_it_is_about_and_no_other",
    ),
    Fault(
        "KV of a failed request is served to another",
        "end_failed",
        "if starts:",
        "if False:",
        ENGINE + "test_failures.py::test_who_was_served_kv_of_a_request_that_failed_fails_with_it",
    ),
    Fault(
        "With n > 1 the completions share one capture",
        "index_of",
        '0 if num_completions == 1 else int(request_id.split("_", 1)[0])',
        "0",
        ENGINE
        + "test_isolation.py::test_several_completions_of_one_prompt_each_have_their_own_rows",
    ),
    Fault(
        "Results of ten or more prompts are in the text order of their ids",
        "FrontEnd._receive",
        "request.delivery = self._deliver(request, data[request.admitted.uid])",
        """
        names = sorted(batch, key=lambda each: each.output.request_id)
        other = names[batch.index(request)]
        request.delivery = self._deliver(request, data[other.admitted.uid])
        """,
        ENGINE
        + "test_isolation.py::test_more_than_ten_prompts_come_back_in_order_each_with_its_own_rows",
    ),
    Fault(
        "An edit or a capture sees one half of the fused residual stream",
        "TappedLayer.__call__",
        "_fire(self, self.midstream_post, hidden, residual)",
        "_fire(self, self.midstream_post, hidden, None)",
        ENGINE + "test_parity.py"
        "::test_every_site_of_every_layer_reads_and_edits_as_hooks_in_transformers",
    ),
    Fault(
        "Positions restart in each chunk of a prompt",
        "StepPlanner._bounds",
        "position = batch.computed[chosen].astype(np.int64)",
        "position = batch.computed[chosen].astype(np.int64) * (length == 1)",
        ENGINE + "test_isolation.py::test_chunked_prefill_gives_the_rows_of_a_prefill_in_one_piece",
    ),
    Fault(
        "Only the last of two edits at one site applies",
        "cut",
        "(part.edit for part in here if part.edit is not None)",
        "{p.edit.tap: p.edit for p in here if p.edit is not None}.values()",
        ENGINE + "test_operations.py"
        "::test_edits_of_one_site_apply_in_the_order_given_and_it_matters_where_it_should",
    ),
    Fault(
        "A capture at a site that the architecture lacks is empty and reported as ok",
        "check_tapped",
        """
        if tap in shape.taps:
            return
        """,
        "return",
        ENGINE + "test_sites.py::test_sites_that_a_model_lacks_are_refused_by_name",
    ),
    Fault(
        "Captured rows differ from the activations that produced the output",
        "_capture",
        "torch.add(stream, rest, out=ring[targets])",
        "torch.add(stream, rest * 1.001, out=ring[targets])",
        ENGINE + "test_parity.py"
        "::test_every_site_of_every_layer_reads_and_edits_as_hooks_in_transformers",
    ),
    Fault(
        "What attention reads is taken in front of its norm",
        "_attn_in",
        'return Input(attention, shared, parameter="hidden_states")',
        'return Input("input_layernorm", shared)',
        ENGINE + "test_parity.py"
        "::test_every_site_of_every_layer_reads_and_edits_as_hooks_in_transformers",
    ),
    Fault(
        "An edit of what attention reads is read by the MLP beside it too",
        "_attn_in",
        "shared = isinstance(mlp, Input) and mlp.shared",
        "shared = False",
        ENGINE + "test_parity.py"
        "::test_every_site_of_every_layer_reads_and_edits_as_hooks_in_transformers",
    ),
    Fault(
        "The last layer, or every layer, is off by one",
        "tap_layer",
        "if number == layer.index:",
        "if number == min(layer.index + 1, max(n for _, n in taps)):",
        ENGINE + "test_parity.py"
        "::test_every_site_of_every_layer_reads_and_edits_as_hooks_in_transformers",
    ),
    Fault(
        "A row that was computed twice is duplicated or outdated",
        "_latest",
        "order = np.lexsort((source, position, serial))",
        "order = np.lexsort((-source, position, serial))",
        "tests/unit/runtime/worker/test_row_index.py",
    ),
    Fault(
        "Rows of rejected draft tokens are kept",
        "_latest",
        "np.append((serial[1:] != serial[:-1]) | (position[1:] != position[:-1]), True)",
        "np.ones(serial.size, np.bool_)",
        SYSTEM + "test_speculative.py",
    ),
    Fault(
        "Results are matched by a prefix of the request's id",
        "Collection.collect",
        "wanted = set(uids)",
        "wanted = {r.uid for r in self._requests.all() for u in uids if r.uid[:1] == u[:1]}",
        ENGINE + "test_adversarial.py::test_every_request_of_a_random_mix_gets_what_it_gets_alone",
    ),
    Fault(
        "A generated token that is computed again after preemption counts as a prompt token",
        "StepPlanner._cross",
        "start, end = max(position, segment.start), min(stop, segment.stop)",
        """
        segment = request.segments_within(position, position + 1)[0]
        start, end = position, stop
        """,
        ENGINE
        + "test_where.py::test_a_generated_token_that_is_computed_anew_is_still_a_generated_token",
    ),
    Fault(
        "A named and an inline vector at one site: one of them is dropped",
        "named_edits:expand_edits",
        "expanded.extend(expand(edit))",
        "expanded[:] = list(expand(edit))",
        ENGINE + "test_tiers.py::test_named_and_inline_and_server_wide_vectors_add_up_at_one_site",
    ),
    Fault(
        "A name that is registered again still has its old vector",
        "VectorRegistry.show",
        "self._current().get(name)",
        'self.__dict__.setdefault("_old", {}).setdefault(name, self.entries.get(name))',
        ENGINE + "test_poisoning.py::test_a_name_that_is_registered_anew_stands_for_its_new_vector",
    ),
    Fault(
        "A name of whole edits that is registered again still stands for its old edits",
        "VectorRegistry.register",
        "self.entries = {**self.entries, name: entry}",
        "self.entries = {name: entry, **self.entries}",
        ENGINE + "test_poisoning.py::test_whole_edits_of_a_name_share_kv_by_their_content",
    ),
    Fault(
        "A server-wide capture that was replaced is still taken for new requests",
        "ServerCaptures.set",
        "self._by_name = new",
        "self._by_name = {**new, **self._by_name}",
        ENGINE + "test_server_captures.py::"
        "test_requests_have_the_captures_that_were_set_when_they_came",
    ),
    Fault(
        "A plan for an engine that is not enabled is ignored",
        "_process",
        """
        if has_plan(params):
            raise _no_front_end(processor)
        """,
        "",
        ENGINE + "test_front_door.py"
        "::test_an_engine_that_is_not_enabled_refuses_plans_once_midstream_is_loaded",
    ),
    Fault(
        "A field of another tool is ignored",
        "foreign_fields:_check",
        "problem = _problem(name, value, place_of)",
        'problem = ""',
        "tests/unit/server/test_foreign_fields.py::test_a_known_field_is_never_passed_over",
    ),
    Fault(
        "A translated request does not say so",
        "assemble",
        "coming_from = () if own is None else own.coming_from",
        "coming_from = ()",
        ENGINE + "test_others_words.py::test_their_words_give_the_rows_and_tokens_of_ours",
    ),
    Fault(
        "A request gets the receipt of another one of its plan, whose states differ",
        "WorkerResult.outline",
        "(self.worker, self._leased is None, self._states.tobytes(), known)",
        "(self.worker, self._leased is None, known)",
        "tests/unit/runtime/frontend/results/test_assembly.py::test_what_requests_of_one_plan_share_is_only_what_the_workers_said_alike",
    ),
    Fault(
        "Requests of one plan share the positions that their callers may change",
        "RowGroup.positions",
        "self._positions = torch.from_numpy(self._positions.copy())",
        "self._positions = torch.from_numpy(self._positions)",
        "tests/unit/runtime/frontend/results/test_assembly.py::test_positions_of_a_request_can_be_changed_without_changing_those_of_the_next",
    ),
    Fault(
        "A missing edit is not reported",
        "_edited",
        "wrong = np.flatnonzero((done != expected) & ~cached)",
        "wrong = np.flatnonzero(done < 0)",
        "tests/unit/runtime/frontend/results/test_assembly.py::test_a_wrong_number_of_edits_is_found_by_position",
    ),
    Fault(
        "A tap that does not fire is not reported",
        "tap_check:check_taps",
        "if actual != signature.signature:",
        "if False:",
        ENGINE + "test_front_door.py::test_a_tap_that_does_not_fire_stops_the_engine_as_it_starts",
    ),
    Fault(
        "Edits stay armed for requests without a plan",
        "WorkerSession.before_forward",
        "recorder.disarm()",
        "pass",
        ENGINE + "test_two_models.py::test_two_models_return_what_one_tapped_model_does",
    ),
    Fault(
        "Rows past the returned text of a stop string are kept",
        "assembly:_choose",
        "chosen = rising[np.isin(positions[rising], wanted)]",
        "chosen = rising",
        SYSTEM + "test_alongside_async.py::test_rows_past_a_stop_string_are_not_there",
    ),
    Fault(
        "A row that was delivered during its request is delivered again at the end",
        "Collection.collect",
        "_since(request.streamed, blocks[request.serial])",
        "blocks[request.serial]",
        "tests/unit/runtime/frontend/rpc/test_collect_partial.py"
        "::test_each_row_comes_once_while_its_request_runs_or_at_its_end",
    ),
    Fault(
        "A row is read before its copy from the device is done",
        "_Placer.place",
        "stored.shipment.wait()",
        "pass",
        "tests/unit/runtime/worker/test_result_buffer.py"
        "::test_rows_of_a_running_request_are_there_when_their_answer_is",
    ),
    Fault(
        "A row of a possibly rejected draft token is delivered",
        "RowSelection.stop",
        "return max(0, length - 1 - self._is_last_open)",
        "return length + 1",
        SYSTEM + "test_speculative.py::test_rows_that_come_on_the_way_are_of_no_rejected_draft",
    ),
    Fault(
        "A sink is not notified of the end of a request of which it has rows",
        "FrontEnd._release_requests",
        "self._streamer.end(uid)",
        "self._streamer._partial_rows.pop(uid, None)",
        ENGINE + "test_sinks_rows.py"
        "::test_a_call_that_is_given_up_ends_for_the_sink_that_had_some_of_it",
    ),
    Fault(
        "One tensor-parallel rank does not apply the edits",
        "PlanTable.acquire",
        "resolved, pieces = self._parse(packed)",
        """
        resolved, pieces = self._parse(packed)
        if self._share.rank:
            pieces = [piece._replace(edits=()) for piece in pieces]
        """,
        SYSTEM + "test_ranks.py::test_two_tensor_ranks_give_what_one_rank_gives",
    ),
    Fault(
        "A plan leaves the device when the first of the requests that share it has ended",
        "PlanTable.release",
        "if plan.users:",
        "if plan.packed not in self._plans:",
        "tests/unit/runtime/worker/test_plan_table.py",
    ),
    Fault(
        "All ranks of a sharded capture copy the same share",
        "RankShare.of",
        "return taps[self.rank :: self.ranks]",
        "return taps[0 :: self.ranks]",
        SYSTEM + "test_ranks.py::test_shards_make_up_what_the_first_rank_gathers",
    ),
    Fault(
        "Different plans on different ranks are not reported",
        "check_traces",
        "if not is_same:",
        "if False:",
        "tests/unit/runtime/worker/test_rank_check.py::test_another_batch_is_found",
    ),
    Fault(
        "All results are fetched from the first of several replicas",
        "replicas:call",
        "engine = client.core_engines[number]",
        "engine = client.core_engines[0]",
        SYSTEM + "test_replicas.py::test_each_of_many_at_once_gets_what_one_engine_gives",
    ),
    Fault(
        "A request is sent to a replica without capacity for it",
        "AsyncFrontEnd._set_replica",
        "request.data_parallel_rank = call.replica.number",
        "pass",
        SYSTEM + "test_replicas.py::test_each_of_many_at_once_gets_what_one_engine_gives",
    ),
    Fault(
        "A plan that was resolved for one prompt is used for a prompt of another length",
        "plan_resolver:_key_of",
        "_prompt_len(request)",
        "0",
        "tests/unit/runtime/frontend/request/test_plan_resolver.py"
        "::test_a_prompt_of_another_length_has_positions_of_its_own",
    ),
    Fault(
        "Server-wide edits do not reach a request whose plan was resolved before they were set",
        "_Recent.is_for",
        "self.own is own and self.before == before and self.also == also",
        "self.own is own",
        "tests/unit/runtime/frontend/request/test_plan_resolver.py"
        "::test_steering_and_captures_of_every_request_and_max_tokens_make_a_difference",
    ),
    Fault(
        "A receipt expects the rows of another request with the same plan",
        "ResolvedPlan.remember",
        "key = what, length",
        "key = what",
        "tests/unit/plan/resolve/test_resolved.py"
        "::test_what_a_plan_remembers_is_what_a_fresh_one_computes",
    ),
    Fault(
        "A request gets the field of another request",
        "_read_again",
        "packed = msgspec.msgpack.encode(value)",
        """
        packed = msgspec.msgpack.encode(value)
        packed = globals().setdefault(f"_of_{len(packed)}", packed)
        """,
        "tests/unit/server/test_request_field.py"
        "::test_the_same_field_is_parsed_once_and_another_one_is_itself",
    ),
    Fault(
        "Packed rows of several layers change places",
        "RowGroup.encoded",
        "pieces.append(records if places is None else records[:, places])",
        "pieces.append(records)",
        "tests/unit/results/test_serialization.py"
        "::test_rows_of_a_group_are_packed_by_their_taps_however_blocks_have_them",
    ),
    Fault(
        "Cached rows that nobody has fetched do not count for a client's limit",
        "CaptureCache.store",
        "self._count(client, 1, nbytes)",
        """
        if file is not None:
            self._count(client, 1, nbytes)
        """,
        "tests/unit/server/cached_rows/test_capture_cache.py"
        "::test_rows_that_are_not_packed_count_for_the_limits",
    ),
    Fault(
        "The rows that pad an embedding are read as part of it",
        "parameters:_part",
        "OuterParameter(rows[: stop - first], first, module.org_vocab_size, False)",
        "OuterParameter(rows, first, rows.shape[0], False)",
        ENGINE + "test_parity.py::test_every_site_of_every_layer_reads_and_edits_as_hooks_in_"
        "transformers",
    ),
)
