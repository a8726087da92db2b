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
)
