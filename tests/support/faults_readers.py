"""Faults of what is read: files, tokens, and where a loaded model has its sites; see `faults`."""

from __future__ import annotations

from support.fault import Fault
from support.faults_images import IMAGES

READERS: tuple[Fault, ...] = (
    *IMAGES,
    Fault(
        "The first line of a dataset is lost where the file has a byte order mark",
        "_without_mark",
        "yield line.removeprefix(mark)",
        'yield line.removeprefix(b"")',
        "tests/lab/jobs/test_sources.py::test_a_byte_order_mark_is_no_part_of_the_first_line",
    ),
    Fault(
        "What a model does to the stream in front of its first layer counts as its embedding",
        "_Walk._given_to_first",
        "frozenset({_OTHER}) if name in stored and state else state",
        "state",
        "tests/unit/runtime/models/test_trunk_ends.py"
        "::test_what_is_not_known_to_be_the_value_is_missing_with_the_reason",
    ),
    Fault(
        "A branch between layers that changes the stream is taken for one that cannot run",
        "_fails",
        "if any(isinstance(name, ast.Name) and name.id in nones for name in used):",
        "if isinstance(node, ast.BinOp):",
        "tests/unit/runtime/models/test_trunk_ends.py"
        "::test_a_branch_that_fails_without_a_residual_is_not_taken_before_the_first_layer",
    ),
    Fault(
        "A key of a vector file with another tool's name is of another layer",
        "parse:_read_name",
        "pair = parse(key)",
        'pair = parse(key.replace("15", "14"))',
        "tests/unit/steering/test_files.py::test_keys_are_any_name_of_a_site_and_a_layer",
    ),
    Fault(
        "Text selects a token of which it has no more than a blank",
        "TextIndex.__init__",
        "np.where(solid[start] >= ends, start, -1)",
        "np.where(solid[start] >= ends, ends, -1)",
        "tests/unit/plan/positions/test_text_map.py"
        "::test_texts_are_found_by_whole_tokens_but_for_whitespace",
    ),
)
