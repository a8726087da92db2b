"""An id that is used again while its first bearer is still being settled."""

from __future__ import annotations

from support.fake_steps import TAPS, Fake, FakeEngine

from midstream.plan import ModelShape, Plan, Prompt, Steer
from midstream.plan.resolve.resolve import resolve

SHAPE = ModelShape(3, 4, TAPS)


def steering(value: float):
    plan = Plan.make(edits=Steer([value] * 4, layer=1))
    return resolve(plan, SHAPE, Prompt(3), 20)


def test_a_plain_request_with_the_id_of_one_that_just_ended_is_left_alone():
    # Its rows must not be mapped to the old slot, whose program is another request's by now.
    engine = FakeEngine(lag=2)
    first = Fake("X", steering(1.0), uid="u1")
    engine.add(first)
    for count in (3, 1, 1):
        engine.step([(first, count)])
    engine.session.requests.finish(["X"])
    plain, other = Fake("X"), Fake("B", steering(9.0), uid="u2")
    engine.add(other)
    engine.step([(plain, 3), (other, 3)])
    engine.step([(plain, 1), (other, 1)])
    (taken,) = engine.take("u1")
    assert taken.problem == ""
    assert taken.done.tolist() == first.done
