"""Faults of captures, edits and probes of a request, and of the caches that they meet."""

from __future__ import annotations

from support.fault import Fault

ENGINE = "tests/engine/"
SYSTEM = "tests/system/"

CORE: tuple[Fault, ...] = (
    Fault(
        "A SamplingParams object is changed by use, or loses its plan when it is reused",
        "runtime/frontend/request/call_plan.py",
        "    own = copy.copy(params)\n",
        "    own = params\n",
        ENGINE + "test_isolation.py::test_sampling_params_are_not_changed_and_can_be_used_again",
    ),
    Fault(
        "An edit of prompt positions also applies to generated tokens",
        "runtime/protocol/segments.py",
        "overlay([part.ranges for part in parts])",
        "overlay([tuple((start, None) for start, _ in part.ranges[:1]) for part in parts])",
        ENGINE + "test_isolation.py::test_position_limits_hold_over_prompt_and_decode",
    ),
    Fault(
        "KV of an edited request is found under a plain prompt's hash",
        "runtime/core/prefix_cache.py",
        "    if mark is not None:\n",
        "    if False:\n",
        ENGINE + "test_poisoning.py::test_steered_first_then_plain",
    ),
    Fault(
        "Prefix-cache keys use the name of an edit instead of its effect",
        "runtime/protocol/cache_keys.py",
        "        content: list[object] = [edit.site, edit.layer, edit.steps.digest]\n",
        "        content: list[object] = [edit.site, edit.layer]\n",
        ENGINE + "test_poisoning.py::test_two_vectors_on_one_prefix_and_then_each_again",
    ),
    Fault(
        "Edits of generated tokens are missing from the keys of their blocks",
        "runtime/protocol/cache_keys.py",
        "        if edit.where.ranges:\n",
        "        if edit.where.ranges and edit.where.ranges[0][0] < plan.prompt_len:\n",
        ENGINE + "test_poisoning.py"
        "::test_a_conversation_steered_as_it_was_generated_goes_on_plain_and_steered",
    ),
    Fault(
        "A gate's reading is missing from the prefix-cache key",
        "runtime/protocol/cache_keys.py",
        "        if not probe.name and not probe.part_of:\n            # What gates",
        "        if False:\n            # What gates",
        "tests/unit/runtime/protocol/test_cache_keys.py::test_what_a_gate_reads_is_in_the_key",
    ),
    Fault(
        "A prefix-cache hit removes rows from a capture",
        "runtime/core/prefix_cache.py",
        "    cap = payload.first_read(RESETS.get(manager) or 0)\n",
        "    cap = 1 << 60\n",
        ENGINE
        + "test_poisoning.py::test_a_hit_ends_at_the_block_below_the_first_position_that_is_read",
    ),
    Fault(
        "An exception on a worker is swallowed, and the output is unsteered",
        "runtime/worker/request_table.py",
        '            problem = f"{type(error).__name__}: {error}"\n',
        '            problem = ""\n            return\n',
        ENGINE + "test_failures.py"
        "::test_a_fault_on_the_worker_ends_the_request_that_it_is_about_and_no_other",
    ),
    Fault(
        "KV of a failed request is served to another",
        "runtime/core/failed_requests.py",
        "                if starts:\n",
        "                if False:\n",
        ENGINE + "test_failures.py::test_who_was_served_kv_of_a_request_that_failed_fails_with_it",
    ),
    Fault(
        "With n > 1 the completions share one capture",
        "runtime/protocol/results.py",
        'return 0 if num_completions == 1 else int(request_id.split("_", 1)[0])',
        "return 0",
        ENGINE
        + "test_isolation.py::test_several_completions_of_one_prompt_each_have_their_own_rows",
    ),
    Fault(
        "Results of ten or more prompts are in the text order of their ids",
        "runtime/frontend/sync_frontend.py",
        "one.delivery = self._deliver(one, data[one.admitted.uid])\n",
        "names = sorted(batch, key=lambda each: each.output.request_id)\n"
        "                other = names[batch.index(one)]\n"
        "                one.delivery = self._deliver(one, data[other.admitted.uid])\n",
        ENGINE
        + "test_isolation.py::test_more_than_ten_prompts_come_back_in_order_each_with_its_own_rows",
    ),
    Fault(
        "An edit or a capture sees one half of the fused residual stream",
        "runtime/worker/taps/taps.py",
        "                _fire(self, self.midstream_post, hidden, residual)\n",
        "                _fire(self, self.midstream_post, hidden, None)\n",
        ENGINE + "test_parity.py"
        "::test_every_site_of_every_layer_reads_and_edits_as_hooks_in_transformers",
    ),
    Fault(
        "Positions restart in each chunk of a prompt",
        "runtime/worker/step/step_planner.py",
        "        position = batch.computed[chosen].astype(np.int64)\n"
        "        if batch.unknown is None:\n",
        "        position = batch.computed[chosen].astype(np.int64) * (length == 1)\n"
        "        if batch.unknown is None:\n",
        ENGINE + "test_isolation.py::test_chunked_prefill_gives_the_rows_of_a_prefill_in_one_piece",
    ),
    Fault(
        "Only the last of two edits at one site applies",
        "runtime/protocol/segments.py",
        "        edits = tuple(part.edit for part in here if part.edit is not None)\n",
        "        edits = tuple({p.edit.tap: p.edit for p in here if p.edit is not None}.values())\n",
        ENGINE + "test_operations.py"
        "::test_edits_of_one_site_apply_in_the_order_given_and_it_matters_where_it_should",
    ),
    Fault(
        "A capture at a site that the architecture lacks is empty and reported as ok",
        "spec/resolve/tap_lookup.py",
        "    if tap in shape.taps:\n        return\n",
        "    return\n",
        ENGINE + "test_sites.py::test_sites_that_a_model_lacks_are_refused_by_name",
    ),
    Fault(
        "Captured rows differ from the activations that produced the output",
        "ops/site_ref.py",
        "            torch.add(stream, rest, out=ring[targets])\n",
        "            torch.add(stream, rest * 1.001, out=ring[targets])\n",
        ENGINE + "test_parity.py"
        "::test_every_site_of_every_layer_reads_and_edits_as_hooks_in_transformers",
    ),
    Fault(
        "What attention reads is taken in front of its norm",
        "runtime/models/convention.py",
        '    return Input(attention, shared, parameter="hidden_states")\n',
        '    return Input("input_layernorm", shared)\n',
        ENGINE + "test_parity.py"
        "::test_every_site_of_every_layer_reads_and_edits_as_hooks_in_transformers",
    ),
    Fault(
        "An edit of what attention reads is read by the MLP beside it too",
        "runtime/models/convention.py",
        "    shared = isinstance(mlp, Input) and mlp.shared\n",
        "    shared = False\n",
        ENGINE + "test_parity.py"
        "::test_every_site_of_every_layer_reads_and_edits_as_hooks_in_transformers",
    ),
    Fault(
        "The last layer, or every layer, is off by one",
        "runtime/worker/taps/taps.py",
        "        if number == layer.index:\n",
        "        if number == min(layer.index + 1, max(n for _, n in taps)):\n",
        ENGINE + "test_parity.py"
        "::test_every_site_of_every_layer_reads_and_edits_as_hooks_in_transformers",
    ),
    Fault(
        "A row that was computed twice is duplicated or outdated",
        "runtime/worker/row_index.py",
        "    order = np.lexsort((source, position, serial))\n",
        "    order = np.lexsort((-source, position, serial))\n",
        "tests/unit/runtime/worker/test_row_index.py",
    ),
    Fault(
        "Rows of rejected draft tokens are kept",
        "runtime/worker/row_index.py",
        "    last = np.append((serial[1:] != serial[:-1]) | (position[1:] != position[:-1]), True)\n",
        "    last = np.ones(serial.size, np.bool_)\n",
        SYSTEM + "test_speculative.py",
    ),
    Fault(
        "Results are matched by a prefix of the request's id",
        "runtime/worker/collection.py",
        "        wanted = set(uids)\n",
        "        wanted = {r.uid for r in self._requests.all() for u in uids if r.uid[:1] == u[:1]}\n",
        ENGINE + "test_adversarial.py::test_every_request_of_a_random_mix_gets_what_it_gets_alone",
    ),
    Fault(
        "A generated token that is computed again after preemption counts as a prompt token",
        "runtime/worker/step/step_planner.py",
        "            start, end = max(position, segment.start), min(stop, segment.stop)\n",
        "            segment = request.segments_within(position, position + 1)[0]\n"
        "            start, end = position, stop\n",
        ENGINE
        + "test_where.py::test_a_generated_token_that_is_computed_anew_is_still_a_generated_token",
    ),
    Fault(
        "A named and an inline vector at one site: one of them is dropped",
        "spec/plan.py",
        "                edits.extend(expand(edit))\n",
        "                edits[:] = list(expand(edit))\n",
        ENGINE + "test_tiers.py::test_named_and_inline_and_server_wide_vectors_add_up_at_one_site",
    ),
    Fault(
        "A name that is registered again still has its old vector",
        "steering/registry.py",
        "        entry = self._current().get(name)\n        if entry is None:\n"
        "            raise self._unknown(name)\n        return entry.description, entry.found\n",
        "        entry = self.__dict__.setdefault('_old', {}).setdefault(\n"
        "            name, self.entries.get(name)\n        )\n"
        "        if entry is None:\n            raise self._unknown(name)\n"
        "        return entry.description, entry.found\n",
        ENGINE + "test_poisoning.py::test_a_name_that_is_registered_anew_stands_for_its_new_vector",
    ),
    Fault(
        "A name of whole edits that is registered again still stands for its old edits",
        "steering/registry.py",
        "            self.entries = {**self.entries, name: entry}\n",
        "            self.entries = {name: entry, **self.entries}\n",
        ENGINE + "test_poisoning.py::test_whole_edits_of_a_name_share_kv_by_their_content",
    ),
    Fault(
        "A server-wide capture that was replaced is still taken for new requests",
        "sinks/server_captures.py",
        "            self._by_name = new\n",
        "            self._by_name = {**new, **self._by_name}\n",
        ENGINE + "test_server_captures.py::"
        "test_requests_have_the_captures_that_were_set_when_they_came",
    ),
    Fault(
        "A plan for an engine that is not enabled is ignored",
        "runtime/install.py",
        "        if has_plan(params):\n            raise _no_front_end(processor)\n",
        "",
        ENGINE + "test_front_door.py"
        "::test_an_engine_that_is_not_enabled_refuses_plans_once_midstream_is_loaded",
    ),
    Fault(
        "A field of another tool is ignored",
        "compat/foreign_fields.py",
        "            problem = _problem(name, value, place_of)\n",
        "            problem = ''\n",
        "tests/unit/server/test_foreign_fields.py::test_a_known_field_is_never_passed_over",
    ),
    Fault(
        "A translated request does not say so",
        "runtime/frontend/results/assembly.py",
        "    coming_from = () if own is None else own.coming_from\n",
        "    coming_from = ()\n",
        ENGINE + "test_others_words.py::test_their_words_give_the_rows_and_tokens_of_ours",
    ),
    Fault(
        "A request gets the receipt of another one of its plan, whose states differ",
        "runtime/protocol/results.py",
        "        return self.worker, self._leased is None, self._states.tobytes(), known\n",
        "        return self.worker, self._leased is None, known\n",
        "tests/unit/runtime/frontend/results/test_assembly.py::test_what_requests_of_one_plan_share_is_only_what_the_workers_said_alike",
    ),
    Fault(
        "Requests of one plan share the positions that their callers may change",
        "results/gathered_rows.py",
        "            self._positions = torch.from_numpy(self._positions.copy())\n",
        "            self._positions = torch.from_numpy(self._positions)\n",
        "tests/unit/runtime/frontend/results/test_assembly.py::test_positions_of_a_request_can_be_changed_without_changing_those_of_the_next",
    ),
    Fault(
        "A missing edit is not reported",
        "runtime/frontend/results/receipts.py",
        "    wrong = np.flatnonzero((done != expected) & ~cached)\n",
        "    wrong = np.flatnonzero(done < 0)\n",
        "tests/unit/runtime/frontend/results/test_assembly.py::test_a_wrong_number_of_edits_is_found_by_position",
    ),
    Fault(
        "A tap that does not fire is not reported",
        "runtime/worker/taps/tap_check.py",
        "    if found != signature.signature:\n",
        "    if False:\n",
        ENGINE + "test_front_door.py::test_a_tap_that_does_not_fire_stops_the_engine_as_it_starts",
    ),
    Fault(
        "Edits stay armed for requests without a plan",
        "runtime/worker/session.py",
        "        if plan is None:\n            recorder.disarm()\n",
        "        if plan is None:\n            pass\n",
        ENGINE + "test_two_models.py::test_two_models_return_what_one_tapped_model_does",
    ),
    Fault(
        "Rows past the returned text of a stop string are kept",
        "runtime/frontend/results/assembly.py",
        "    chosen = rising[np.isin(positions[rising], wanted)]\n",
        "    chosen = rising\n",
        SYSTEM + "test_alongside_async.py::test_rows_past_a_stop_string_are_not_there",
    ),
    Fault(
        "A row that was delivered during its request is delivered again at the end",
        "runtime/worker/collection.py",
        "            request.blocks = _since(request.streamed, blocks[request.serial])\n",
        "            request.blocks = blocks[request.serial]\n",
        "tests/unit/runtime/frontend/rpc/test_collect_partial.py"
        "::test_each_row_comes_once_while_its_request_runs_or_at_its_end",
    ),
    Fault(
        "A row is read before its copy from the device is done",
        "runtime/worker/result_buffer.py",
        "            stored.shipment.wait()\n",
        "            pass\n",
        "tests/unit/runtime/worker/test_result_buffer.py"
        "::test_rows_of_a_running_request_are_there_when_their_answer_is",
    ),
    Fault(
        "A row of a possibly rejected draft token is delivered",
        "runtime/frontend/results/row_selection.py",
        "        return max(0, length - 1 - self._is_last_open)\n",
        "        return length + 1\n",
        SYSTEM + "test_speculative.py::test_rows_that_come_on_the_way_are_of_no_rejected_draft",
    ),
    Fault(
        "A sink is not notified of the end of a request of which it has rows",
        "runtime/frontend/sync_frontend.py",
        "                self._streamer.end(uid)\n            self._call",
        "                self._streamer._partial_rows.pop(uid, None)\n            self._call",
        ENGINE + "test_sinks_rows.py"
        "::test_a_call_that_is_given_up_ends_for_the_sink_that_had_some_of_it",
    ),
    Fault(
        "One tensor-parallel rank does not apply the edits",
        "runtime/worker/plan_table.py",
        "            resolved, pieces = self._parse(packed)\n            try:\n",
        "            resolved, pieces = self._parse(packed)\n"
        "            if self._share.rank:\n"
        "                pieces = [piece._replace(edits=()) for piece in pieces]\n"
        "            try:\n",
        SYSTEM + "test_ranks.py::test_two_tensor_ranks_give_what_one_rank_gives",
    ),
    Fault(
        "A plan leaves the device when the first of the requests that share it has ended",
        "runtime/worker/plan_table.py",
        "        if plan.users:\n",
        "        if plan.packed not in self._plans:\n",
        "tests/unit/runtime/worker/test_plan_table.py",
    ),
    Fault(
        "All ranks of a sharded capture copy the same share",
        "runtime/protocol/segments.py",
        "            return taps[self.rank :: self.ranks]\n",
        "            return taps[0 :: self.ranks]\n",
        SYSTEM + "test_ranks.py::test_shards_make_up_what_the_first_rank_gathers",
    ),
    Fault(
        "Different plans on different ranks are not reported",
        "runtime/frontend/rpc/fetch.py",
        "            if not is_same:\n",
        "            if False:\n",
        "tests/unit/runtime/worker/test_rank_check.py::test_another_batch_is_found",
    ),
    Fault(
        "All results are fetched from the first of several replicas",
        "runtime/frontend/rpc/replicas.py",
        "    engine = client.core_engines[number]\n",
        "    engine = client.core_engines[0]\n",
        SYSTEM + "test_replicas.py::test_each_of_many_at_once_gets_what_one_engine_gives",
    ),
    Fault(
        "A request is sent to a replica without capacity for it",
        "runtime/frontend/async_frontend.py",
        "            request.data_parallel_rank = call.replica.number\n",
        "            pass\n",
        SYSTEM + "test_replicas.py::test_each_of_many_at_once_gets_what_one_engine_gives",
    ),
    Fault(
        "A plan that was resolved for one prompt is used for a prompt of another length",
        "runtime/frontend/request/plan_resolver.py",
        "    return id(own), _prompt_len(request), request.sampling_params.max_tokens\n",
        "    return id(own), 0, request.sampling_params.max_tokens\n",
        "tests/unit/runtime/frontend/request/test_plan_resolver.py"
        "::test_a_prompt_of_another_length_has_positions_of_its_own",
    ),
    Fault(
        "Server-wide edits do not reach a request whose plan was resolved before they were set",
        "runtime/frontend/request/plan_resolver.py",
        "        return self.own is own and self.before == before and self.also == also\n",
        "        return self.own is own\n",
        "tests/unit/runtime/frontend/request/test_plan_resolver.py"
        "::test_steering_and_captures_of_every_request_and_max_tokens_make_a_difference",
    ),
    Fault(
        "A receipt expects the rows of another request with the same plan",
        "spec/resolve/resolved.py",
        "        key = (what, length)\n",
        "        key = what\n",
        "tests/unit/spec/resolve/test_resolved.py"
        "::test_what_a_plan_remembers_is_what_a_fresh_one_computes",
    ),
    Fault(
        "A request gets the field of another request",
        "server/request_field.py",
        "        packed = msgspec.msgpack.encode(value)\n",
        "        packed = msgspec.msgpack.encode(value)\n"
        '        packed = globals().setdefault(f"_of_{len(packed)}", packed)\n',
        "tests/unit/server/test_request_field.py"
        "::test_the_same_field_is_parsed_once_and_another_one_is_itself",
    ),
    Fault(
        "Packed rows of several layers change places",
        "results/gathered_rows.py",
        "                pieces.append(records if places is None else records[:, places])\n",
        "                pieces.append(records)\n",
        "tests/unit/results/test_serialization.py"
        "::test_rows_of_a_group_are_packed_by_their_taps_however_blocks_have_them",
    ),
    Fault(
        "Cached rows that nobody has fetched do not count for a client's limit",
        "server/capture_cache.py",
        "                self._captures[entry.id] = _Kept(entry, unpacked, file)\n"
        "                self._count(client, 1, nbytes)\n",
        "                self._captures[entry.id] = _Kept(entry, unpacked, file)\n"
        "                if file is not None:\n                    self._count(client, 1, nbytes)\n",
        "tests/unit/server/test_capture_cache.py"
        "::test_rows_that_are_not_packed_count_for_the_limits",
    ),
    Fault(
        "The rows that pad an embedding are read as part of it",
        "runtime/models/parameters.py",
        "OuterParameter(rows[: stop - first], first, module.org_vocab_size, False)",
        "OuterParameter(rows, first, rows.shape[0], False)",
        ENGINE + "test_parity.py::test_every_site_of_every_layer_reads_and_edits_as_hooks_in_"
        "transformers",
    ),
)
