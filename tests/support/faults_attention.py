"""Ways to break attention weights."""

from __future__ import annotations

from support.fault import Fault

_ENGINE = "tests/engine/test_attention.py::"
_LENS = "tests/engine/test_lens.py::"
_FEATURES = "tests/engine/test_features.py::"
_BIAS = "tests/engine/test_bias.py::"
_HEAD = "tests/unit/runtime/worker/attention/test_logits.py::"
_TOGETHER = f"{_HEAD}test_ranks_call_the_head_together_whatever_each_one_drops_or_cannot_run"

ATTENTION = (
    Fault(
        "A sink that keeps attention is given none",
        "runtime/frontend/results/delivery.py",
        "                attention=shown.attention,\n",
        "                attention=None,\n",
        f"{_ENGINE}test_sinks_get_the_weights_that_outputs_have",
    ),
    Fault(
        "A sink that keeps vectors alone is given attention, which it loses",
        "sinks/sink_set.py",
        "not found.keeps_attention:",
        "not sink:",
        f"{_ENGINE}test_sinks_that_keep_vectors_alone_are_rejected_by_name",
    ),
    Fault(
        "A capture for files keeps their layout where no sink is asked for, and is rejected",
        "spec/capture.py",
        '"request_id": "", "layout": ""}',
        '"request_id": ""}',
        "tests/unit/spec/test_capture.py"
        "::test_where_its_files_are_laid_out_is_no_part_of_what_is_read",
    ),
    Fault(
        "Attention weights are those of all keys where the layer has a sliding window",
        "runtime/worker/attention/layers.py",
        "        window=int(module.sliding_window or 0),\n",
        "        window=0,\n",
        f"{_ENGINE}test_weights_are_those_of_transformers",
    ),
    Fault(
        "Attention weights are without the layer's soft cap",
        "runtime/worker/attention/layers.py",
        "        soft_cap=float(impl.logits_soft_cap or 0.0),\n",
        "        soft_cap=0.0,\n",
        f"{_ENGINE}test_weights_are_those_of_transformers",
    ),
    Fault(
        "A query attends to another group's keys",
        "runtime/worker/attention/layers.py",
        "torch.arange(module.num_heads, device=device) // per_key",
        "torch.arange(module.num_heads, device=device) % module.num_kv_heads",
        f"{_ENGINE}test_weights_are_those_of_transformers",
    ),
    Fault(
        "A query attends to a key after it",
        "runtime/worker/attention/weights.py",
        "    seen = distance >= 0\n",
        "    seen = distance >= -1\n",
        "tests/unit/runtime/worker/attention/test_reader.py"
        "::test_rows_are_those_of_each_query_by_itself",
    ),
    Fault(
        "The kernel of attention scores takes the window of the tile's last row for all",
        "runtime/worker/attention/scores_kernel.py",
        "(distance < window)",
        "(tl.max(at, 0) - key[None, :] < window)",
        "tests/unit/ops/test_site_triton.py"
        "::test_the_interpreted_kernels_do_what_their_references_do",
    ),
    Fault(
        "The kernel of attention scores reads the first block of a request for all its keys",
        "runtime/worker/attention/scores_kernel.py",
        "table_row + key // size,",
        "table_row + 0 * key,",
        "tests/unit/ops/test_site_triton.py"
        "::test_the_interpreted_kernels_do_what_their_references_do",
    ),
    Fault(
        "A query attends to the keys of another request",
        "runtime/worker/attention/queries.py",
        'side="right")',
        'side="left")',
        f"{_ENGINE}test_requests_with_and_without_attention_run_together",
    ),
    Fault(
        "Attention weights of the wrong heads are returned where ranks have parts of them",
        "runtime/frontend/results/attention.py",
        "        computed = pattern.heads or range(count)\n",
        "        computed = asked\n",
        "tests/system/test_inner_ranks.py::test_attention_of_every_head_is_that_of_one_rank",
    ),
    Fault(
        "Keys are read where no backend writes them",
        "runtime/worker/attention/key_layout.py",
        "    if numbers.numel() != size * heads * head_dim or numbers.unique().numel() != numbers.numel():\n"
        "        return None\n",
        "",
        "tests/unit/runtime/worker/attention/test_key_layout.py"
        "::test_a_backend_that_stores_something_else_is_refused_by_name",
    ),
    Fault(
        "Queries that go through a norm after `q` are taken for those that attention reads",
        "runtime/worker/attention/layers.py",
        "    if why is not None and why != NO_ROPE.format(plain):\n",
        "    if why is not None and not why.startswith(NO_ROPE.format(plain)):\n",
        "tests/unit/runtime/worker/attention/test_layers.py"
        "::test_layers_whose_attention_cannot_be_computed_again_say_why",
    ),
    Fault(
        "Rows of attention of one layer are returned as another's",
        "runtime/worker/attention/reader.py",
        "part = rows[:, first * nbytes : stop * nbytes]",
        "part = rows[:, : (stop - first) * nbytes]",
        "tests/unit/runtime/worker/attention/test_reader.py"
        "::test_rows_are_those_of_each_query_by_itself",
    ),
    Fault(
        "The mass of one layer's keys is read in all layers",
        "runtime/worker/attention/reader.py",
        "same = all(each is chosen[0] for each in chosen)",
        "same = True",
        "tests/unit/runtime/worker/attention/test_reader.py"
        "::test_rows_are_those_of_each_query_by_itself",
    ),
    Fault(
        "Keys that a query does not see have a score",
        "runtime/worker/attention/reader.py",
        "op.full(scores, begin, columns.size, -torch.inf)",
        "op.full(scores, begin, columns.size)",
        "tests/unit/runtime/worker/attention/test_reader.py"
        "::test_rows_are_those_of_each_query_by_itself",
    ),
    Fault(
        "Keys of a quantised cache are read without their scale",
        "runtime/worker/attention/layers.py",
        '    scale = scale_of(module, "k") * (query_scale or 1.0)\n',
        "    scale = query_scale or 1.0\n",
        f"{_ENGINE}test_of_a_quantised_cache_the_weights_are_those_of_what_it_holds",
    ),
    Fault(
        "Keys of fp8 are not found where a backend rounds down",
        "runtime/worker/attention/key_layout.py",
        "        scale *= 1 + 2**-6",
        "        scale *= 1",
        "tests/unit/runtime/worker/attention/test_key_layout.py"
        "::test_the_layouts_of_vllms_cpu_backend_are_found",
    ),
    Fault(
        "Scores of attention are those of another row of the step",
        "runtime/worker/attention/step_patterns.py",
        "rows = np.repeat(runs.row[batch.runs], length) + within_runs(length)",
        "rows = np.repeat(runs.row[batch.runs], length) + within_runs(length)[::-1]",
        f"{_ENGINE}test_probes_read_the_means_of_weights",
    ),
    Fault(
        "A score of attention is that of the first rank's heads",
        "runtime/protocol/rank_parts.py",
        "        total = total[mine] + values[theirs]\n",
        "        total = total[mine]\n",
        "tests/unit/runtime/protocol/test_rank_parts.py"
        "::test_a_score_is_the_sum_of_what_each_rank_has_of_it_and_others_are_the_first_ranks",
    ),
    Fault(
        "Logits of a request are those of another request's tokens",
        "runtime/worker/attention/queries.py",
        "np.repeat(np.array(each, np.int64), length, axis=0)",
        "np.repeat(np.array(each[::-1], np.int64), length, axis=0)",
        f"{_BIAS}test_logits_that_are_asked_for_together_are_each_requests_own",
    ),
    Fault(
        "Chosen logits are returned in another order than their tokens",
        "spec/resolve/logits.py",
        "for token in known_ids(logits.tokens))",
        "for token in sorted(known_ids(logits.tokens)))",
        "tests/unit/spec/test_logits.py::test_its_resolved_form_has_its_tokens_in_the_given_order",
    ),
    Fault(
        "A lens decodes the stream without the final norm",
        "runtime/worker/attention/lens.py",
        "self._norm.forward(stream.contiguous())",
        "stream.contiguous()",
        f"{_LENS}test_every_layer_is_decoded_as_transformers_decodes_it",
    ),
    Fault(
        "A lens returns each layer's tokens as those of the layer after it",
        "runtime/worker/attention/logits.py",
        "            for query, rows in zip(self._queries, parts, strict=True):\n",
        "            for query, rows in zip(self._queries, parts[1:] + parts[:1], strict=True):\n",
        f"{_LENS}test_every_layer_is_decoded_as_transformers_decodes_it",
    ),
    Fault(
        "The map of a registered lens is that of the layer before",
        "runtime/frontend/request/lenses.py",
        '"resid_post": 1}',
        '"resid_post": 0}',
        f"{_LENS}test_registered_lenses_map_the_stream_by_the_formulas_of_their_papers",
    ),
    Fault(
        "A token steers along the image of its row, instead of that of the transposed map",
        "runtime/worker/attention/lens.py",
        "found += read[part] @ rows[part].double()",
        "found[part] += rows[part].double() @ read",
        f"{_LENS}test_steering_with_a_token_adds_the_direction_of_its_lens",
    ),
    Fault(
        "The direction of a token lacks the weights of the final norm",
        "runtime/worker/attention/lens.py",
        "read = gain * head.double()",
        "read = head.double()",
        f"{_LENS}test_steering_with_a_token_adds_the_direction_of_its_lens",
    ),
    Fault(
        "Each rank adds the bias of a score to its part",
        "runtime/protocol/rank_parts.py",
        "a=0.0 if step.op is Op.PROBE and part else step.a,",
        "a=step.a,",
        "tests/unit/runtime/protocol/test_rank_parts.py"
        "::test_the_parts_of_a_score_add_up_to_it_with_its_bias",
    ),
    Fault(
        "A lens is overwritten while requests use it",
        "runtime/frontend/weight_memory.py",
        "        if name in self._registered and self._memory.in_use",
        "        if name in self._registered and not self._memory.in_use",
        "tests/unit/runtime/frontend/test_lens_registry.py"
        "::test_a_lens_stays_while_requests_use_it",
    ),
    Fault(
        "The largest logits are searched in too few blocks of tokens",
        "runtime/worker/attention/logits.py",
        "blocks.amax(-1).topk(count, -1).indices",
        "blocks.amax(-1).topk(min(count, 3), -1).indices",
        "tests/unit/runtime/worker/attention/test_logits.py"
        "::test_the_largest_logits_are_those_of_topk",
    ),
    Fault(
        "Features are encoded without the encoder's bias",
        "runtime/worker/attention/sae.py",
        "        found += self._at(encoder.bias, count)\n",
        "",
        f"{_FEATURES}test_every_architecture_encodes_as_its_formulas_do",
    ),
    Fault(
        "Of several features of one edit, each reads what those before it made of the vector",
        "spec/operations/feature.py",
        "for each in given], self.norm)",
        "for each in given], self.norm, in_turn=True)",
        "tests/unit/sae/test_sae.py::test_features_of_one_edit_read_the_same_vector",
    ),
    Fault(
        "Features that are edited by their SAE's name are encoded without its b_dec",
        "sae/sae.py",
        "            bias = bias - rows @ self.b_dec.double()\n",
        "            pass\n",
        "tests/unit/sae/test_sae.py::test_features_of_one_edit_read_the_same_vector",
    ),
    Fault(
        "A feature gets the value of another one of its edit",
        "spec/operations/feature.py",
        "tuple(values[nth] for nth in order)",
        "tuple(values)",
        "tests/unit/spec/operations/test_fields.py"
        "::test_features_of_a_name_have_one_form_whatever_their_order",
    ),
    Fault(
        "Features are those of the layer after the SAE's own",
        "sae/sae.py",
        "return None if self.hook_name is None else hook_tap(self.hook_name)",
        'return None if self.hook_name is None else ("resid_post", hook_tap(self.hook_name)[1] + 1)',
        f"{_FEATURES}test_every_architecture_encodes_as_its_formulas_do",
    ),
    Fault(
        "Chosen features of a request are those of another request",
        "runtime/worker/attention/sae.py",
        "for run in runs]\n        length",
        "for run in runs[::-1]]\n        length",
        f"{_FEATURES}test_features_that_are_asked_for_together_are_each_requests_own",
    ),
    Fault(
        "The gate of a gated SAE is open where its magnitude is positive",
        "sae/tensors.py",
        'found["threshold"] = found["b_mag"] - factor * found["b_gate"]',
        'found["threshold"] = 0 * found["b_mag"]',
        "tests/unit/sae/test_sae.py::test_every_architecture_encodes_as_its_formulas_do",
    ),
    Fault(
        "An SAE is overwritten by another that is registered later",
        "runtime/frontend/weight_memory.py",
        "            first = max(first, -(-end // align) * align)\n",
        "            first = max(first, end // align * align)\n",
        "tests/unit/runtime/frontend/test_sae_registry.py"
        "::test_encoders_are_read_where_they_were_written_beside_lenses",
    ),
    Fault(
        "The rank of a token in a lens counts tokens that are as likely",
        "runtime/worker/attention/logits.py",
        "1 + (logits > chosen",
        "1 + (logits >= chosen",
        f"{_LENS}test_ranks_are_those_of_the_whole_vocabulary",
    ),
    Fault(
        "Logits are returned with the request's biases added",
        "runtime/worker/endpoint.py",
        "return Head(compute_logits, int(",
        "return Head(lambda hidden: model.compute_logits(hidden), int(",
        f"{_BIAS}test_logits_are_those_of_transformers_at_every_position",
    ),
    Fault(
        "Ranks call the head for the rows that each of them has in the order of its own encodings",
        "runtime/worker/attention/logits.py",
        "np.lexsort((nths, rows))",
        "np.arange(len(rows))",
        _TOGETHER,
    ),
    Fault(
        "Ranks call the head for the logits and the lens of a row each in an order of its own",
        "runtime/worker/attention/logits.py",
        "np.lexsort((nths, rows))",
        'np.argsort(rows, kind="stable")',
        _TOGETHER,
    ),
    Fault(
        "Logits of the second part of a step are those of the tokens of the first",
        "runtime/worker/attention/logits.py",
        "self._tokens[_index(to, device)]",
        "self._tokens[: len(at)]",
        _TOGETHER,
    ),
    Fault(
        "A rank whose arena is full does not call the head with the others",
        "runtime/worker/step_recorder.py",
        "            logits = self._patterns.compute(prepared)",
        "            if not self._slots.incomplete[plan.runs.slot].any():\n"
        "                logits = self._patterns.compute(prepared)",
        _TOGETHER,
    ),
    Fault(
        "A rank that cannot run a plan with logits leaves the others waiting for it",
        "runtime/worker/request_table.py",
        "        agree = self._agree if split or (self._agree is not None and is_joint(plan)) else None\n",
        "        agree = None\n",
        _TOGETHER,
    ),
    Fault(
        "The biases of a request's last token are added to the logits before each of its drafts",
        "runtime/worker/logit_bias.py",
        "first_tokens = np.cumsum(batch.scheduled) - sampled\n",
        "first_tokens = np.cumsum(batch.scheduled) - 1\n",
        "tests/unit/runtime/worker/test_logit_bias.py"
        "::test_each_row_of_logits_gets_the_switches_of_its_own_token",
    ),
    Fault(
        "Biases are those of the latest version of a plan at every position",
        "runtime/worker/request_state.py",
        "            if one.position <= position:\n                return ()",
        "            if True:\n                return ()",
        "tests/unit/runtime/worker/test_logit_bias.py"
        "::test_before_the_first_position_of_a_new_version_the_biases_are_those_of_the_old_one",
    ),
    Fault(
        "Logits are those of the adapter of another request",
        "runtime/worker/attention/head_adapters.py",
        "wrapper.token_lora_indices[rows]",
        "wrapper.token_lora_indices[: len(rows)].flip(0)",
        "tests/engine/test_alongside_inputs.py"
        "::test_logits_of_each_request_are_those_of_its_adapters_head",
    ),
    Fault(
        "Logits of tokens that the head lacks are left out",
        "runtime/worker/attention/logits.py",
        "        lacking = self._vocabulary - logits.shape[1]\n",
        "        lacking = 0\n",
        f"{_HEAD}test_a_head_returns_the_logits_of_the_vocabulary_whatever_the_model_pads_or_lacks",
    ),
    Fault(
        "A row that is computed again after a preemption counts twice in a mean",
        "runtime/worker/attention/step_patterns.py",
        "skip = max(0, reductions.counted(slot) - position)",
        "skip = 0",
        "tests/engine/test_reduce.py::test_rows_that_are_computed_again_count_once",
    ),
    Fault(
        "Sums of a request begin with those of the one before it",
        "runtime/worker/reductions.py",
        '                self._table.index_fill_(0, place, -torch.inf if kind == "max" else 0.0)\n',
        "                pass\n",
        "tests/engine/test_reduce.py"
        "::test_each_completion_has_its_own_and_an_aborted_request_leaves_nothing",
    ),
    Fault(
        "Sums of a request that ended are never given back",
        "runtime/worker/request_resources.py",
        "            self._reductions[0].release(slot)\n",
        "            pass\n",
        "tests/engine/test_reduce.py::test_requests_wait_for_room_or_are_refused_by_its_setting",
    ),
)
