"""Faults of the budget for the work that a client asks for."""

from __future__ import annotations

from support.fault import Fault

POSITIONS = "tests/unit/plan/positions/"
TEST_WORK = "tests/unit/server/test_work.py"
TEST_GROW = "tests/unit/server/test_bodies_that_grow.py"
INDEX = POSITIONS + "test_prompt_index.py"

WORK: tuple[Fault, ...] = (
    Fault(
        "Each text of a request takes a pass over the prompt",
        "TextIndex.find",
        "low = bisect_left(self._sorted_places, wanted, key=part)",
        "low = sum(part(place) < wanted for place in self._sorted_places)",
        INDEX + "::test_a_text_costs_about_as_much_in_a_long_prompt_as_in_a_short_one",
    ),
    Fault(
        "A text is found where it ends within a token",
        "TextIndex.find",
        "numbers = np.sort(numbers[is_found])",
        "numbers = np.sort(numbers)",
        POSITIONS + "test_text_map.py::test_texts_are_found_by_whole_tokens_but_for_whitespace",
    ),
    Fault(
        "A text that is longer than those before it is searched for by its beginning alone",
        "TextIndex.find",
        "self._sort_by(size)",
        "",
        INDEX + "::test_longer_texts_are_found_after_shorter_ones",
    ),
    Fault(
        "The occurrences of texts are listed before they are counted",
        "TextIndex.find",
        "budget.match(high - low)",
        "",
        INDEX + "::test_occurrences_are_counted_before_they_are_listed",
    ),
    Fault(
        "A chat is rendered once for each of its messages",
        "_Finder.all",
        "regions = self._regions()",
        "regions: dict[int, Region] = {}",
        "tests/unit/runtime/frontend/request/prompt/test_message_spans.py"
        "::test_a_chat_is_rendered_twice_however_many_messages_it_has",
    ),
    Fault(
        "A chat whose messages must be rendered one by one is rendered without an end",
        "_Finder._region_of",
        "check_rendered(self._rendered)",
        "",
        "tests/unit/runtime/frontend/request/prompt/test_message_spans.py"
        "::test_renderings_for_single_messages_have_a_budget",
    ),
    Fault(
        "Spans with a step cost nothing of a plan's budget",
        "Locator._span",
        "self.budget.match(len(chosen))",
        "",
        POSITIONS + "test_select.py"
        "::test_ranges_of_spans_with_a_step_are_counted_over_all_selections_of_a_plan",
    ),
    Fault(
        "The versions of a plan, and its overlapping parts, are resolved however many they are",
        "_Resolver.resolve",
        "check_overlaps(weighed(resolved), 1 + len(plan.switches))",
        "",
        TEST_WORK + "::test_combinations_of_parts_have_a_budget_in_all_versions_of_a_plan",
    ),
    Fault(
        "A plan is resolved for any number of prompts of a call",
        "Server.begin",
        "check_called(_num_prompts(body), size_of(parts, layers))",
        "check_called(1, size_of(parts, layers))",
        TEST_WORK + "::test_prompts_times_a_plan_have_a_budget",
    ),
    Fault(
        "A fit locates any number of positions in any number of prompts",
        "read_fit",
        "check_called(len(positive) + len(negative), items)",
        "",
        TEST_WORK + "::test_prompts_of_a_fit_times_its_positions_have_a_budget",
    ),
    Fault(
        "A sweep's groups of whole prompts are patched however many there are",
        "cells:_places",
        "if count > MAX_GROUPED:",
        "if count > 64 * MAX_GROUPED:",
        "tests/lab/sweep/test_cells.py::test_positions_of_groups_have_a_budget",
    ),
    Fault(
        "A large plan is resolved on the event loop",
        "RequestPlans.resolve_ahead",
        "await in_thread(self._resolver.resolve, *args)",
        "self._resolver.resolve(*args)",
        TEST_WORK + "::test_a_large_plan_is_resolved_once_and_in_a_thread",
    ),
    Fault(
        "Compressed arrays are limited one by one, and not together",
        "vllm_lens:_read_vectors",
        "check_compressed(item.get('activations') for item in value if isinstance(item, Mapping))",
        "",
        TEST_GROW + "::test_compressed_arrays_of_a_body_have_a_budget_together",
    ),
    Fault(
        "JSON that is a text in a body has any number of values",
        "read_json_text",
        "if has_more_values(text):",
        "if not isinstance(text, str):",
        TEST_GROW + "::test_json_as_text_has_no_more_values_than_a_body",
    ),
    Fault(
        "Compressed arrays within a text are decompressed on the event loop",
        "_GROWING",
        "b'zstd'",
        "b'\"zstd\"'",
        TEST_GROW + "::test_a_body_that_becomes_long_is_parsed_in_a_thread_however_it_is_written",
    ),
    Fault(
        "A row that many patches take is read for each of them",
        "vllm_fork:",
        "if row not in vectors:",
        "if row >= 0:",
        TEST_GROW + "::test_patches_that_take_one_row_read_it_once",
    ),
    Fault(
        "Tensors of an uploaded file that share bytes are each decoded",
        "gguf:",
        "if nbytes > len(data):",
        "if nbytes > 64 * len(data):",
        TEST_GROW + "::test_tensors_of_an_uploaded_file_share_no_bytes",
    ),
    Fault(
        "Metadata of an uploaded file have any number of numbers",
        "gguf:",
        "if self._numbers > MAX_METADATA:",
        "if self._numbers > 64 * MAX_METADATA:",
        TEST_GROW + "::test_metadata_of_an_uploaded_file_have_a_budget",
    ),
    Fault(
        "A body of a route has a list of which nobody knows the cost",
        "TokensBody",
        'model_config = ConfigDict(extra="forbid", strict=True)',
        'model_config = ConfigDict(extra="forbid", strict=True)\nmore: list[int] | None = None',
        TEST_WORK + "::test_every_field_of_every_route_has_a_list_or_takes_none",
    ),
    Fault(
        "A long member of a body is written again, and nothing else runs meanwhile",
        "middleware:_written",
        "name in places and before[name] is member",
        "name in places and before[name] is member and not member",
        "tests/unit/server/test_middleware.py"
        "::test_members_of_a_body_that_did_not_change_keep_their_text",
    ),
    Fault(
        "The event loop waits while a change of server-wide captures is checked",
        "ServerCaptures.set",
        "self._check(tuple(named_capture for several in new.values() for named_capture in several))",
        "with self._lock:\n"
        "    self._check(tuple(named_capture for several in new.values() for named_capture in several))",
        "tests/unit/sinks/test_server_captures.py"
        "::test_who_reads_does_not_wait_while_a_change_is_checked",
    ),
)
