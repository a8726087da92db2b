"""Ways to break attention weights."""

from __future__ import annotations

from support.fault import Fault

_ENGINE = "tests/engine/test_attention.py::"
_LENS = "tests/engine/test_lens.py::"
_FEATURES = "tests/engine/test_features.py::"
_BIAS = "tests/engine/test_bias.py::"
_HEAD = "tests/unit/runtime/worker/readouts/test_logits.py::"
_TOGETHER = f"{_HEAD}test_ranks_call_the_head_together_whatever_each_one_drops_or_cannot_run"

ATTENTION = (
    Fault(
        "A sink that keeps attention is given none",
        "shares_of",
        "{key: made for key, made in shown.readouts.items() if made is not None}",
        "{}",
        f"{_ENGINE}test_sinks_get_the_weights_that_outputs_have",
    ),
    Fault(
        "A sink that keeps vectors alone is given attention, which it loses",
        "SinkSet._check_kind",
        "isinstance(capture, Capture) or kind in self._sinks[sink].keeps",
        "isinstance(capture, Capture) or sink",
        f"{_ENGINE}test_sinks_that_keep_vectors_alone_are_rejected_by_name",
    ),
    Fault(
        "A capture for files keeps their layout where no sink is asked for, and is rejected",
        "ReadOut.without_place",
        "name in self.__slots__",
        'name in self.__slots__ and name != "layout"',
        "tests/unit/plan/test_capture.py"
        "::test_where_its_files_are_laid_out_is_no_part_of_what_is_read",
    ),
    Fault(
        "Attention weights are those of all keys where the layer has a sliding window",
        "_form_of",
        "int(module.sliding_window or 0)",
        "0",
        f"{_ENGINE}test_weights_are_those_of_transformers",
    ),
    Fault(
        "Attention weights are without the layer's soft cap",
        "_form_of",
        "float(impl.logits_soft_cap or 0.0)",
        "0.0",
        f"{_ENGINE}test_weights_are_those_of_transformers",
    ),
    Fault(
        "A query attends to another group's keys",
        "_attention_of",
        "torch.arange(module.num_heads, device=device) // per_key",
        "torch.arange(module.num_heads, device=device) % module.num_kv_heads",
        f"{_ENGINE}test_weights_are_those_of_transformers",
    ),
    Fault(
        "A query attends to a key after it",
        "scores",
        "seen = distance >= 0",
        "seen = distance >= -1",
        "tests/unit/runtime/worker/readouts/test_reader.py"
        "::test_rows_are_those_of_each_query_by_itself",
    ),
    Fault(
        "The kernel of attention scores takes the window of the tile's last row for all",
        "scores_kernel",
        "seen &= (window == 0) | (distance < window)",
        "seen &= (window == 0) | (tl.max(at, 0) - key[None, :] < window)",
        "tests/unit/ops/test_site_triton.py"
        "::test_the_interpreted_kernels_do_what_their_references_do",
    ),
    Fault(
        "The kernel of attention scores reads the first block of a request for all its keys",
        "scores_kernel",
        "table + tl.load(requests + run) * table_row + key // size",
        "table + tl.load(requests + run) * table_row + 0 * key",
        "tests/unit/ops/test_site_triton.py"
        "::test_the_interpreted_kernels_do_what_their_references_do",
    ),
    Fault(
        "A query attends to the keys of another request",
        "queries_of",
        'np.searchsorted(np.cumsum(step.scheduled), rows, side="right")',
        'np.searchsorted(np.cumsum(step.scheduled), rows, side="left")',
        f"{_ENGINE}test_requests_with_and_without_attention_run_together",
    ),
    Fault(
        "Attention weights of the wrong heads are returned where ranks have parts of them",
        "attention:_rows_of",
        "computed = pattern.heads or range(count)",
        "computed = asked",
        "tests/system/test_inner_ranks.py::test_attention_of_every_head_is_that_of_one_rank",
    ),
    Fault(
        "Keys are read where no backend writes them",
        "key_layout:_layout",
        """
        if numbers.numel() != size * heads * head_dim or numbers.unique().numel() != numbers.numel():
            return None
        """,
        "",
        "tests/unit/runtime/worker/readouts/test_key_layout.py"
        "::test_a_backend_that_stores_something_else_is_refused_by_name",
    ),
    Fault(
        "Queries that go through a norm after `q` are taken for those that attention reads",
        "_check_queries",
        "if why is not None and why != NO_ROPE.format(plain):",
        "if why is not None and not why.startswith(NO_ROPE.format(plain)):",
        "tests/unit/runtime/worker/readouts/test_layers.py"
        "::test_layers_whose_attention_cannot_be_computed_again_say_why",
    ),
    Fault(
        "Rows of attention of one layer are returned as another's",
        "PatternReader.encode",
        "part = rows[:, first * nbytes : stop * nbytes]",
        "part = rows[:, : (stop - first) * nbytes]",
        "tests/unit/runtime/worker/readouts/test_reader.py"
        "::test_rows_are_those_of_each_query_by_itself",
    ),
    Fault(
        "The mass of one layer's keys is read in all layers",
        "reader:_reduced",
        "same = all(keys is chosen[0] for keys in chosen)",
        "same = True",
        "tests/unit/runtime/worker/readouts/test_reader.py"
        "::test_rows_are_those_of_each_query_by_itself",
    ),
    Fault(
        "Keys that a query does not see have a score",
        "reader:_reduced",
        "return op.full(scores, begin, columns.size, -torch.inf)",
        "return op.full(scores, begin, columns.size)",
        "tests/unit/runtime/worker/readouts/test_reader.py"
        "::test_rows_are_those_of_each_query_by_itself",
    ),
    Fault(
        "Keys of a quantised cache are read without their scale",
        "_attention_of",
        'scale = scale_of(module, "k") * (query_scale or 1.0)',
        "scale = query_scale or 1.0",
        f"{_ENGINE}test_of_a_quantised_cache_the_weights_are_those_of_what_it_holds",
    ),
    Fault(
        "Keys of fp8 are not found where a backend rounds down",
        "key_layout:_written",
        "scale *= 1 + 2 ** -6",
        "scale *= 1",
        "tests/unit/runtime/worker/readouts/test_key_layout.py"
        "::test_the_layouts_of_vllms_cpu_backend_are_found",
    ),
    Fault(
        "Scores of attention are those of another row of the step",
        "StepPatterns._score",
        "within_runs(length)",
        "within_runs(length)[::-1]",
        f"{_ENGINE}test_probes_read_the_means_of_weights",
    ),
    Fault(
        "A score of attention is that of the first rank's heads",
        "rank_parts:scores_of",
        "total = total[mine] + values[theirs]",
        "total = total[mine]",
        "tests/unit/runtime/protocol/test_rank_parts.py"
        "::test_a_score_is_the_sum_of_what_each_rank_has_of_it_and_others_are_the_first_ranks",
    ),
    Fault(
        "Logits of a request are those of another request's tokens",
        "queries:_tokens",
        "return np.repeat(np.array(tokens, np.int64), length, axis=0)",
        "return np.repeat(np.array(tokens[::-1], np.int64), length, axis=0)",
        f"{_BIAS}test_logits_that_are_asked_for_together_are_each_requests_own",
    ),
    Fault(
        "Chosen logits are returned in another order than their tokens",
        "Logits.resolve",
        "known_ids(self.tokens)",
        "sorted(known_ids(self.tokens))",
        "tests/unit/plan/test_logits.py::test_its_resolved_form_has_its_tokens_in_the_given_order",
    ),
    Fault(
        "A lens decodes the stream without the final norm",
        "RankLens.__call__",
        "normed: Tensor = self._norm.forward(stream.contiguous())",
        "normed: Tensor = stream.contiguous()",
        f"{_LENS}test_every_layer_is_decoded_as_transformers_decodes_it",
    ),
    Fault(
        "A lens returns each layer's tokens as those of the layer after it",
        "_Group.rows",
        "for query, rows in zip(self._queries, parts, strict=True):",
        "for query, rows in zip(self._queries, parts[1:] + parts[:1], strict=True):",
        f"{_LENS}test_every_layer_is_decoded_as_transformers_decodes_it",
    ),
    Fault(
        "The map of a registered lens is that of the layer before",
        "AFTER",
        'AFTER = {"resid_pre": 0, "resid_post": 1}',
        'AFTER = {"resid_pre": 0, "resid_post": 0}',
        f"{_LENS}test_registered_lenses_map_the_stream_by_the_formulas_of_their_papers",
    ),
    Fault(
        "A token steers along the image of its row, instead of that of the transposed map",
        "RankLens._pulled_back",
        "image += read[part] @ rows[part].double()",
        "image[part] += rows[part].double() @ read",
        f"{_LENS}test_steering_with_a_token_adds_the_direction_of_its_lens",
    ),
    Fault(
        "The direction of a token lacks the weights of the final norm",
        "RankLens.directions",
        "read = gain * head.double()",
        "read = head.double()",
        f"{_LENS}test_steering_with_a_token_adds_the_direction_of_its_lens",
    ),
    Fault(
        "Each rank adds the bias of a score to its part",
        "part_of_steps",
        "0.0 if step.op is Op.PROBE and part else step.a",
        "step.a",
        "tests/unit/runtime/protocol/test_rank_parts.py"
        "::test_the_parts_of_a_score_add_up_to_it_with_its_bias",
    ),
    Fault(
        "A lens is overwritten while requests use it",
        "NamedWeights._check_free",
        "self._memory.in_use((self.kind, name))",
        "not self._memory.in_use((self.kind, name))",
        "tests/unit/runtime/frontend/test_lens_registry.py"
        "::test_a_lens_stays_while_requests_use_it",
    ),
    Fault(
        "The largest logits are searched in too few blocks of tokens",
        "largest",
        "of = blocks.amax(-1).topk(count, -1).indices",
        "of = blocks.amax(-1).topk(min(count, 3), -1).indices",
        "tests/unit/runtime/worker/readouts/test_logits.py"
        "::test_the_largest_logits_are_those_of_topk",
    ),
    Fault(
        "Features are encoded without the encoder's bias",
        "SaeReader.encode",
        "activations += self._at(encoder.bias, count)",
        "",
        f"{_FEATURES}test_every_architecture_encodes_as_its_formulas_do",
    ),
    Fault(
        "Of several features of one edit, each reads what those before it made of the vector",
        "Feature.instructions",
        "one_edit([self._change(*change) for change in changes], self.norm)",
        "one_edit([self._change(*change) for change in changes], self.norm, in_turn=True)",
        "tests/unit/sae/test_sae.py::test_features_of_one_edit_read_the_same_vector",
    ),
    Fault(
        "Features that are edited by their SAE's name are encoded without its b_dec",
        "SAE.weights_of",
        "bias = bias - rows @ self.b_dec.double()",
        "pass",
        "tests/unit/sae/test_sae.py::test_features_of_one_edit_read_the_same_vector",
    ),
    Fault(
        "A feature gets the value of another one of its edit",
        "read_changes",
        "(values[place] for place in order)",
        "values",
        "tests/unit/plan/operations/test_fields.py"
        "::test_features_of_a_name_have_one_form_whatever_their_order",
    ),
    Fault(
        "Features are those of the layer after the SAE's own",
        "SAE.tap",
        "hook_tap(self.hook_name)",
        '("resid_post", hook_tap(self.hook_name)[1] + 1)',
        f"{_FEATURES}test_every_architecture_encodes_as_its_formulas_do",
    ),
    Fault(
        "Chosen features of a request are those of another request",
        "SaeReader.rows",
        "[[feature for feature, _ in run.keys[index]] for run in runs]",
        "[[feature for feature, _ in run.keys[index]] for run in runs[::-1]]",
        f"{_FEATURES}test_features_that_are_asked_for_together_are_each_requests_own",
    ),
    Fault(
        "The gate of a gated SAE is open where its magnitude is positive",
        "reduced",
        'weights["threshold"] = weights["b_mag"] - factor * weights["b_gate"]',
        'weights["threshold"] = 0 * weights["b_mag"]',
        "tests/unit/sae/test_sae.py::test_every_architecture_encodes_as_its_formulas_do",
    ),
    Fault(
        "An SAE is overwritten by another that is registered later",
        "WeightMemory.find",
        "first = max(first, -(-end // align) * align)",
        "first = max(first, end // align * align)",
        "tests/unit/runtime/frontend/test_sae_registry.py"
        "::test_encoders_are_read_where_they_were_written_beside_lenses",
    ),
    Fault(
        "The rank of a token in a lens counts tokens that are as likely",
        "_lens_row",
        "logits > chosen[:, column : column + 1]",
        "logits >= chosen[:, column : column + 1]",
        f"{_LENS}test_ranks_are_those_of_the_whole_vocabulary",
    ),
    Fault(
        "Logits are returned with the request's biases added",
        "assembly:_head",
        "Head(compute_logits, int(vllm_config.model_config.get_vocab_size()), adapters)",
        """
        Head(
            lambda hidden: model.compute_logits(hidden),
            int(vllm_config.model_config.get_vocab_size()),
            adapters,
        )
        """,
        f"{_BIAS}test_logits_are_those_of_transformers_at_every_position",
    ),
    Fault(
        "Ranks call the head for the rows that each of them has in the order of its own encodings",
        "LogitReader.rows",
        "order = np.lexsort((nths, rows))",
        "order = np.arange(len(rows))",
        _TOGETHER,
    ),
    Fault(
        "Ranks call the head for the logits and the lens of a row each in an order of its own",
        "LogitReader.rows",
        "order = np.lexsort((nths, rows))",
        'order = np.argsort(rows, kind="stable")',
        _TOGETHER,
    ),
    Fault(
        "Logits of the second part of a step are those of the tokens of the first",
        "_Group.set",
        "tokens = self._tokens[_index(to, device)]",
        "tokens = self._tokens[: len(at)]",
        _TOGETHER,
    ),
    Fault(
        "A rank whose arena is full does not call the head with the others",
        "StepRecorder.record",
        "logits = self._patterns.compute(prepared)",
        """
        if not self._slots.incomplete[plan.runs.slot].any():
            logits = self._patterns.compute(prepared)
        """,
        _TOGETHER,
    ),
    Fault(
        "A rank that cannot run a plan with logits leaves the others waiting for it",
        "RequestTable.add",
        "self._agree if split or self._agree is not None and is_joint(plan) else None",
        "None",
        _TOGETHER,
    ),
    Fault(
        "The biases of a request's last token are added to the logits before each of its drafts",
        "LogitBias.prepare",
        "first_tokens = np.cumsum(batch.scheduled) - sampled",
        "first_tokens = np.cumsum(batch.scheduled) - 1",
        "tests/unit/runtime/worker/test_logit_bias.py"
        "::test_each_row_of_logits_gets_the_switches_of_its_own_token",
    ),
    Fault(
        "Biases are those of the latest version of a plan at every position",
        "RequestState.biases_at",
        "if version.position <= position:",
        "if True:",
        "tests/unit/runtime/worker/test_logit_bias.py"
        "::test_before_the_first_position_of_a_new_version_the_biases_are_those_of_the_old_one",
    ),
    Fault(
        "Logits are those of the adapter of another request",
        "HeadAdapters.of_rows",
        "wrapper.token_lora_indices[rows]",
        "wrapper.token_lora_indices[: len(rows)].flip(0)",
        "tests/engine/test_alongside_inputs.py"
        "::test_logits_of_each_request_are_those_of_its_adapters_head",
    ),
    Fault(
        "Logits of tokens that the head lacks are left out",
        "Head._logits",
        "lacking = self._vocabulary - logits.shape[1]",
        "lacking = 0",
        f"{_HEAD}test_a_head_returns_the_logits_of_the_vocabulary_whatever_the_model_pads_or_lacks",
    ),
    Fault(
        "A row that is computed again after a preemption counts twice in a mean",
        "StepPatterns._count",
        "skip = max(0, reductions.counted(slot) - position)",
        "skip = 0",
        "tests/engine/test_reduce.py::test_rows_that_are_computed_again_count_once",
    ),
    Fault(
        "Sums of a request begin with those of the one before it",
        "Reductions.acquire",
        'self._table.index_fill_(0, place, -torch.inf if kind == "max" else 0.0)',
        "pass",
        "tests/engine/test_reduce.py"
        "::test_each_completion_has_its_own_and_an_aborted_request_leaves_nothing",
    ),
    Fault(
        "Sums of a request that ended are never given back",
        "RequestResources.release",
        "self._reductions[0].release(slot)",
        "pass",
        "tests/engine/test_reduce.py::test_requests_wait_for_room_or_are_refused_by_its_setting",
    ),
    Fault(
        "Norms of another layer are returned under a layer's name",
        "NormResults.decode",
        "results[read] = NormRows(values, rows.positions_of(*tap).clone())",
        "results[capture.pattern.reads[0]] = NormRows(values, rows.positions_of(*tap).clone())",
        "tests/engine/test_norms.py::test_norms_are_those_of_captured_rows_and_of_transformers",
    ),
    Fault(
        "A NumPy integer is no layer of a read-out's results",
        "LayerRows._layer_of",
        "as_number(layer)",
        "layer if isinstance(layer, int) else None",
        "tests/unit/results/readouts/test_base.py"
        "::test_a_layer_is_any_integer_and_negative_ones_count_from_the_last",
    ),
    Fault(
        "A negative layer of a read-out's results is not counted from the last",
        "LayerRows._layer_of",
        "number + (self._num_layers or 0) if number < 0 else number",
        "number",
        "tests/unit/results/readouts/test_base.py"
        "::test_a_layer_is_any_integer_and_negative_ones_count_from_the_last",
    ),
    Fault(
        "Norms of one site and layer may be asked for twice",
        "Norms.check_together",
        "if other != capture.source:",
        "if False:",
        "tests/unit/plan/test_norms.py::test_what_is_malformed_is_refused",
    ),
)
