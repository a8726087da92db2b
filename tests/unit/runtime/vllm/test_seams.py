"""How the attributes that vLLM's methods set are found in their code."""

import dis
from functools import wraps
from unittest import mock

from midstream.runtime.vllm import seams


class Parent:
    def _set_up(self, other):
        self.steps = other.turns = 0


class Runner(Parent):
    rows: int

    @wraps(Parent._set_up)
    def prepare(self, other):
        return self._set_up(other)

    def read(self):
        return self.lacking


def test_attributes_of_a_class_are_those_that_its_methods_set_on_their_own_object():
    assert all(seams._has(Runner, name) for name in ("rows", "steps", "read"))
    assert not any(seams._has(Runner, name) for name in ("turns", "lacking", "other"))


def test_a_method_is_disassembled_once_however_many_attributes_are_looked_for():
    assert seams._has(Runner, "steps")
    with mock.patch.object(dis, "get_instructions", side_effect=AssertionError("again")):
        assert seams._has(Runner, "steps")
        assert not seams._has(Runner, "turns")
