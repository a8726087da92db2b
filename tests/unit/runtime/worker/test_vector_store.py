"""Vectors in a worker's memory, by digests that the worker computes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_steps import FakeEngine
from support.plans import VECTORS, add, plan_of

from midstream.errors import SpecError
from midstream.plan import Vector
from midstream.plan.resolve.wire import to_bytes
from midstream.runtime.protocol.vector_update import VectorUpdate
from midstream.runtime.worker.plan_table import VectorStore


def test_a_vector_stays_until_each_front_end_that_added_it_has_dropped_it():
    store = VectorStore()
    one, two = VECTORS[0], VECTORS[1]
    store.update(VectorUpdate((), (one.data,), 0))
    store.update(VectorUpdate((), (one.data, two.data), 1))
    store.update(VectorUpdate((one.digest, two.digest), (), 0))  # the second is not its own
    assert set(store.by_digest) == {one.digest, two.digest}
    assert (store.count(0), store.count(1), store.count(2)) == (0, 2, 0)
    store.update(VectorUpdate((one.digest,), (), 1))
    assert set(store.by_digest) == {two.digest}


@given(st.integers(1, 300), st.data())
def test_vectors_that_differ_in_any_number_have_different_digests(size, data):
    numbers = np.arange(size, dtype="<f4")
    at = data.draw(st.integers(0, size - 1))
    changed = numbers.copy()
    changed[at] += 0.5
    store = VectorStore()
    store.update(VectorUpdate((), (numbers.tobytes(), changed.tobytes())))
    assert len(store.by_digest) == 2
    for one in (numbers, changed):
        vector = store.by_digest[Vector.parse(one).digest]
        assert np.array_equal(vector.numpy(), one)


@pytest.mark.parametrize("data", [b"", b"abc", np.array([np.nan], "<f4").tobytes()])
def test_what_is_no_vector_is_refused(data):
    with pytest.raises(SpecError):
        VectorStore().update(VectorUpdate((), (data,)))


def test_a_plan_that_was_read_before_does_not_keep_vectors_that_were_dropped():
    table = FakeEngine().session.requests
    plan = to_bytes(plan_of([(("resid_post", 1), add(), ((0, 9),))]), {VECTORS[0]})
    table.plans.update_vectors(VectorUpdate((), (VECTORS[0].data,)))
    table.add("r", "r", plan)
    table.plans.update_vectors(VectorUpdate((VECTORS[0].digest,), ()))
    table.add("s", "s", plan)  # its vector is that of the plan that runs
    for name in ("r", "s"):
        table.finish(name)
    assert not table.failures
    table.add("t", "t", plan)
    assert list(table.failures) == ["t"]
