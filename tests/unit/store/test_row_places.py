"""Rows of any addresses come to their places."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from midstream.store.row_places import RowPlaces


@given(
    width=st.integers(1, 40).flatmap(lambda n: st.sampled_from([n, 16 * n, 20_000 * n])),
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
