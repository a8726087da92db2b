"""Faults where tokens of an image attend to each other both ways; see `faults`."""

from __future__ import annotations

from support.fault import Fault

_RANGES = "tests/unit/runtime/core/test_image_ranges.py::"

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
)
