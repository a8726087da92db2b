"""Rows of any addresses come to their places."""

import multiprocessing
import threading
import warnings

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from midstream.store.row_places import RowPlaces


@given(
    width=st.integers(1, 40).flatmap(lambda n: st.sampled_from([n, 16 * n, 2000 * n])),
    step=st.sampled_from([1, 2, 4, 8, 16, 64]),
    seed=st.integers(0, 99),
)
def test_rows_of_several_files_come_to_their_places_whatever_their_distances(width, step, seed):
    made = np.random.default_rng(seed)
    files = [made.integers(0, 256, 40 * width + 4096, np.uint8) for _ in range(3)]
    chosen = made.integers(0, 3, (60, 2))
    # Each file's rows are multiples of a row after a place that is one of `step`.
    starts = made.integers(0, 40, (60, 2)) * width + (made.integers(0, 64, 3) * step)[chosen]
    bases = np.array([file.ctypes.data for file in files])
    places = RowPlaces([], bases[chosen] + starts)
    data = torch.zeros(50, 2, width, dtype=torch.uint8)
    places.copy(5, 55, data)
    for row, copied in enumerate(data.numpy(), 5):
        for tap in range(2):
            start = starts[row, tap]
            assert (copied[tap] == files[chosen[row, tap]][start : start + width]).all()


def _copy_in_threads(begun: threading.Barrier, places: RowPlaces, failed: list[Exception]) -> None:
    data = torch.empty(len(places.addresses), 2, 64, dtype=torch.uint8)
    begun.wait(20)
    try:
        places.copy(0, len(data), data)
        assert (data.numpy() == 7).all()
    except (RuntimeError, AssertionError) as error:
        failed.append(error)


def _four_threads(places: RowPlaces) -> None:
    begun, failed = threading.Barrier(4), []
    arguments = begun, places, failed
    threads = [threading.Thread(target=_copy_in_threads, args=arguments) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    raise SystemExit(len(failed) + sum(thread.is_alive() for thread in threads))


def test_threads_of_a_process_that_is_a_fork_copy_rows_at_once_after_torch_had_threads():
    """Torch makes its own threads anew in a fork, and fails if two threads ask for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.rand(1 << 20).exp()
    torch.set_num_threads(threads)
    file = np.full(1 << 20, 7, np.uint8)
    places = RowPlaces([], file.ctypes.data + np.arange(8000).reshape(-1, 2) * 80)
    for _ in range(8):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
            child = multiprocessing.get_context("fork").Process(target=_four_threads, args=[places])
            child.start()
        child.join(60)
        assert child.exitcode == 0
