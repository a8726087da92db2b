"""A writer that is killed at any instant leaves a store that opens, and all it acknowledged."""

import random

import pytest
from support.nightly import rounds
from unit.store.killing import Killed

from midstream import open_store
from midstream.store import merge, prune, verify

pytestmark = pytest.mark.engine  # starts processes of its own


@pytest.mark.parametrize("die_at", range(rounds(suite=18, nightly=120)))
def test_a_writer_that_dies_before_any_of_its_system_calls(tmp_path, die_at):
    killed = Killed(tmp_path / "store")
    assert killed.run(die_at=die_at)
    killed.check()
    left = [path.name for path in killed.root.iterdir()] if killed.root.exists() else []
    assert all(name.endswith((".safetensors", ".safetensors.tmp")) for name in left)
    assert sum(name.startswith(".") for name in left) <= 1
    last = killed.acknowledged + 20
    assert not killed.run(last=last), "the next one ends by itself"
    killed.check()
    assert len(open_store(killed.root)) == last
    prune(killed.root, older_than_s=0)
    assert not [path for path in killed.root.iterdir() if path.name.endswith(".tmp")]
    killed.check()


@pytest.mark.parametrize("merging", [False, True])
def test_writers_that_are_killed_at_random_and_started_again(tmp_path, merging):
    killed = Killed(tmp_path / "store")
    chance = random.Random(7)
    # Each round reads the whole store, which grows: twice as many take four times as long.
    for _ in range(rounds(suite=5, nightly=100)):
        assert killed.run(after_s=chance.uniform(0, 0.03), merging=merging)
        killed.check()
    merge(killed.root, killed.root)
    prune(killed.root, older_than_s=0)
    killed.check()
    assert verify(killed.root).requests >= killed.acknowledged > 0
