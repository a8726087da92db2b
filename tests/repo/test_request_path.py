"""A plain plan enters few files: what it does not ask for has no part in its way."""

from __future__ import annotations

from support.request_path import entered, front_end_stages, worker_stages

# A change that enters more files says in its commit what they are for.
MOST_RESOLVED = 30
MOST_OF_A_WORKER = 40


def test_a_plain_plan_is_resolved_by_few_files():
    files = entered(front_end_stages(), lambda name: name.startswith("resolve"))
    assert len(files) <= MOST_RESOLVED, sorted(files)


def test_a_plain_request_and_its_step_enter_few_files_of_the_worker():
    files = entered(worker_stages(), lambda _: True)
    assert 10 < len(files) <= MOST_OF_A_WORKER, sorted(files)
