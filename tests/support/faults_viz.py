"""Faults of pictures and reports; see `support.faults`."""

from __future__ import annotations

from support.fault import Fault

PICTURES = "tests/unit/viz/test_pictures.py::"

VIZ: tuple[Fault, ...] = (
    Fault(
        "A token ends an attribute of a picture",
        "tag",
        "escape(str(value))",
        "value",
        PICTURES + "test_hostile_text_stays_text_in_every_place",
    ),
    Fault(
        "A token reorders the text around it",
        "_is_safe",
        "127 <= code < 160 or 55296 <= code < 57344 or code in _BIDI",
        "127 <= code < 160 or 55296 <= code < 57344",
        PICTURES + "test_text_is_escaped_for_elements_and_attributes",
    ),
    Fault(
        "A saved picture runs any script",
        "document",
        "f\"default-src 'none'; style-src {source_of(style)}; script-src {source_of(SCRIPT)}; base-uri 'none'; form-action 'none'\"",
        "f\"default-src 'none'; style-src {source_of(style)}; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'\"",
        PICTURES + "test_a_saved_page_allows_only_its_own_style_and_script",
    ),
    Fault(
        "The file of a report has another direction than the one that was steered with",
        "run",
        '_file_of(fitted.save, "directions.safetensors")',
        '_file_of(fitted.at(fitted.layers[1:]).save, "directions.safetensors")',
        "tests/lab/report/test_run.py"
        "::test_the_file_to_download_has_the_direction_that_was_steered_with",
    ),
)
