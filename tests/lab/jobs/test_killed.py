"""A job that is killed at any instant loses nothing that it had, and does nothing twice."""

import random

import pytest
from lab.jobs.killing import Killed, KilledPacks
from support.nightly import rounds
from support.tokenizers import byte_level

pytestmark = pytest.mark.engine  # in processes of their own


def kill_at_random(folders, make, kills):
    """Kills jobs on data that `make` writes into a folder, each until it ends, so many times."""
    chance = random.Random(11)
    jobs = 0
    while kills:
        jobs += 1
        folder = folders / str(jobs)
        folder.mkdir()
        killed = make(folder)
        while not killed.start_and_kill(chance.expovariate(1 / 0.08)):
            kills -= kills > 0
            killed.check()
        killed.check()
        assert killed.acknowledged == killed.total


def test_jobs_that_are_killed_at_random_are_resumed_without_a_lost_or_doubled_row(tmp_path):
    kill_at_random(tmp_path, Killed, rounds(suite=5, nightly=200))


def test_packs_with_masks_have_every_token_once_however_often_the_job_is_killed(tmp_path):
    tokenizer = byte_level()
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "jobs").mkdir()

    def make(folder):
        return KilledPacks(folder, str(tmp_path / "model"))

    kill_at_random(tmp_path / "jobs", make, rounds(suite=4, nightly=20))
