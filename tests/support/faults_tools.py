"""Faults of the commands that look at an installation and open the documents."""

from __future__ import annotations

from support.fault import Fault

TOOLS: tuple[Fault, ...] = (
    Fault(
        "`midstream docs` opens a file outside of the documents",
        "docs",
        "if SITE.resolve() not in file.parents or not file.is_file():",
        "if not file.is_file():",
        "tests/unit/cli/test_docs.py::test_an_unknown_page_is_rejected_and_the_pages_are_named",
    ),
    Fault(
        "`midstream doctor --env` reports an installation as good whose vLLM differs in a seam",
        "_seams",
        "differences.append(str(error))",
        "str(error)",
        "tests/lab/tools/doctor/test_environment.py"
        "::test_differences_of_all_checks_of_seams_are_collected",
    ),
    Fault(
        "`midstream doctor --env` reports an environment as good that keeps vLLM from loading"
        " midstream",
        "find_problems",
        "plugins is not None",
        "plugins",
        "tests/lab/tools/doctor/test_environment.py::test_what_is_odd_is_named_with_what_to_do",
    ),
    Fault(
        "The doctor says that an image was in the prompt and compares no row of it",
        "drawn_images:image_requests",
        "if images != DRAWN:",
        "if images != PROCESSED:",
        "tests/engine/test_doctor.py"
        "::test_a_multimodal_class_is_compared_with_an_image_in_the_prompt",
    ),
    Fault(
        "The doctor calls an edit wrong whose effect is too small to verify",
        "judge_operation",
        "return OperationFound(case.name, site, layer, UNCOMPARED, None, reason)",
        "pass",
        "tests/lab/tools/doctor/test_judge.py"
        "::test_an_edit_that_does_too_little_to_verify_in_bfloat16_is_not_compared",
    ),
    Fault(
        "The doctor adds a half that nothing reads to the stream of vLLM's own modules",
        "OwnModules._find_halves",
        "if effect(0, 1) == 0:",
        "if False:",
        "tests/lab/tools/doctor/test_own_modules.py"
        "::test_a_second_half_that_nothing_reads_is_no_part_of_the_stream",
    ),
    Fault(
        "The doctor compares an engine with one model with that model's own taps",
        "OwnModules._check_apart",
        "if self._given:",
        "if False:",
        "tests/lab/tools/doctor/test_own_modules.py"
        "::test_an_engine_with_one_model_is_none_to_compare_with",
    ),
    Fault(
        "The doctor blames taps for rounding in half precision",
        "judge:merge",
        "not finding.error <= _ROUNDING * rounding",
        "True",
        "tests/lab/tools/doctor/test_judge.py"
        "::test_what_differs_no_more_than_right_sites_in_half_precision_is_no_evidence",
    ),
    Fault(
        "The doctor blames taps for what vLLM itself computes differently than transformers",
        "judge:merge",
        "if finding.outcome != WRONG or theirs.outcome == INCOMPARABLE:",
        "if finding.outcome != WRONG:",
        "tests/lab/tools/doctor/test_judge.py"
        "::test_where_vllm_itself_differs_only_what_matches_transformers_is_shown",
    ),
    Fault(
        "The doctor takes a branch for the stream's whose sum the layer does not go on with",
        "own_modules:find_branches",
        "if any(row_error(rows, pre + branch) <= limit for rows in [*later, post]):",
        "if True:",
        "tests/lab/tools/doctor/test_own_modules.py"
        "::test_a_branch_that_the_layer_scales_is_not_compared",
    ),
)
