"""Faults of lists whose order is lost, of words as tokens, and of what is said of other tools; see
`faults`.
"""

from __future__ import annotations

from support.fault import Fault

_PLACES = "tests/unit/plan/resolve/test_row_placement.py::"
_ROWS = "tests/unit/plan/positions/test_row_order.py::"
_LISTS = (
    "tests/unit/test_order_of_lists.py"
    "::test_a_list_in_another_order_has_the_result_in_that_order_or_is_rejected"
)
_TEXTS = "tests/unit/plan/positions/test_following_text.py::"
_FOREIGN = "tests/unit/compat/test_foreign_fields.py::"
_MESSAGES = "tests/unit/runtime/frontend/request/prompt/test_message_spans.py::"

ORDER: tuple[Fault, ...] = (
    Fault(
        "Rows of an edit go to the listed positions in ascending order",
        "RowPlacement.place",
        "if len(positions.include) > 1:",
        "if False:",
        _PLACES + "test_each_row_goes_to_the_position_of_its_place_in_the_list",
    ),
    Fault(
        "A position that is listed twice gets the last of its rows",
        "RowPlacement._order",
        "if listed[place] == listed[after]:",
        "if False:",
        _PLACES + "test_a_position_that_is_listed_twice_would_have_two_rows",
    ),
    Fault(
        "A capture of positions that do not ascend returns rows in another order than it lists",
        "row_order:_check",
        "if place < other:",
        "if place != other:",
        _ROWS + "test_a_list_that_rows_would_not_follow_is_rejected",
    ),
    Fault(
        "A capture of positions of both ends has fewer rows than it lists where these meet",
        "_Resolver._resolve_capture",
        "self._check_order(readout.positions)",
        "pass",
        _ROWS + "test_a_list_that_rows_would_not_follow_is_rejected",
    ),
    Fault(
        "A capture of every request stops the requests of short prompts",
        "_Resolver._resolve_capture",
        "if source >= 0 and readout.returns_each:",
        "if readout.returns_each:",
        _ROWS + "test_a_capture_of_every_request_stops_no_short_prompt",
    ),
    Fault(
        "Captured heads come in ascending order, whatever their list says",
        "capture:_read_heads",
        'heads = read_ordered_indices(value, "heads")',
        'heads = tuple(sorted(read_ordered_indices(value, "heads")))',
        _LISTS,
    ),
    Fault(
        "Attention of heads is returned under the names of other heads",
        "attention:_rows_of",
        "values = values[:, [computed.index(head) for head in asked]]",
        "values = values[:, [computed.index(head) for head in sorted(asked)]]",
        _LISTS,
    ),
    Fault(
        "A lens returns its layers in ascending order, whatever their list says",
        "LensRows.of",
        "layers = _as_listed(sorted(taps), asked.layers)",
        "layers = tuple(sorted(taps))",
        _LISTS,
    ),
    Fault(
        "The layers of a sweep are sorted",
        "plan_grid",
        "layers = _layers(request, shape, taps)",
        "layers = sorted({layer for _, layer in taps})",
        _LISTS,
    ),
    Fault(
        "Cached rows are taken in ascending order of their positions",
        "CapturedRows.__init__",
        'read_ordered_indices(positions, "positions")',
        'tuple(sorted(read_ordered_indices(positions, "positions")))',
        "tests/unit/server/cached_rows/test_patched_rows.py"
        "::test_captured_rows_are_those_of_the_listed_positions_in_their_order",
    ),
    Fault(
        "A text is scored with a space that it does not have, as it is tokenized apart",
        "batches:_after",
        "token_ids = ids_after(tokenizer, before, whole, text)",
        'token_ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])',
        _TEXTS + "test_a_space_is_not_put_before_a_text_that_goes_on",
    ),
    Fault(
        "A token that spans prompt and text changes the prompt of a scored text",
        "ids_after",
        "if whole[: len(before)] == before:",
        "if True:",
        _TEXTS + "test_a_token_that_would_span_both_is_not_made",
    ),
    Fault(
        "A metric or a lens reads a word as the token with a space before it",
        "one_token_id",
        "ids = following_ids(tokenizer, text)",
        "ids = tokenizer.encode(text, add_special_tokens=False)",
        _TEXTS + "test_a_word_is_the_token_that_spells_it_with_its_space",
    ),
    Fault(
        "An answer to another tool's field denies a site that exists",
        "FOREIGN",
        "ForeignField(VLLM_LENS, _QUERIES)",
        'ForeignField(VLLM_LENS, "queries and keys are no sites of midstream")',
        _FOREIGN + "test_nothing_is_denied_and_every_field_that_is_named_is_one",
    ),
    Fault(
        "What is recommended in place of another tool's field cannot be written so",
        "_clamps",
        '_call(Clamp, "vector", low="…", high="…", layer="…", **phase)',
        '_call(Clamp, "vector", "low", "high", layer="…", **phase)',
        _FOREIGN + "test_every_call_that_is_recommended_can_be_written_so",
    ),
    Fault(
        "A misspelt field with an empty list is ignored",
        "_problem",
        "_has_form(value) or _is_empty(value) and _is_slip(name, near)",
        "_has_form(value)",
        _FOREIGN + "test_a_misspelt_field_that_is_empty_is_rejected_too",
    ),
    Fault(
        "A message of whitespace is left out of a selection of messages",
        "_Finder.all",
        "if has_media or any(texts):",
        "if has_media or any(text.strip() for text in texts):",
        _MESSAGES + "test_a_message_of_whitespace_has_the_tokens_that_the_template_wrote_for_it",
    ),
    Fault(
        "A message whose thinking the template dropped is selected without it",
        "message_spans:_within",
        "if left_out:",
        "if False:",
        _MESSAGES + "test_a_message_whose_thinking_a_template_drops_is_not_taken_for_the_rest",
    ),
    Fault(
        "llm.sites() tells to add a site to the settings that the layers do not have",
        "tapped_rank:tap_model",
        "{**all_lacks(model, *args, *limits), **decoder.lacking}",
        "dict(decoder.lacking)",
        "tests/engine/test_sites.py::test_sites_that_a_model_lacks_are_refused_by_name",
    ),
)
