"""Faults of what workers keep (vectors, and captured rows until they are stored) and of the op. See
`faults`.
"""

from __future__ import annotations

from support.fault import Fault

KEPT: tuple[Fault, ...] = (
    Fault(
        "Rows at the first position are lost when the index makes room for more",
        "CapturedRowIndex._add",
        "is_left = self._table[_SERIAL, : self._end] != _GONE",
        "is_left = self._table[_POSITION, : self._end] != 0",
        "tests/unit/runtime/worker/test_row_index.py",
    ),
    Fault(
        "The experts of a step with work call the router of the plain model",
        "add_taps",
        "name_experts(copies, vllm_config)",
        "",
        "tests/engine/test_routing.py::test_experts_are_chosen_or_not_as_a_route_says",
    ),
    Fault(
        "The experts of a step without work call the router of the tapped model",
        "name_experts",
        'experts.layer_name = f"{experts.layer_name}.{_TAG}"',
        "",
        "tests/unit/runtime/worker/taps/test_tapped_model.py"
        "::test_the_op_for_experts_calls_the_router_of_the_model_that_runs",
    ),
    Fault(
        "The workers drop vectors of a request that still waits",
        "SentVectors.take",
        "if vector.digest in self._unused:",
        "if False:",
        "tests/unit/runtime/core/test_vector_updates.py"
        "::test_each_request_has_its_vectors_whatever_begins_and_ends_in_between",
    ),
    Fault(
        "The digest of a vector does not cover all of its numbers",
        "Vector.__post_init__",
        "hashlib.sha256(self.data)",
        "hashlib.sha256(self.data[:64])",
        "tests/unit/runtime/worker/test_vector_store.py"
        "::test_vectors_that_differ_in_any_number_have_different_digests",
    ),
    Fault(
        "A program whose vectors were overwritten on the device is used again",
        "ProgramTable.drop_unused",
        "program = self._programs.pop(edits)",
        "program = self._programs[edits]",
        "tests/unit/runtime/worker/tables/test_program_table.py"
        "::test_programs_that_nobody_uses_make_room_and_those_in_use_stay",
    ),
    Fault(
        "A plan reaches a worker before its vectors",
        "_core_add",
        "vector_updates.send_updates(engine)",
        "",
        "tests/engine/test_vectors_once.py"
        "::test_vectors_are_sent_once_and_no_steps_message_has_their_numbers",
    ),
    Fault(
        "A step is run as one of other requests, whose plans were others",
        "KeptSteps.key_of",
        "parts = chosen, plans, batch.scheduled, batch.computed[chosen]",
        "parts = chosen, slot[:0], batch.scheduled, batch.computed[chosen]",
        "tests/unit/runtime/worker/step/test_kept_steps.py",
    ),
    Fault(
        "Rows with an open lease are overwritten",
        "Arena.release",
        "if segment.users == 0:",
        "if segment.users <= 1:",
        "tests/unit/transport/test_arena.py::test_whatever_is_held_keeps_its_bytes",
    ),
    Fault(
        "A lease ends while its tensors exist",
        "MappedArena._settle",
        "if not lease.users:",
        "if True:",
        "tests/unit/transport/test_arena.py::test_a_lease_over_several_segments_ends_with_the_last",
    ),
    Fault(
        "A forked child ends its parent's leases",
        "MappedArena._free",
        "if os.getpid() == self._owner:",
        "if True:",
        "tests/unit/transport/test_forks.py"
        "::test_a_lease_stays_when_a_forked_child_frees_its_tensors",
    ),
    Fault(
        "A forked child reads rows of others where its own were",
        "MappedArena._settle",
        "if lease.taken > newest:",
        "if True:",
        "tests/unit/transport/test_forks.py"
        "::test_a_child_reads_its_rows_after_the_parent_has_freed_them",
    ),
    Fault(
        "Memory of another process is read as the worker's",
        "MappedArena.__init__",
        "if bytes(flags[:TOKEN_BYTES].numpy()).hex() != address.token:",
        "if False:",
        "tests/unit/transport/test_arena.py"
        "::test_another_process_of_the_same_number_is_not_taken_for_the_worker",
    ),
    Fault(
        "A saved tensor has rows of other requests",
        "_leased_chunks",
        "torch.from_numpy(memory[start : start + records * record])",
        "torch.from_numpy(memory)[start : start + records * record]",
        "tests/unit/runtime/frontend/results/test_own_bytes.py"
        "::test_a_part_of_a_tensor_leaves_with_rows_of_its_own_request_alone",
    ),
    Fault(
        "Rows are dropped because the arena is full, and the receipt is ok",
        "make_receipt",
        "min(lost, dropped)",
        "0",
        "tests/engine/test_arena.py"
        "::test_what_has_no_room_is_dropped_counted_and_nothing_else_is_wrong",
    ),
    Fault(
        "Rows of a step are captured into the part of the ring that the step before reserved",
        "ArmedBuffers._set_first",
        "self._first_of_taps.fill_(first)",
        "self._first_of_taps.fill_(self._first)",
        "tests/unit/runtime/worker/test_session_arming.py"
        "::test_rows_are_in_the_part_of_the_ring_that_their_step_reserved_though_nothing_is_sent",
    ),
    Fault(
        "A full arena drops rows of all requests instead of those of some",
        "StepRecorder.record",
        "alone = batch.alone()",
        "alone = [batch]",
        "tests/unit/runtime/worker/test_session_overflow.py"
        "::test_the_newest_requests_lose_their_rows_and_the_others_none",
    ),
    Fault(
        "A limit of rows holds for each range of positions by itself",
        "Where.first",
        "left -= end - start",
        "",
        "tests/unit/plan/positions/test_position_set.py"
        "::test_the_first_positions_are_the_lowest_ones",
    ),
    Fault(
        "A cast makes infinities of values beyond its dtype",
        "Cast.encode",
        "wide.clamp(-most, most)",
        "wide",
        "tests/unit/codecs/test_cast.py"
        "::test_a_value_that_is_not_finite_stays_so_and_no_other_becomes_so",
    ),
    Fault(
        "A codec's error exceeds its bound",
        "encode_affine",
        "torch.addcmul(-low * factor, rows.float(), factor).div_(divisor).round_",
        "torch.addcmul(-low * factor, rows.float(), factor).div_(divisor).floor_",
        "tests/unit/codecs/test_raw_and_full8.py"
        "::test_no_value_of_a_usual_row_is_off_by_more_than_half_a_step",
    ),
    Fault(
        "A non-finite row decodes to finite numbers",
        "encode_affine",
        "torch.where(valid, header, _mark(header))",
        "header.nan_to_num()",
        "tests/unit/codecs/test_every_codec.py"
        "::test_a_row_that_is_not_finite_reads_nan_throughout_and_no_other_row_does",
    ),
    Fault(
        "A shard is visible before it is complete",
        "LocalFolder.put",
        "temporary = os.path.join(self.root, temporary_name(name))",
        "temporary = os.path.join(self.root, name)",
        "tests/unit/store/test_killed.py::test_a_writer_that_dies_before_any_of_its_system_calls",
    ),
    Fault(
        "A flipped bit in a shard is read as a number",
        "CheckedFile._check",
        "wrong = np.flatnonzero(checksums != self._sums[start:stop])",
        "wrong = np.flatnonzero(checksums != checksums)",
        "tests/unit/store/test_hostile.py::test_a_flipped_bit_is_refused_by_name",
    ),
    Fault(
        "Rows are acknowledged before they are in the store",
        "StoreWriter.check",
        "self.stored += 1",
        "self.stored += 1 + len(self._pending)",
        "tests/lab/jobs/test_killed.py"
        "::test_jobs_that_are_killed_at_random_are_resumed_without_a_lost_or_doubled_row",
    ),
    Fault(
        "A resumed job captures a line a second time",
        "CaptureRun._missing",
        "if not self._done.has(record):",
        "if True:",
        "tests/lab/jobs/test_run.py::test_a_job_that_was_stopped_goes_on_where_it_was",
    ),
    Fault(
        "A job resumes into a store of other data",
        "CompletedLines.has",
        "if int(self._digests[place]) != self._identity.digest(record):",
        "if False:",
        "tests/lab/jobs/test_run.py::test_other_data_is_refused_before_an_engine_is_started",
    ),
    Fault(
        "Rows that a killed engine had stored are captured a second time",
        "Worker._enqueue",
        "if attempt.number > 1:",
        "if False:",
        "tests/lab/jobs/ray/test_worker.py"
        "::test_what_an_earlier_try_has_stored_is_found_and_not_captured_again",
    ),
    Fault(
        "A chunk is reported as done before its rows are in the store",
        "_Chunk.is_finished",
        "not self.open and max(self.put.values(), default=0) <= stored",
        "not self.open",
        "tests/lab/jobs/ray/test_worker.py"
        "::test_chunks_that_come_together_end_each_with_all_their_lines_in_the_store",
    ),
    Fault(
        "A job resumes while processes of a killed job still write into its store",
        "taken",
        "_wait_for_writers(folder.root)",
        "pass",
        "tests/lab/jobs/test_directory_lock.py::test_a_job_is_refused_while_others_write_on",
    ),
    Fault(
        "A line that ends every engine is retried forever",
        "ChunkCoordinator.begin",
        "chunk.given_up[chunk.alone]",
        "_",
        "tests/lab/jobs/ray/test_chunk_coordinator.py"
        "::test_a_line_with_which_an_engine_ended_that_had_nothing_else_is_given_up",
    ),
    Fault(
        "An edit that overflows writes a value that is not finite",
        "write_rows",
        "beyond = ~same & ~(row.abs() <= bound)",
        "beyond = ~same & ~(row.abs() <= bound) & False",
        "tests/unit/ops/test_site_algebra.py"
        "::test_an_edit_that_overflows_saturates_and_flags_its_rows_alone",
    ),
    Fault(
        "A request with values that are not finite is reported as ok",
        "StepRecorder._verify",
        "self._slots.record(plan, edits, tally[:, layout.NONFINITE] != 0)",
        "self._slots.record(plan, edits, tally[:, layout.NONFINITE] > 1)",
        "tests/engine/test_nonfinite.py"
        "::test_captured_rows_and_scores_that_are_not_finite_are_in_the_receipt",
    ),
    Fault(
        "NaN in reused blocks of KV reaches another request",
        "v1:attach",
        'if nonfinite and runner.device.type == "cpu":',
        "if False:",
        "tests/engine/test_nonfinite.py"
        "::test_kv_that_is_not_finite_reaches_no_request_that_gets_its_blocks",
    ),
    Fault(
        "The last token's row lacks the edits of its request",
        "requests_of",
        "again = default.plan_of_last(() if own is None else own.edits)",
        "again = default.plan_of_last(())",
        "tests/engine/test_default_capture.py"
        "::test_edits_of_all_positions_reach_the_last_tokens_row",
    ),
    Fault(
        "A matrix is applied to what an earlier edit of its site left out",
        "need_of",
        "_check_maps(piece, order, hidden_size)",
        "",
        "tests/unit/runtime/frontend/request/test_budget.py"
        "::test_a_matrix_without_room_or_of_what_was_edited_before_is_refused",
    ),
    Fault(
        "An edit with a vector for each layer loses its other arguments",
        "Ablate.per_layer",
        "self.replace(directions=row, layer=layer, subspace=None)",
        "self.replace(directions=row, layer=layer, subspace=None, norm=None)",
        "tests/unit/plan/operations/test_per_layer.py"
        "::test_each_layers_part_has_every_other_argument_of_the_edit",
    ),
    Fault(
        "Captured vectors of different widths overlap in a record",
        "ProgramTable.acquire_group",
        "place += self._buffers.units[tap]",
        "place += 1",
        "tests/unit/runtime/worker/test_session.py"
        "::test_taps_of_different_widths_get_their_own_vectors_and_rows_in_every_codec",
    ),
    Fault(
        "Rows of different widths in one record are read from its beginning",
        "RecordPart.of",
        "records = records[:, 0, self.start : self.start + self.nbytes]",
        "records = records[:, 0, : self.nbytes]",
        "tests/unit/runtime/frontend/results/test_assembly.py"
        "::test_rows_of_different_widths_are_those_of_their_taps",
    ),
    Fault(
        "An edit of one head keeps the norm of the whole vector",
        "_Work._restore_norm",
        """
        wanted = norm(self._seen(rows, words))
        reached = norm(self._masked(self.stream.now(rows), words))
        """,
        """
        wanted = norm(self.stream.base[rows])
        reached = norm(self.stream.now(rows))
        """,
        "tests/unit/ops/test_site.py::test_any_mix_of_programs_is_carried_out_as_defined",
    ),
    Fault(
        "A tensor-parallel rank edits its heads with another rank's part of the vector",
        "PlanTable._own_part",
        "share.rank // share.copies(edit.tap)",
        "0",
        "tests/system/test_inner_ranks.py::test_edits_of_every_rank_do_what_they_do_on_one",
    ),
    Fault(
        "Keys that several ranks have are captured once for each of them",
        "RankShare.of_indices",
        "self.parts[tap] > 1 and self.rank % self.copies(tap) == 0",
        "self.parts[tap] > 1 or self.rank == 1",
        "tests/system/test_inner_ranks.py::test_rows_of_every_site_are_those_of_one_rank",
    ),
    Fault(
        "A replaced head takes the other heads' components with it",
        "_OF_H",
        "_OF_H = Op.ADD_MATCHED, Op.REPLACE, Op.SCALE, Op.MULTIPLY",
        "_OF_H = Op.ADD_MATCHED, Op.SCALE, Op.MULTIPLY",
        "tests/unit/plan/test_heads.py"
        "::test_an_edit_of_heads_does_to_each_what_it_does_to_a_vector_of_that_size",
    ),
    Fault(
        "A logit that is raised is no larger than the largest",
        "Device.above",
        "margin * largest.abs().clamp_min(1.0)",
        "0 * margin",
        "tests/unit/ops/test_site.py::test_any_mix_of_programs_is_carried_out_as_defined",
    ),
    Fault(
        "An activated expert is raised above what the edit's bias has not changed yet",
        "one_edit",
        "if in_turn:",
        "if False:",
        "tests/unit/plan/operations/test_route.py"
        "::test_its_instructions_compute_its_formula_and_choose_as_they_say",
    ),
    Fault(
        "The norm that an edit keeps is that of the vector after some of its features were added",
        "refreshed",
        "if step.reads or keeps:",
        "if step.reads:",
        "tests/unit/plan/operations/test_lowering.py"
        "::test_the_norm_that_is_kept_is_that_before_all_features_were_added",
    ),
    Fault(
        "A gate around a choice of experts drops the order of its parts",
        "Gate.steps",
        "(gate, replace(first, flags=first.flags & ~Flags.FRESH), *rest)",
        """
        (
            gate,
            replace(first, flags=first.flags & ~Flags.FRESH),
            *(replace(each, flags=each.flags & ~Flags.FRESH) for each in rest),
        )
        """,
        "tests/unit/plan/operations/test_route.py::test_behind_a_gate_it_is_all_or_nothing",
    ),
    Fault(
        "Experts of groups are forced as if the largest logits were chosen",
        "routing_of",
        "if experts.use_grouped_topk:",
        "if False:",
        "tests/unit/runtime/models/test_expert_choice.py::test_any_other_choice_is_named",
    ),
    Fault(
        "Rows that the server keeps for one client patch another's request",
        "opened_rows",
        "if not owns(opened[0]):",
        "if False:",
        "tests/unit/server/cached_rows/test_patched_rows.py::test_rows_of_another_client_are_not_there",
    ),
    Fault(
        "Captured rows are used in the order of the file instead of by their positions",
        "_RowsFile.read",
        "rows = rows[[row_of[position] for position in positions]]",
        "rows = rows[list(positions)[: len(rows)]]",
        "tests/unit/server/cached_rows/test_patched_rows.py"
        "::test_captured_rows_are_those_of_the_listed_positions_in_their_order",
    ),
    Fault(
        "Each head is patched with the first head's captured part",
        "named_edits:_columns",
        "[head * width + dim for head in edit.heads for dim in dims]",
        "[dim for head in edit.heads[:1] for dim in dims]",
        "tests/unit/plan/test_captured_rows.py::test_each_head_gets_its_own_part_of_the_rows",
    ),
    Fault(
        "A factor for each component is added to the 1 that is there already",
        "_Work._replaced",
        "vectors = vectors * base",
        "vectors = vectors * base + base",
        "tests/unit/ops/test_row_pairs.py"
        "::test_a_result_is_the_asked_row_to_within_the_rounding_of_that_row",
    ),
    Fault(
        "The op multiplies by components of the vector that the edit began with",
        "_Work._replaced",
        "vectors = vectors * base",
        "vectors = vectors * self.stream.entered[index(at)]",
        "tests/unit/ops/test_site.py::test_a_later_edit_reads_what_the_edits_before_it_left",
    ),
    Fault(
        "Edits of different heads share KV",
        "digest_steps",
        "[] if step.mask is None else [step.mask.digest]",
        "[]",
        "tests/engine/test_inner_poisoning.py"
        "::test_whatever_is_different_about_an_inner_edit_its_kv_is_its_own",
    ),
    Fault(
        "The embedding is read after learned positions were added",
        "_embedding",
        "if _SUMMED not in states:",
        "if True:",
        "tests/engine/test_ends.py::test_rows_are_what_transformers_embeds_and_what_its_head_reads",
    ),
    Fault(
        "A layer given to a site that has none is ignored",
        "read_taps",
        'if chosen_layers is not None and chosen_layers.indices != "all":',
        "if False:",
        "tests/unit/test_sites.py::test_a_layer_at_a_site_without_one_is_refused",
    ),
    Fault(
        "The doctor expects an edit of a head at another one",
        "columns",
        "edit.heads or (0,)",
        "(0,)",
        "tests/engine/test_doctor.py"
        "::test_a_right_model_is_ok_at_every_site_of_every_layer_and_in_every_operation",
    ),
    Fault(
        "A bias is added to the logits of prompts' log probabilities, not to the sampled ones",
        "LogitBias._add",
        "pending, self._pending = self._pending, None",
        "pending = self._pending",
        "tests/engine/test_bias.py::test_a_prompts_log_probabilities_have_no_bias",
    ),
    Fault(
        "Switches of an earlier step are still on",
        "LogitBias.prepare",
        "self._switches[: batch.num_tokens].zero_()",
        "",
        "tests/engine/test_bias.py::test_each_token_is_of_the_edited_logits_in_a_mixed_batch",
    ),
    Fault(
        "An estimate of a patch has the gradient of another position",
        "_Estimate._multiply",
        "gradient[self._targets]",
        "gradient[: len(self._targets)]",
        "tests/lab/attribution/test_estimate.py"
        "::test_prompts_of_other_lengths_are_aligned_as_in_a_sweep",
    ),
    Fault(
        "A gradient at resid_mid is that of the MLP alone, without the skip connection",
        "_hook_inside",
        'if site != "resid_mid":',
        "if True:",
        "tests/lab/attribution/test_gradients.py"
        "::test_gradients_at_all_sites_are_those_of_plain_autograd",
    ),
    Fault(
        "Weights of lower precision stay rounded up after the search for sites",
        "_one_in_float32",
        "tensor.data = data",
        "tensor.data = data.float()",
        "tests/lab/attribution/test_load.py"
        "::test_a_twin_of_lower_precision_finds_the_same_sites_and_keeps_its_weights",
    ),
)
