"""Vectors that are sent once: which plans name them, and when the workers drop them."""

import numpy as np
import pytest
from support.plans import SMALL, VECTORS, add, gated, plan_of, probe, rows

from midstream.plan import Vector
from midstream.plan.resolve.wire import from_bytes, to_bytes
from midstream.runtime.frontend.request import sent_vectors
from midstream.runtime.frontend.request.sent_vectors import (
    MOST_BY_VALUE,
    MOST_UNUSED,
    SentVectors,
    named_vectors,
)
from midstream.runtime.protocol.vector_update import VectorUpdate

POST = ("resid_post", 1)
A, B, C, D, E = VECTORS
SIZE = len(A.data)


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    """The limits as they are; engines of other tests in this process have lowered them."""
    monkeypatch.setattr(sent_vectors, "MOST_BY_VALUE", MOST_BY_VALUE)
    monkeypatch.setattr(sent_vectors, "MOST_UNUSED", MOST_UNUSED)


def added(*vectors: Vector) -> VectorUpdate:
    return VectorUpdate((), tuple(vector.data for vector in vectors))


def large(nth: int, numbers: int = MOST_BY_VALUE // 4 + 1) -> Vector:
    return Vector.parse(np.full(numbers, nth + 1.0))


def test_a_plan_with_few_numbers_has_them_by_value():
    small = large(0, MOST_BY_VALUE // 4)
    assert named_vectors(plan_of([(POST, add(small), ((0, None),))])) == ()
    assert named_vectors(plan_of([(POST, add(large(0)), ((0, None),))])) == (large(0),)


def test_the_numbers_of_a_plan_count_together_and_equal_vectors_once():
    half = [large(nth, MOST_BY_VALUE // 8) for nth in range(3)]
    edits = [(("resid_post", nth), add(half[nth % 2]), ((0, None),)) for nth in range(3)]
    assert named_vectors(plan_of(edits)) == ()
    edits.append((POST, add(half[2]), ((4, 5),)))
    assert named_vectors(plan_of(edits)) == tuple(half)


def test_every_vector_of_a_plan_is_named():
    edits = [
        (POST, gated(add(large(0)), slot=0), ((0, 3),)),
        (POST, rows(3, 5), ((5, 8),)),
        (("resid_post", 0), probe(large(1)), ((0, 3),)),
    ]
    plan = plan_of(edits, (), [("p", POST, ((0, 3),))])
    named = named_vectors(plan)
    assert set(named) == {large(0), large(1), SMALL[0], *edits[1][1][0].write}
    assert len(to_bytes(plan, named)) < MOST_BY_VALUE
    assert from_bytes(to_bytes(plan, named), {one.digest: one for one in named}) == plan


def test_completions_of_one_prompt_and_inputs_of_a_session_need_it_once():
    sent = SentVectors(0)
    assert sent.take("u", [A]) == added(A)
    assert sent.take("u", [A]) is None
    sent.release("u")
    assert sent.in_use == 0


def test_vectors_that_nobody_names_stay_up_to_a_number_of_bytes_and_the_oldest_go_first():
    sent = SentVectors(2 * SIZE)
    for name, vector in zip("uvwx", [A, B, C, D], strict=True):
        assert sent.take(name, [vector]) == added(vector)
    for name in "vuxw":
        sent.release(name)
    assert sent.take("y", [A]) == VectorUpdate((B.digest,), ())
    sent.release("y")
    assert sent.take("z", [E]) == VectorUpdate((D.digest,), (E.data,))
    assert sent.take("z2", [C, A]) is None
    sent.check_integrity([3])


@pytest.mark.parametrize("ends_first", [False, True])
def test_an_update_that_was_lost_is_sent_with_the_next_request(ends_first):
    sent = SentVectors()
    update = sent.take("u", [A, B])
    if ends_first:
        sent.release("u")
    sent.lose(update)
    sent.check_integrity([0])
    assert sent.take("v", [B]) == added(B)
    sent.release("u")
    sent.release("v")
    assert sent.in_use == 0
    sent.check_integrity([1])


def test_as_many_matrices_stay_as_the_device_has_room_for(monkeypatch):
    monkeypatch.setattr(sent_vectors, "MOST_UNUSED", SIZE)
    sent = SentVectors(matrices=2 * SIZE)
    for vector in (A, B, C):
        assert sent.take(vector.digest, (vector,)) == added(vector)
        sent.release(vector.digest)
    assert sent.take("again", (A,)) is None
    sent.release("again")
    assert sent.take("more", (D,)) == added(D)
    sent.release("more")
    found = sent.take("most", (E,))
    assert found == VectorUpdate((B.digest,), (E.data,))
