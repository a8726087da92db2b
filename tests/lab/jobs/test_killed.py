"""A job that is killed at any instant loses nothing that it had, and does nothing twice."""

import random

import pytest
from lab.jobs.killing import LINES, Killed
from support.nightly import rounds


@pytest.mark.engine  # in processes of their own
def test_jobs_that_are_killed_at_random_are_resumed_without_a_lost_or_doubled_row(tmp_path):
    chance = random.Random(11)
    kills = jobs = 0
    while kills < rounds(suite=5, nightly=200):
        jobs += 1
        folder = tmp_path / str(jobs)
        folder.mkdir()
        killed = Killed(folder)
        while not killed.start_and_kill(chance.expovariate(1 / 0.08)):
            kills += 1
            killed.check()
        killed.check()
        assert killed.acknowledged == LINES
