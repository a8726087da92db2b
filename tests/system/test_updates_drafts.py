"""Updates of requests with draft tokens, in a process of its own: see what it runs."""

from pathlib import Path

import pytest
from support.own_process import environment, start

CASES = Path(__file__).with_name("updates_while_drafting.py")


@pytest.mark.nightly
def test_updates_of_requests_with_drafts_hold_where_the_receipt_says() -> None:
    process = start("-m", "pytest", "-q", "-p", "no:xdist", CASES, env=environment())
    assert process.wait(timeout=300) == 0
