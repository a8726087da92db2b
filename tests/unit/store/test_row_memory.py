"""Memory of a batch is used again only when nothing refers to it."""

import pickle

import torch

from midstream.store.row_memory import RowMemory


def test_memory_is_used_again_once_nothing_refers_to_it():
    memory = RowMemory(False)
    first = memory.empty((4, 8))
    address = first.data_ptr()
    del first
    assert memory.empty((2, 16)).data_ptr() == address
    # Whatever still refers to it keeps it: a tensor, a view in another dtype, an array.
    for view in (
        lambda t: t,
        lambda t: t[1:, 3],
        lambda t: t.view(torch.bfloat16),
        torch.Tensor.numpy,
    ):
        held = view(memory.empty((4, 8)).fill_(3))
        other = memory.empty((4, 8))
        before = held.copy() if not isinstance(held, torch.Tensor) else held.clone()
        other.fill_(7)
        assert (held == before).all()
        assert other.data_ptr() != address
        del held, other, before


def test_more_batches_than_are_kept_have_memory_of_their_own():
    memory = RowMemory(False)
    for size in range(1, 20):
        batches = [memory.empty((size, 8)).fill_(number) for number in range(12)]
        assert [int(batch.max()) for batch in batches] == list(range(12))
        assert len({batch.data_ptr() for batch in batches}) == 12


def test_a_copy_for_another_process_has_no_memory():
    memory = RowMemory(True)
    memory.empty((4, 8))
    assert pickle.loads(pickle.dumps(memory)).empty((2, 2)).shape == (2, 2)
