"""Faults in the positions of images, and where their tokens attend both ways; see `faults`."""

from __future__ import annotations

from support.fault import Fault

_RANGES = "tests/unit/runtime/core/test_image_ranges.py::"
_LOCATE = "tests/unit/plan/positions/test_locate.py::"
_MEDIA = "tests/unit/runtime/frontend/request/prompt/test_media.py::"
_DECODED = "tests/unit/plan/positions/test_decoded_text.py::"
_MESSAGES = "tests/unit/runtime/frontend/request/prompt/test_message_spans.py::"

IMAGES: tuple[Fault, ...] = (
    Fault(
        "KV of an image's first tokens is shared although a later token of it is edited",
        "extra_keys",
        "end_of_images(request, stop)",
        "stop",
        _RANGES + "test_an_edit_at_the_last_token_of_an_image_is_in_the_key_of_the_block_of_its_"
        "first",
    ),
    Fault(
        "A plain request gets rows of an image that another request edited",
        "end_of_images",
        "max(stop, end)",
        "stop",
        "tests/engine/test_image_cache.py::"
        "test_requests_with_edits_in_and_beside_images_get_what_they_get_alone",
    ),
    Fault(
        "A model whose image tokens attend both ways counts as causal",
        "BaseFrontEnd.__init__",
        "bool(engine.vllm_config.model_config.is_mm_prefix_lm)",
        "False",
        "tests/engine/test_mm_prefix.py::test_a_payload_says_whether_image_tokens_attend_both_ways",
    ),
    Fault(
        "The rest of an image that is cached in part is computed in two steps",
        "computed_blocks",
        "while (whole := start_of_images(request, hit[1])) < hit[1]:",
        "while (whole := hit[1]) < hit[1]:",
        _RANGES + "test_a_hit_ends_in_no_image_and_below_what_is_read_and_is_the_longest_of_these",
    ),
    Fault(
        "KV of an image's first tokens outlives a request that failed to edit a later one",
        "_wrong_blocks",
        "first = start_of_images(request, first)",
        "",
        _RANGES
        + "test_a_request_that_was_served_an_image_ends_with_the_one_that_failed_to_edit_it",
    ),
    Fault(
        "Image(0) is the first item of the prompt, of whatever kind",
        "Locator._media",
        "media.kind == item.kind",
        "True",
        _LOCATE + "test_media_are_counted_by_kind_and_are_where_their_embeddings_are",
    ),
    Fault(
        "Tokens around an image are selected with it",
        "media:_item",
        "place.is_embed is not None",
        "False",
        _MEDIA + "test_items_are_in_the_order_of_the_prompt_and_hold_what_vllm_marks_as_embeddings",
    ),
    Fault(
        "Images are counted in the order in which vLLM lists their features",
        "media:media_of",
        "tuple(sorted(items, key=lambda item: item.start))",
        "tuple(items)",
        _MEDIA + "test_items_are_in_the_order_of_the_prompt_and_hold_what_vllm_marks_as_embeddings",
    ),
    Fault(
        "A plan that is prepared ahead of its request knows no images",
        "request_plans:_request_of",
        "places_of_rendered(prompt)",
        "[]",
        "tests/unit/server/test_work.py::"
        "test_a_plan_that_is_prepared_ahead_knows_the_images_of_its_prompt",
    ),
    Fault(
        "Images do not count for the budget of positions",
        "Locator._media",
        "self.budget.match(len(ranges))",
        "",
        _LOCATE + "test_tokens_of_media_count_for_the_budget",
    ),
    Fault(
        "Text between images is taken where it is found first, though it is there twice",
        "decoded_text:_gaps",
        "if from_left != from_right[::-1]:",
        "if False:",
        _DECODED + "test_what_stands_for_media_may_have_any_length_but_one_place",
    ),
    Fault(
        "A chat is rendered with its images loaded again",
        "chat_renderer",
        "list(map(_unloaded, messages))",
        "messages",
        _MESSAGES + "test_media_are_rendered_without_being_loaded",
    ),
    Fault(
        "The content of a message with images is its text alone",
        "_Finder._message",
        "_whole if index in self._with_media else _within",
        "_within",
        _MESSAGES + "test_the_content_of_a_message_with_images_is_text_and_images",
    ),
    Fault(
        "A tokenizer of mistral_common is asked for offsets, which it does not have",
        "map_of_rendering",
        'getattr(tokenizer, "is_fast", False) and hasattr(tokenizer, "backend_tokenizer")',
        'getattr(tokenizer, "is_fast", False)',
        _DECODED + "test_a_tokenizer_that_is_fast_but_has_no_offsets_is_decoded",
    ),
    Fault(
        "Copied rows do not say where the images are",
        "Activations.copy",
        "self.positions_of_media",
        "()",
        "tests/unit/results/test_activations.py::test_copies_say_where_the_media_of_the_prompt_are",
    ),
    Fault(
        "Rows that a server sends do not say where the images are",
        "PackedRows.__init__",
        "activations.positions_of_media",
        "()",
        "tests/unit/results/test_activations.py::test_files_say_where_the_media_of_the_prompt_are",
    ),
)
