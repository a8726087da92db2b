"""Leases on arena memory, whose flags other processes set at any time."""

import numpy as np
import pytest

from midstream.transport.leases import DONE, Leases


class SetMeanwhile(np.ndarray):
    """Flags that another process sets while NumPy counts them."""

    def nonzero(self):
        raise RuntimeError("number of non-zero array elements changed during function execution.")


def test_a_flag_that_is_set_while_flags_are_read_ends_its_lease_and_not_the_engine():
    leases = Leases()
    numbers = [leases.give([nth]) for nth in range(5)]
    leases._flags = leases._flags.view(SetMeanwhile)
    with pytest.raises(RuntimeError):
        leases._flags.nonzero()
    leases._flags[numbers[1]] = leases._flags[numbers[3]] = DONE
    assert leases.ended() == [[1], [3]]
    assert leases.ended() == []
    assert len(leases) == 3
